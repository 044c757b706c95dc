"""What commands and the library import, and what importing does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import CHECKOUT
from tests.waiting import wait_until
from zeropp.__main__ import COMMANDS, FOLDERS

SLOW = "pandas", "matplotlib", "torch", "scipy", "deepspeed"  # seconds of imports
UNUSED = "hydra", "omegaconf", "numpy"  # by what only prices: half a second
LLAMA = CHECKOUT / "docs/examples/llama3_8b.toml"
ANSWERS = [  # a command line, and words of what it prints
    (f"explain {LLAMA} num_gpus=16 cluster=h100", ["It fits: pipeline rank", " GiB", "Best plans"]),
    ("explain --help", ["usage: ", "--as", "num_gpus"]),
    ("run --help", ["zeropp", "gpt_tiny", "num_gpus: 4", "--help all", "zeropp tune"]),
    ("run --help all", ["zeropp", "gpt_tiny", "num_gpus: 4", "gate_tolerance: "]),
    ("run --cfg job contender=zeropp", ["name: zeropp", "num_gpus: 4"]),
    ("run -m --cfg job seed=7,8 contender=zeropp", ["seed: 7", "---", "seed: 8"]),
    ("tune --help", ["num_gpus: 64", "cluster=a800"]),
    ("show --help", ["name=zeropp", "reduce_grad", "backward_weight"]),
    ("status --help", ["usage: ", "--json"]),
    ("validation --help", ["usage: ", "--cluster"]),
    ("report --help", ["usage: ", "--table"]),
]
# One interpreter imports what all commands after ``explain`` share; each runs in a fork of it.
RUN = f"""
import json, os, runpy, signal, sys, traceback
answers = {{}}
for command in sys.argv[1:]:
    unused = {set(SLOW)}
    if command.startswith("explain"):
        unused |= {set(UNUSED)}
    else:
        import benchmarks.specification.compose
    with open("slow", "w") as file:
        json.dump(["unknown"], file)  # until the command has ended
    if not (pid := os.fork()):
        signal.alarm(300)  # a command that hangs ends
        for number, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["benchmarks." + command.split()[0], *command.split()[1:]]
        code = 0
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        with open("slow", "w") as file:
            json.dump(sorted(unused & set(sys.modules)), file)
        sys.stdout.flush()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    answers[command] = status, open("out").read(), open("err").read(), json.load(open("slow"))
print(json.dumps(answers))
"""


def test_help_reads_well_and_imports_nothing_slow(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *(command for command, _ in ANSWERS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    )
    answers = json.loads(done.stdout)
    for command, words in ANSWERS:
        status, printed, told, slow = answers[command]
        errors = [] if command.startswith("explain /") else told.splitlines()  # progress
        assert (command, status, errors, slow) == (command, 0, [], [])
        assert (command, [word for word in words if word not in printed]) == (command, [])


def python(*words: str) -> str:
    """What a Python prints that starts with these words in the checkout."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=CHECKOUT,
        env=os.environ | {"COLUMNS": "0"},
    )
    return done.stdout


def test_importing_the_suite_changes_nothing_in_the_process() -> None:
    code = """
import os, signal, sys
from zeropp.engine.ranks import cuda_settings  # it sets variables of the driver, and says so
sys.argv = ["-m"]  # while Python imports the package of a command
def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return handlers, dict(os.environ), list(sys.path)
before = state()
from benchmarks import api
print(state() == before)
"""
    assert python("-c", code) == "True\n"


def test_commands_import_what_may_be_missing_only_when_they_run() -> None:
    """So that one place says which package is missing, or that Ctrl-C came while it was read."""
    names = [f"benchmarks.{FOLDERS.get(name, name)}" for name in COMMANDS]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    python("-S", "-c", code, *names)  # without site-packages


_KILLED = """
import os, signal, time
from benchmarks.specification.command import workers
if __name__ == "__main__":
    with workers(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_command_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(_KILLED, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    begun = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60
    )
    assert begun.returncode == -signal.SIGKILL
    worker = int(begun.stdout)
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the end of the worker")
