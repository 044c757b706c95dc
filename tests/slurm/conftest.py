"""One Slurm per session, and the suite's commands as a user of it types them.

Tests that are marked ``together`` mostly wait. Those that were selected all begin when the first of
them is asked for, each in a thread with a suite of its own; what follows in their files' order only
collects the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.launch.sweep_status import PointStatus
from benchmarks.records.record import RunRecord, find_records, read_record
from tests.slurm.cluster import SlurmCluster, unavailable
from tests.slurm.commands import Command, call, server
from tests.waiting import wait_until

_STAND_IN = Path(__file__).with_name("stand_in.py")
_RESULT_S = 560.0

# The marks of a test that begins at once with the others.
TOGETHER = [pytest.mark.together, pytest.mark.usefixtures("running")]

FIRST = pytest.mark.together("first")  # the longest

Running = dict[str, Future[None]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The outcome of a test that runs already; pytest calls the other ones."""
    if pyfuncitem.get_closest_marker("together") is None:
        return None
    running: Any = pyfuncitem.funcargs["running"]
    running[pyfuncitem.nodeid].result(timeout=_RESULT_S)
    return True


class Suite:
    """``python -m benchmarks.run`` and ``benchmarks.status`` with runs of its own."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.runs = directory / "runs"
        self.report = directory / "report"
        self.environment: dict[str, str] = {}  # beside that of a client of the cluster

    def sweep(self, *overrides: str) -> str:
        """Submit a sweep of real ranks and return what was printed."""
        command = call("benchmarks.run", self.given(*overrides), self.variables)
        assert command.returncode == 0, command.printed
        return command.printed

    def stand_in(self, *overrides: str, expect: int | None = 0) -> str:
        """Submit points whose ranks are the stand-in, two on a node; the report job is held."""
        command = call("benchmarks.run", self.words(*overrides), self.variables)
        assert expect in (None, command.returncode), command.printed
        return command.printed

    def start(self, *overrides: str) -> Command:
        """Begin to submit such points; the caller waits for the process."""
        return Command("benchmarks.run", self.words(*overrides), self.variables)

    @staticmethod
    def apart_on(node: str) -> tuple[str, str]:
        """What sends points to one node, which no other test uses."""
        return "launcher.sbatch.partition=apart", f"+launcher.sbatch.nodelist={node}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its commands."""
        return self.cluster.environment | self.environment

    def words(self, *overrides: str) -> list[str]:
        """The words of a command that submits points whose ranks are the stand-in."""
        quick = ("num_gpus=2", "measure.gate=false", "measure.warmup_steps=0", "global_batch=4")
        held = "+launcher.report_sbatch.hold=true"
        return self.given(f"launcher.worker_python={_STAND_IN}", held, *quick, *overrides)

    def given(self, *overrides: str) -> list[str]:
        """The words of a command that submits points to this cluster, into the suite's folders."""
        places = (f"runs_dir='{_escaped(self.runs)}'", f"report_dir='{_escaped(self.report)}'")
        shared = ("launcher.sbatch.exclusive=false", "cluster.gpus_per_node=4")
        defaults = ("launcher=slurm", "launcher.sbatch.account=science", *shared)
        words = {word.partition("=")[0]: word for word in (*places, *defaults, *overrides)}
        return ["-m", *words.values()]

    def status(self, expect: int = 0) -> dict[str, PointStatus]:
        """Every point as ``benchmarks.status --json`` tells it, by spec id."""
        done = call("benchmarks.status", [str(self.runs), "--json"], self.variables)
        assert done.returncode == expect, done.printed
        rows = [PointStatus(**fields) for fields in json.loads(done.stdout)]
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

    def wait_for_records(self, number: int) -> list[RunRecord]:
        """Wait until this many attempts have recorded themselves."""
        recorded = "*/*/record.json"  # and not what a script writes late, beside it
        what = f"{number} records below {self.runs}"
        self._wait(lambda: len(list(self.runs.glob(recorded))) >= number, what)
        return self.records()

    def wait_for_steps(self, number: int) -> Path:
        """Wait until all ranks of an attempt have measured this many steps; returns it."""
        self._wait(lambda: self._stepping(number), f"{number} steps below {self.runs}")
        return [*self._stepping(number).values()][-1]

    def _stepping(self, steps: int) -> dict[int, Path]:
        """Attempts whose ranks have all measured this many steps, by the seeds of their points."""
        found = {}
        for header in self.runs.glob("*/slurm-*/attempt.json"):  # written after the spec
            attempt = header.parent
            ranks = [f.read_text().count('"step"') for f in attempt.glob("rank_*.jsonl")]
            spec = json.loads((attempt / "spec.json").read_text())
            if len(ranks) == spec["num_gpus"] and min(ranks) >= steps:
                found[int(spec["seed"])] = attempt
        return found

    def wait_for_all_steps(self, number: int) -> dict[int, Path]:
        """Wait until all ranks of this many attempts have measured two steps; the attempts by the
        seeds of their points."""
        what = f"steps of {number} attempts below {self.runs}"
        self._wait(lambda: len(self._stepping(2)) >= number, what)
        return self._stepping(2)

    def wait_for_states(self, expected: list[str]) -> None:
        """Wait until the points have these states; where none of them waits or runs, until Slurm's
        queue is empty, too: while a job leaves its node, its point is still under way."""
        if not {"waiting", "running"} & set(expected):
            self.wait_until_idle()
        self._wait(lambda: self.states() == expected, f"{expected} of {self.runs}")

    def workers(self) -> list[int]:
        """Processes of ranks below this suite's runs."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "benchmarks.worker" in command and any(str(self.runs) in word for word in command):
                found.append(process.pid)
        return found

    def wait_until_idle(self) -> None:
        """Wait until none of the suite's points waits or runs."""
        self._wait(lambda: not self.queue(), f"an empty queue of {self.runs}")

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        """``wait_until``, with what Slurm says of its jobs and nodes where it took too long. Thirty
        tests at once would keep a core busy with their questions if they asked more often."""
        try:
            wait_until(condition, what, every_s=1.0)
        except TimeoutError as error:
            jobs = self.cluster.run("squeue", "--array", "--long")
            nodes = self.cluster.run("sinfo", "--Node", "--long")
            log = (self.cluster.directory / "slurmctld.log").read_text().splitlines()[-60:]
            ended = [f"{r.record_id}: {r.status}: {r.reason}" for r in self.records()]
            raise TimeoutError("\n".join([str(error), *ended, jobs, nodes, *log])) from None

    def queue(self) -> list[str]:
        """The ids of the points of this suite's sweeps that wait or run: tasks of arrays."""
        return [job for job, _ in self.jobs() if "_" in job]

    def report_jobs(self) -> list[str]:
        """The ids of this suite's report jobs that wait or run."""
        return [job for job, _ in self.jobs() if "_" not in job]

    def jobs(self) -> list[tuple[str, str]]:
        """The ids and dependencies of all jobs of this suite's sweeps that wait or run."""
        sweeps = {path.name for path in (self.runs / "slurm").glob("*")}
        printed = self.cluster.run("squeue", "--noheader", "--array", "--format=%i %j %E")
        told = map(str.split, printed.splitlines())
        return [(job, waits) for job, name, waits in told if name.rpartition("-")[0] in sweeps]


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
    """A suite with empty folders; tests that run ``together`` have another one."""
    return Suite(cluster, tmp_path)


@pytest.fixture(scope="session")
def running(
    cluster: SlurmCluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The selected tests that run together, by their ids."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function)]
    marked = [(item, item.get_closest_marker("together")) for item in items]
    ordered = sorted((not mark.args, place) for place, (_, mark) in enumerate(marked) if mark)
    chosen = [items[place] for _, place in ordered]

    def begin(pool: ThreadPoolExecutor, item: pytest.Function) -> Future[None]:
        folder = tmp_path_factory.mktemp(re.sub(r"\W", "_", item.name))
        given = item.callspec.params if hasattr(item, "callspec") else {}
        return pool.submit(item.obj, suite=Suite(cluster, folder), **given)

    server()
    with ThreadPoolExecutor(max(1, len(chosen))) as pool:
        yield {item.nodeid: begin(pool, item) for item in chosen}


@pytest.fixture
def alone(running: Running) -> None:
    """For a test that all others would notice: waits until none of them runs."""
    wait(running.values(), timeout=_RESULT_S)
