"""The command ``zeropp``: ``zeropp explain`` is ``python -m benchmarks.explain``, and so on.

A wheel has the suite's code in ``zeropp/suite``, and of its commands those that need no checkout.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

SUITE = Path(__file__).parent / "suite"
# The commands with what they do, and whether a wheel has them.
COMMANDS = {
    "run": ("run, submit or price one point, or a sweep of them", False),
    "status": ("every point of every sweep, and where it stands", False),
    "report": ("tables and figures of what was run", False),
    "tune": ("the best plan of every contender on a cluster, by the simulator", True),
    "explain": ("will another program's configuration fit, and what would be faster", True),
    "show": ("a schedule, as a grid or a timeline", True),
    "replay": ("the step time of a training script on a cluster, without a GPU", False),
    "validate": ("the simulator against published measurements", False),
    "completion": ("words to complete in bash or zsh: source <(zeropp completion bash)", True),
}
# Those that are folders, not modules, in ``benchmarks``.
_FOLDERS = {
    "explain": "explain.__main__",
    "report": "report.__main__",
    "tune": "tune.__main__",
    "validate": "validation.__main__",
}


def offered() -> dict[str, str]:
    """The commands that work here, with what they do: in a checkout all of them."""
    in_wheel = SUITE.is_dir()
    return {name: words for name, (words, ships) in COMMANDS.items() if ships or not in_wheel}


def main() -> int:
    """Run the command line; returns its exit status, which is 2 after bad input."""
    words, known = sys.argv[1:], offered()
    if not words or words[0] in ("-h", "--help"):
        print(_help(known))
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"zeropp {version('zeropp')}")
        return 0
    if words[0] not in known:
        why = "needs a checkout" if words[0] in COMMANDS else f"must be among {', '.join(known)}"
        print(f"error: {words[0]}: {why} (see zeropp --help)", file=sys.stderr)
        return 2
    return _started(words[0], words[1:])


def _started(name: str, words: list[str]) -> int:
    """What a command of the suite returns; 2 where a package that it needs is not installed."""
    sys.path.insert(0, str(SUITE if SUITE.is_dir() else SUITE.parents[1]))
    sys.argv = [f"zeropp {name}", *words]
    module = _FOLDERS.get(name, name)
    try:
        importlib.import_module("benchmarks").end_at_once_on_ctrl_c()
        return int(importlib.import_module(f"benchmarks.{module}").main())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("zeropp", "baselines", "benchmarks"):
            raise
        remedy = "pip install 'zeropp[explain]'" if SUITE.is_dir() else "pip install -e '.[suite]'"
        print(
            f"error: {error.name} is not installed for {sys.executable}: {remedy}", file=sys.stderr
        )
        return 2


def _help(known: dict[str, str]) -> str:
    lines = [f"  {name:<10}  {words}" for name, words in known.items()]
    return "\n".join(
        [
            "usage: zeropp COMMAND ...    (zeropp COMMAND --help says more)\n",
            *lines,
            "\n  zeropp --version",
            "  zeropp explain config.json model.seq=8192 num_gpus=64 global_batch=512 cluster=h100",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
