"""The suite: compares contenders by real runs, by simulation, and with published numbers.

The modules here are the commands (`python -m benchmarks.run --help`). What they call is in one
folder per role, listed here in the direction in which data flows:

* ``specification``: turns a command line into a frozen, validated RunSpec.
* ``launch``: plans the RunSpec and starts an attempt at it; there is one launcher per kind (local,
  slurm, trace, simulate).
* ``worker``: what a rank runs: the comparison with one process (the gate), the timed steps, memory,
  recorded spans.
* ``records``: the files that an attempt leaves, and the statistics that are derived from them.
* ``report``: turns records into tables, figures and one page. ``studies``: programs that make the
  committed tables (validation, the verdict on the 33 %, memory, schedules).
"""

import os
import signal
import sys


def _end_at_once(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def end_at_once_on_ctrl_c() -> None:
    """Make Ctrl-C one line while a command still imports, which some packages answer with an error
    of their own; later ``run_command`` prints the line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


def raise_on_ctrl_c() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if set(os.environ.get("COLUMNS", "")) == {"0"}:  # where no terminal is known; nothing fits into 0
    del os.environ["COLUMNS"]
if sys.argv[:1] == ["-m"]:  # a command: runpy imports this package before its module
    end_at_once_on_ctrl_c()

from importlib.util import find_spec  # noqa: E402  (they take longer than all that is above)
from pathlib import Path  # noqa: E402

CHECKOUT = Path(__file__).resolve().parents[1]
_NEEDED = ("hydra", "omegaconf", "pydantic", "rich", "jinja2", "numpy", "pandas", "torch")


def _refuse_an_environment_without_the_suite() -> None:
    """One line in place of a traceback where a command is started by another Python than the one
    that the suite was installed for. Exit status 2."""
    problem = ""
    if sys.version_info < (3, 11):  # noqa: UP036  (older ones get a message, not a SyntaxError)
        problem = f"this Python is {sys.version.split()[0]}, and 3.11 or newer is needed"
    elif missing := [name for name in _NEEDED if find_spec(name) is None]:
        problem = f"{missing[0]} is not installed for {sys.executable}"
    if problem:
        activate = CHECKOUT / ".venv" / "bin" / "activate"
        remedy = f"source {activate}" if activate.exists() else "pip install -e '.[suite]'"
        print(f"error: {problem}: {remedy}", file=sys.stderr)
        raise SystemExit(2)


if sys.argv[:1] == ["-m"]:
    _refuse_an_environment_without_the_suite()
