"""One Slurm a session, and the suite's commands as a user of it types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.records.record import RunRecord, find_records, read_record
from benchmarks.status import Row
from tests.slurm.cluster import SlurmCluster, unavailable, wait_until

_STAND_IN = Path(__file__).with_name("stand_in.py")


class Suite:
    """``python -m benchmarks.run`` and ``benchmarks.status`` with runs of its own."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.runs = directory / "runs"
        self.report = directory / "report"
        self.environment: dict[str, str] = {}  # beside that of a client of the cluster

    def beside(self, name: str) -> Suite:
        """Another suite of the same cluster, in a folder of this name."""
        return Suite(self.cluster, self.directory / name)

    def sweep(self, *overrides: str, expect: int | None = 0) -> str:
        """Submit a sweep and return what was printed; ``expect`` is the exit status, None any."""
        process = self._start(*overrides)
        printed, _ = process.communicate(timeout=120)
        assert expect in (None, process.returncode), printed
        return printed

    def stand_in(self, *overrides: str, expect: int | None = 0) -> str:
        """Submit points whose ranks are the stand-in: two ranks on a node."""
        return self.sweep(*self._quick(), *overrides, expect=expect)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Begin to submit such points; the caller waits for the process."""
        return self._start(*self._quick(), *overrides)

    def _quick(self) -> tuple[str, ...]:
        quick = ("num_gpus=2", "measure.gate=false", "measure.warmup_steps=0", "global_batch=4")
        return (f"launcher.worker_python={_STAND_IN}", *quick)

    def _start(self, *overrides: str) -> subprocess.Popen[str]:
        places = (f"runs_dir='{_escaped(self.runs)}'", f"report_dir='{_escaped(self.report)}'")
        shared = ("launcher.sbatch.exclusive=false", "cluster.gpus_per_node=4")
        defaults = ("launcher=slurm", "launcher.sbatch.account=science", *shared)
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.run", "-m", *places, *defaults, *overrides],
            env=self.cluster.environment | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self, expect: int = 0) -> dict[str, Row]:
        """Every point as ``benchmarks.status --json`` tells it, by spec id."""
        command = (sys.executable, "-m", "benchmarks.status", str(self.runs), "--json")
        done = subprocess.run(
            command,
            env=self.cluster.environment | self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == expect, done.stderr
        rows = [Row(**fields) for fields in json.loads(done.stdout)]
        return {row.spec_id: row for row in rows}

    def states(self) -> list[str]:
        """The states of all points, sorted."""
        return sorted(row.state for row in self.status().values())

    def records(self) -> list[RunRecord]:
        """Every record, oldest attempt of a point first."""
        return [read_record(path) for path in find_records([self.runs])]

    def only_record(self) -> RunRecord:
        """The record of the only attempt that there was."""
        (record,) = self.records()
        return record

    def wait_for_records(self, number: int, seconds: float) -> list[RunRecord]:
        """Wait until this many attempts have recorded themselves."""
        what = f"{number} records below {self.runs}"
        wait_until(lambda: len(list(find_records([self.runs]))) >= number, seconds, what)
        return self.records()

    def wait_for_steps(self, number: int, seconds: float = 60) -> Path:
        """Wait until a first rank has measured this many steps; returns its attempt."""

        def stepping() -> list[Path]:
            files = self.runs.glob("*/*/rank_000.jsonl")
            return [f for f in files if f.read_text().count('"step"') >= number]

        wait_until(stepping, seconds, f"{number} steps below {self.runs}")
        return stepping()[-1].parent

    def wait_for_all_steps(self, number: int, seconds: float = 90) -> dict[int, Path]:
        """Wait until all ranks of so many attempts have measured two steps; the attempts by the
        seeds of their points."""

        def stepping() -> dict[int, Path]:
            found = {}
            for attempt in self.runs.glob("*/slurm-*"):
                ranks = [f.read_text().count('"step"') for f in attempt.glob("rank_*.jsonl")]
                if len(ranks) == 2 and min(ranks) >= 2:
                    found[json.loads((attempt / "spec.json").read_text())["seed"]] = attempt
            return found

        what = f"steps of {number} attempts below {self.runs}"
        wait_until(lambda: len(stepping()) >= number, seconds, what)
        return stepping()

    def recorded_by_status(self) -> int:
        """How many records there are after a call of status, which closes what is over."""
        self.status()
        return len(self.records())

    def workers(self) -> list[int]:
        """Processes of ranks below this suite's runs."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "benchmarks.worker" in command and any(str(self.runs) in word for word in command):
                found.append(process.pid)
        return found

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until none of the user's jobs is left in the queue."""
        wait_until(lambda: not self.queue(), seconds, "an empty queue")

    def queue(self) -> list[str]:
        """The ids of the jobs of this suite's sweeps that wait or run."""
        sweeps = {path.name for path in (self.runs / "slurm").glob("*")}
        lines = self.cluster.run("squeue", "--noheader", "--array", "--format=%i %j").splitlines()
        pairs = [line.split() for line in lines]
        return [job for job, name in pairs if name.rpartition("-")[0] in sweeps]


def _escaped(path: Path) -> str:
    return str(path).replace("'", "\\'")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running Slurm; where there can be none, its tests skip with the reason."""
    if reason := unavailable():
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def suite(cluster: SlurmCluster, tmp_path: Path) -> Suite:
    """A suite with empty folders."""
    return Suite(cluster, tmp_path)


@pytest.fixture(scope="session")
def background(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Suite]:
    """What takes long, submitted first and asked for last: a sweep of real ranks, and a time limit.

    The other tests that leave nodes alone run meanwhile.
    """
    suites = {
        name: Suite(cluster, tmp_path_factory.mktemp(name)) for name in ("sweep", "over_time")
    }
    suites["over_time"].stand_in(
        *("seed=3", "launcher.sbatch.time=1", "launcher.grace_s=20"),
    )
    suites["sweep"].sweep(
        *("model=gpt_tiny", "num_gpus=4,8", "contender=zeropp,deepspeed_3d"),
        *("measure.warmup_steps=1", "measure.steps=2", "measure.gate=false"),
        *("measure.timeline=false", "+launcher.sbatch.nice=10000"),  # the others go first,
        "+launcher.sbatch.exclude='zpnode[4-5]'",  # and two nodes are theirs to break
    )
    return suites
