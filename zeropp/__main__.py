"""The command ``zeropp``: ``zeropp explain`` is ``python -m benchmarks.explain``, and so on.

Of these commands a wheel has those that need no checkout.
"""

from __future__ import annotations

import importlib
import sys

from zeropp.types.data import IN_WHEEL

# The commands with what they do, and whether a wheel has them.
COMMANDS = {
    "run": ("run, submit or simulate one point, or a sweep of them", False),
    "status": ("every point of every sweep, and where it stands", False),
    "cancel": ("the Slurm jobs of points that wait or run", False),
    "report": ("tables and figures of what was run", False),
    "tune": ("the best plan of every contender on a cluster, by the simulator", True),
    "explain": ("will another program's configuration fit, and what would be faster", True),
    "calibrate": ("the constants of this machine, measured: cluster=mine for every command", False),
    "show": ("a schedule, as a grid or a timeline", True),
    "replay": ("the step time of a training script on a cluster, without a GPU", False),
    "validate": ("the simulator against published measurements", False),
}
# Those that are folders, not modules, in ``benchmarks``.
FOLDERS = {
    "calibrate": "calibrate.__main__",
    "explain": "explain.__main__",
    "report": "report.__main__",
    "tune": "tune.__main__",
    "validate": "validation.__main__",
}


def offered() -> dict[str, str]:
    """The commands that work here, with what they do: in a checkout all of them."""
    return {name: words for name, (words, ships) in COMMANDS.items() if ships or not IN_WHEEL}


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
    sys.argv = [f"zeropp {words[0]}", *words[1:]]
    module = importlib.import_module(f"benchmarks.{FOLDERS.get(words[0], words[0])}")
    return int(module.main())


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
