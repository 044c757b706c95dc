"""What cannot work ends before any process starts: one line, exit status 2."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import CHECKOUT
from benchmarks.launch.attempt import Ending, new_header, write_unstarted
from benchmarks.records.record import read_record
from benchmarks.run import main
from benchmarks.specification import progress
from benchmarks.specification.command import run_command
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.toy_spec import mapping
from tests.waiting import wait_until
from zeropp.__main__ import FOLDERS

DEMO = CHECKOUT / "results" / "reference" / "demo"
SCRIPT = CHECKOUT / "scripts" / "examples" / "plain_fsdp2.py"
LLAMA = CHECKOUT / "docs" / "examples" / "configurations" / "llama_config.json"

# arguments, what the line must say
CASES = [
    ("global_batch=15", "global_batch=15: must be a multiple of"),
    ("global_batch=100000000", "global_batch=100000000: 50000000 microbatches"),
    ("microbatch_size=3", "global_batch=16: must be a multiple of microbatch_size=3"),
    ("contender.pp=4 contender.chunks=16", "contender.pp=4: 4 x chunks=16 = 64 stages"),
    ("contender.pp=3", "contender.pp=3: the degrees"),
    ("contender=deepspeed_3d contender.tp=3 num_gpus=6", "contender.tp=3: must divide"),
    ("num_gpus=7 contender.pp=2", "contender.pp=2: the degrees"),
    ("contender.pp=2 contender.shard=1 contender.replicate=1", "num_gpus=4: the degrees"),
    ("num_gpus=100000", "num_gpus=100000: gpt_tiny has work for at most 128"),
    ("data=text data.path=/nowhere.txt", "data.path='/nowhere.txt': no such file"),
    ("data=text", "data.path"),
    ("colour=blue", "colour=blue: there is no such key"),
    ("contender.colour=blue", "contender.colour='blue': zeropp has no such knob"),
    ("num_gpus=2,4", "num_gpus=2,4: is a list of values; add -m"),
    ("contender=zeropp,fsdp", "contender=zeropp,fsdp: is a list of values; add -m"),
    ("num_gpu=4", "num_gpu=4: there is no such key (did you mean num_gpus?)"),
    ("contender.unti=8", "zeropp has no such knob (did you mean contender.unit?"),
    ("measure.step=3", "measure.step=3: there is no such key (did you mean measure.steps?)"),
    ("launcher.nope=1", "launcher.nope=1: there is no such key (see --help)"),
    ("launcher=slurm launcher.sbatch.nice=1", "sets a new key (write +launcher.sbatch.nice=1)"),
    ("launcher=slurm launcher.sbatch.tme=1", "(did you mean launcher.sbatch.time?)"),
    ("launcher=slurm launcher.queues={1:{qos:x}}", "(write +launcher.queues={1:{qos:x}})"),
    ("study=x", "study=x: there is no such key (see --help)"),
    ("batch=128", "batch=128: there is no such key (did you mean global_batch?)"),
    ("sequences_per_gpu=0", "sequences_per_gpu=0: must be a whole number, at least 1"),
    ("sequences_per_gpu=two", "sequences_per_gpu='two': must be a whole number"),
    ("sequences_per_gpu=2 num_gpus=lots", "num_gpus='lots'"),
    ("global_batch=8 sequences_per_gpu=2", "global_batch=8: sequences_per_gpu=2 sets it too"),
    ("num_gpus=4 num_gpus=8", "num_gpus=4: num_gpus=8 sets it too"),
    ("contender.pp=4;", "contender.pp=4;: is not key=value as Hydra reads it"),
    ("num_gpus=2,", "num_gpus=2,: is not key=value as Hydra reads it"),
    ("num_gpus", "num_gpus: is not key=value as Hydra reads it"),
    ("launcher=slurm", "launcher=slurm: there is no sbatch here"),
    ("contender=magic", "try deepspeed, deepspeed_3d, deepspeed_zero3, fsdp"),
    ("--bogus", "unrecognized arguments: --bogus (see --help)"),
    ("--info", "unrecognized arguments: --info (see --help)"),
    ("--hydra-help", "unrecognized arguments: --hydra-help (see --help)"),
    ("--config-name tune", "unrecognized arguments: --config-name tune (see --help)"),
    ("--config-dir /nowhere", "--config-dir=/nowhere: no such folder"),
    ("model=[gpt_tiny,gpt_mini]", "model=[gpt_tiny,gpt_mini]: is a list, and one would run"),
    ("-m model=gpt_tiny,[gpt_mini,gpt_tiny]", "is a list, and one would run"),
    ("-m num_gpus=range(8,0)", "num_gpus=range(8,0): names no value"),
    ("-m num_gpus=interval(2,8)", "num_gpus=interval(2,8): names no value"),
    ("num_gpus=true", "num_gpus=True: must be a number"),
    ("measure.steps=true", "measure.steps=True: must be a number"),
    ("contender.pp=true", "contender.pp=True: must be a number"),
    ("repeats=true", "repeats=True: must be a whole number"),
    ("retries=-1", "retries=-1: must be a whole number from 0 to 1000"),
    ("experiment=demo contender=no_such", "contender=no_such: no point of this experiment"),
    ("experiment=demo contender=zeropp,fsdp", "contender=fsdp: no point of this experiment"),
    ("experiment=claim_33_quick model=gpt_tiny", "model=gpt_tiny: experiment=claim_33_quick cho"),
    ("experiment=atlas num_gpus=8", "num_gpus=8: experiment=atlas chooses it by itself"),
    ("sequences_per_gpu=true", "sequences_per_gpu=True: must be a whole number"),
    ("model=gpt_9t", "try gpt_14_6b"),
    ("experiment=claim", "try atlas, claim_33, claim_33_quick, demo"),
    ("+study=claim_33", "study='claim_33': must be one of verdict"),
    ("+study=verdict", "study=verdict: needs the key verdict"),
    ("+verdict=1", "study=verdict: needs the key verdict"),
    ("+foo=1", "foo=1: unknown key"),
    ("model.hidden=0", "model.hidden=0: must be from 1 to 2^31 - 1"),
    ("measure.timeout_s=-1", "measure.timeout_s=-1: must be at least 1"),
    ("num_gpus=lots", "num_gpus='lots'"),
    ("precision=fp4", "precision='fp4'"),
    ("model.heads=5", "model.heads=5: must divide model.hidden"),
    ("model.document=4096", "model.document=4096: must be at most model.seq"),
    ("model.document=16", "only simulations end attention at documents (use launcher=simulate"),
    ("model.vocab=100", "model.vocab=100: byte-level text needs at least 256"),
    ("contender=deepspeed_3d contender.chunks=2", "contender.chunks=2"),
    ("contender=fsdp contender.pp=2", "contender.pp=2"),
    ("contender=zeropp contender.tp=2", "contender.tp=2"),
    ("measure.steps=0", "measure.steps=0: must be at least 1"),
    ("cluster=a100", "cluster=a100: launcher=local needs that GPU"),
    ("rerun=never", "rerun='never'"),
    ("launcher=carrier_pigeon", "carrier_pigeon"),
    ("launcher.kind=pigeon", "launcher.kind='pigeon': must be one of local, slurm"),
    ("num_gpus=4,3 -m launcher=slurm launcher.grace_s=long", "launcher.grace_s='long'"),
    ("contender.pp=all", "contender.pp='all': input should be a valid integer"),
    *((f"{group}=null", f"{group}=null: names no {group} (try ") for group in ("model", "data")),
    ("seed=100000000000000000000000", "seed=100000000000000000000000: must be less than 2^63"),
    ("model.seq=1000000000000", "model.seq=1000000000000: must be from 1 to 2^31 - 1"),
    ("model.layers=1000000000", "model.layers=1000000000: must be from 1 to 100,000"),
    ("repeats=1000000000000", "repeats=1000000000000: must be a whole number from 1 to 1000"),
    *(
        (f"-m {word}", f"{word}: would do nothing, as Hydra only composes here")
        for word in (
            *("hydra.sweeper.params.seed=0,1", "hydra.sweep.dir=x", "hydra.run.dir=x"),
            *("hydra.verbose=true", "hydra.job.chdir=true", "hydra/launcher=basic"),
        )
    ),
    ("-m experiment=peers,demo", "experiment=peers,demo: give one"),
    *(
        (f"-m seed=0,1 {words}", f"{words.split()[-1].lstrip('+')}: is no part of a point")
        for words in (
            *("launcher.steps=true,false", "launcher.dry_run=true,false", "rerun=missing,all"),
            *("repeats=1,2", "launcher=slurm +launcher.environment.NCCL_ALGO=Ring,Tree"),
            *("launcher=slurm launcher.sbatch.mem=1G,2G", "launcher=slurm launcher.name=a,b"),
        )
    ),
    ("-m launcher=local,slurm", "launcher.kind=local,slurm: is no part of a point"),
    ("report_dir=null", "report_dir=None: must be the path of a folder"),
    ("~report_dir", "report_dir: missing"),
    ("~launcher", "launcher: missing"),
    ("~launcher.kind", "must be one of local, slurm"),
    ("cluster=v100 cluster.group_shares=[1,0]", "cluster.group_shares=0: must be more than 0"),
    ("cluster.device.overlap_slowdown=-5", "overlap_slowdown=-5: must be at least 0"),
    ("cluster.intra.hop_us=inf", "cluster.intra.hop_us=inf: must be finite"),
    ("cluster.intra.hop_us=nan", "cluster.intra.hop_us=nan: must be finite"),
    ("data=text data.path=/", "data.path='/': no such file"),
    ("model.name=a/b", "model.name='a/b': must be a name for files"),
    ("report_dir=/dev/null/report", "report_dir=/dev/null/report: cannot be written to"),
    ("launcher=trace launcher.pipeline_ranks=[]", "must name pipeline ranks"),
    ("launcher.steps=often", "launcher.steps='often': input should be"),
    ("launcher.step=true", "launcher.step=true: there is no such key (did you mean"),
    ("runs_dir=/dev/null/runs", "runs_dir=/dev/null/runs: cannot be written to"),
    ("experiment=claim_33 report_dir=/dev/null/report", "report_dir=/dev/null/report: cannot"),
]


@pytest.mark.parametrize(("arguments", "words"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_is_one_line_and_status_2(
    arguments: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if arguments == "cluster=a100" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    if arguments == "launcher=slurm":
        monkeypatch.setenv("PATH", "/nonexistent")
    # Private, and the one place where ranks are started.
    monkeypatch.setattr("benchmarks.launch.local._start", refuse)
    monkeypatch.setattr(progress, "_FIRST_LINE_S", 1e6)  # however slow a loaded machine is
    place = [] if "runs_dir=" in arguments else [f"runs_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.run", *place, *arguments.split()])
    assert main() == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    others = [line for line in lines[:-1] if not line.startswith("auto: ")]  # what "auto" became
    assert others == []
    assert lines[-1].startswith("error: ")
    assert words in lines[-1]
    assert (printed.out, list(tmp_path.iterdir())) == ("", [])


OTHER_CASES = [
    ("report /nowhere", "/nowhere: no such file or directory"),
    ("report --bogus", "unrecognized arguments: --bogus (see --help)"),
    ("report --table magic", "argument --table: invalid choice: 'magic'"),
    ("report {demo} --base magic", "--base=magic: no record of that contender (there are"),
    ("report {demo} --table paper --base magic", "--base=magic: no record of that contender"),
    ("report {demo} --against unit", "--against='unit': must be knobs as in 'unit=8 chunks=2'"),
    ("report {tmp}/list.json --out {tmp}/list.json", "list.json: cannot be written to"),
    ("report --compare {demo}", "argument --compare: expected 2 arguments"),
    ("report {demo} --compare {demo} {demo}", "--compare names both sets of runs"),
    ("report --compare {demo} /nowhere", "/nowhere: no such file or directory"),
    ("report {demo} --out /dev/null/here", "--out=/dev/null/here: cannot be written to"),
    ("show", "what to show?"),
    ("show schedule name=magic", "magic"),
    ("show schedule microbatches=800000", "microbatches=800000: 4 stages take at most 65536"),
    ("show schedule unit=999", "unit=999: must be at most microbatches=8"),
    ("show schedule chunk=2", "chunk=2: unknown key (did you mean chunks?)"),
    ("show schedule ranks=0", "ranks=0: must be at least 1"),
    ("show timetable", "zeropp show schedule"),
    ("show schedule forward=0", "forward=0: must be more than 0"),
    ("show schedule forward=nan", "forward=nan: must be more than 0"),
    ("show schedule backward_input=-1", "backward_input=-1: must be more than 0"),
    ("show schedule forward=1e-9", "backward_input=1: must be from 0 to 1e-07"),
    ("show schedule transfer=inf", "transfer=inf: must be from 0 to 100"),
    ("show schedule unshard=lots", "unshard=lots: needs a number"),
    ("show schedule microbatches=2.5", "microbatches=2.5: needs a number"),
    ("show schedule prefetch=-1", "prefetch=-1: must be at least 0"),
    ("show schedule unit=-3", "unit=-3: must be at least 1"),
    ("show schedule unit=0", "unit=0: must be at least 1"),
    ("show schedule cap=0", "cap=0: must be at least 1"),
    ("show schedule name=1f1b unit=4", "unit=4: only name=zeropp has it"),
    ("show schedule cap=1 chunks=2", "activation_cap=1: a unit of 4"),
    ("show schedule reduce_every=day", "reduce_every=day: use unit or step"),
    ("show schedule name=zbv chunks=3", "chunks=3: zbv has two"),
    ("show schedule colour=blue", "colour=blue: unknown key"),
    ("show schedule out=/dev/null/here", "out=/dev/null/here: cannot be written to"),
    ("show schedule --as deepspeed", "--as deepspeed: use torch"),
    ("show schedule --as", "use torch"),
    ("show schedule reduce_every=step --as torch", "neither reduce_every=step nor out"),
    ("show schedule ranks=four", "ranks=four: needs a number"),
    ("show schedule forward=-1", "forward=-1: must be more than 0"),
    ("status /nowhere", "/nowhere: no such folder; nothing was run yet"),
    ("status {tmp}/list.json", "/list.json: no such folder; nothing was run yet"),
    ("explain {tmp}/list.json", "list.json: must hold keys with values"),
    ("explain {tmp}/list.json num_gpus=true", "num_gpus=True: must be a whole number"),
    ("explain {tmp}/list.json num_gpus=8 num_gpus=4", "num_gpus=4: num_gpus is given twice"),
    ("explain {llama} clutser=h100", "clutser=h100: must be key=value with a key among"),
    ("explain x --tokens -5", "--tokens -5: must be finite and above 0"),
    ("explain x --tokens nan", "--tokens nan: must be finite and above 0"),
    ("replay {script} --ranks 8 --timeline {tmp}", "is a folder (name a file)"),
    ("status --bogus", "unrecognized arguments: --bogus (see --help)"),
    ("tune num_gpu=8", "num_gpu=8: there is no such key (did you mean num_gpus?)"),
    ("tune foo=1", "foo"),
    ("tune contenders=[]", "contenders=[]: must be some of"),
    ("tune cluster=cpu_gloo", "cpu_gloo"),
    ("tune tolerance=2", "tolerance=2: must be from 0 to less than 1"),
    ("tune contenders=[magic]", "contenders='magic': must be among"),
    ("tune model=gpt_9t", "try gpt_14_6b"),
    ("validate /nowhere.csv", "/nowhere.csv"),
    ("validate --cluster magic", "cluster='magic': no such preset"),
]


def test_there_are_enough_of_them() -> None:
    assert len({*CASES, *OTHER_CASES}) == len(CASES) + len(OTHER_CASES) >= 60


@pytest.mark.parametrize(("typed", "words"), OTHER_CASES, ids=[case[0] for case in OTHER_CASES])
def test_other_commands_refuse_it_too(
    typed: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    name, *arguments = typed.format(demo=DEMO, tmp=tmp_path, script=SCRIPT, llama=LLAMA).split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_FIRST_LINE_S", 1e6)  # however slow a loaded machine is
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    assert importlib.import_module(f"benchmarks.{FOLDERS.get(name, name)}").main() == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_ctrl_c_while_a_command_still_imports_is_one_line(tmp_path: Path) -> None:
    """Even where the package that is being imported makes another error of it."""
    (tmp_path / "hydra.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: raise RuntimeError('hydra cannot be imported') from None\n"
    )
    begin = (  # a shell may have started these tests in the background, where it ignores Ctrl-C
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, '-m', 'benchmarks.run'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 130
    assert done.stderr == "interrupted; the same command goes on from here\n"


@pytest.mark.usefixtures("_handler_of_ctrl_c")
def test_ctrl_c_that_became_another_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted_import() -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("cannot be imported") from error

    assert (run_command(interrupted_import), capsys.readouterr().err) == (130, "interrupted\n")


def test_sigterm_ends_the_workers_of_a_command() -> None:
    words = "tune model=gpt_175b num_gpus=1024 global_batch=1536"  # takes much longer than the test
    tuning = subprocess.Popen(
        [sys.executable, "-m", "zeropp", *words.split()],
        cwd=CHECKOUT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process = psutil.Process(tuning.pid)
    wait_until(lambda: len(process.children()) >= 2, "workers")  # one is Python's own
    children = process.children(recursive=True)
    tuning.terminate()
    assert tuning.wait(timeout=300) == -signal.SIGTERM
    _, alive = psutil.wait_procs(children, timeout=300)
    for child in alive:
        child.kill()
    assert alive == []


PIPES = "set -o pipefail; "
REPORT = "{python} -m benchmarks.report {demo} --table paper --out {tmp} | true"
FULL = "error: output: no space left on device\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (PIPES + "{python} -m benchmarks.show schedule microbatches=64 | true", (0, "", "")),
        (
            PIPES + "{python} -m benchmarks.report {demo} --table paper --out {tmp} | true",
            (0, "", ""),
        ),
        ("{python} -m benchmarks.status {tmp} > /dev/full", (2, "", FULL)),
        ("{python} -m benchmarks.show schedule >&-", (0, "", "")),  # before it starts
        ("{python} -m benchmarks.show schedule >&- 2>&-", (0, "", "")),
    ],
)
def test_a_closed_pipe_is_quiet(
    command: str, expected: tuple[int, str, str], tmp_path: Path
) -> None:
    """As ``benchmarks.report ... | head -1`` does, sooner than anything is printed."""
    line = command.format(python=sys.executable, demo=DEMO, tmp=tmp_path)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize("columns", ["0", "00"])
def test_a_terminal_of_no_columns_is_one_of_80(columns: str, tmp_path: Path) -> None:
    write_unstarted(spec_from_mapping(mapping()), tmp_path, new_header("local"), Ending("ok"))
    command = [sys.executable, "-m", "benchmarks.status", str(tmp_path)]
    colors = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    terminal = os.environ | colors | {"COLUMNS": columns}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=terminal)
    assert done.stdout.splitlines()[-1] == "1 ok"


COMMANDS = (
    *("report.__main__", "show", "status", "tune.__main__", "validation.__main__"),
    *("validation.strangers", "evidence.renew", "evidence.traced"),
)


@pytest.fixture
def _handler_of_ctrl_c() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_handler_of_ctrl_c")
def test_what_a_locale_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    def say() -> int:
        print("1 \u2013 2")
        return 0

    assert (run_command(say), written.getvalue()) == (0, b"1 ? 2\n")


@pytest.mark.parametrize("module", COMMANDS)
def test_ctrl_c_is_one_line_in_every_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(list[str]):
        def __getitem__(self, _: object) -> Any:
            raise KeyboardInterrupt

    command = importlib.import_module(f"benchmarks.{module}")
    monkeypatch.setattr(sys, "argv", Interrupted())  # every command begins with its words
    assert command.main() == 130
    said = capsys.readouterr().err  # after lines of progress, where the machine is slow
    assert re.fullmatch(r"( +\d+ s: .*\n)*interrupted\n", said)


@pytest.mark.usefixtures("_handler_of_ctrl_c")
def test_an_interruption_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # Private: Ctrl-C comes while the launcher waits for its ranks; none is started here.
    monkeypatch.setattr("benchmarks.launch.local._wait", interrupt)
    monkeypatch.setattr("benchmarks.launch.local._start", lambda *_, **__: {})
    places = [f"runs_dir={tmp_path}/runs", f"report_dir={tmp_path}/report"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.run", *places])
    assert main() == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted; ")
    (record,) = (tmp_path / "runs").glob("*/*/record.json")
    assert read_record(record).interrupted


def test_a_dry_run_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nor does it record the point of three ranks, which has no plan."""
    monkeypatch.chdir(tmp_path)
    words = "-m num_gpus=4,3 launcher=slurm launcher.dry_run=true runs_dir=runs report_dir=report"
    monkeypatch.setattr(sys, "argv", ["benchmarks.run", *words.split()])
    assert main() == 0
    printed = capsys.readouterr()
    assert "#SBATCH --array=0-0" in printed.out
    assert "infeasible  gpt_tiny-zeropp-3gpu" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_an_environment_without_the_suite_is_one_line() -> None:
    """As after ./scripts/demo.sh, where nobody has activated its environment."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.status", "."],  # without site-packages
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=CHECKOUT,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: .* is not installed for .*(activate|pip install)", line)
