"""``zeropp report [RUNS...] --out DIR``: makes tables, figures and a page of records.

``--table paper`` writes one table only; ``--compare A B`` reports what changed between two sets of
runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks.report import DEFAULTS, TABLES, Options
from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, check_writable, command


@command
def main() -> int:
    """Run the command line. The exit status is 1 if ``--compare`` found something worse, 2 on bad
    input or if there is nothing to report, 130 after Ctrl-C."""
    arguments = _parser().parse_args()
    runs = arguments.runs or [Path("results/runs")]
    for path in [*arguments.runs, *(arguments.compare or [])]:
        if not path.exists():
            raise SpecError(f"{path}: no such file or directory")
    if arguments.compare and (arguments.runs or arguments.table):
        raise SpecError("--compare names both sets of runs: give neither RUNS nor --table with it")
    if not arguments.compare and arguments.slower is not None:
        raise SpecError("--slower: is of --compare A B")
    if arguments.tensorboard or arguments.wandb:
        from benchmarks.report.trackers import to_tensorboard, to_wandb

        if arguments.tensorboard:
            sent = to_tensorboard(runs, arguments.tensorboard)
            print(f"{sent} records as runs in {arguments.tensorboard}")
        if arguments.wandb:
            sent = to_wandb(runs, arguments.wandb)
            print(f"{sent} records as runs of the project {arguments.wandb}")
        return 0 if sent else 1
    out = arguments.out or Path("results/reports", arguments.table or "latest")
    check_writable("--out", out)
    try:
        return _write(runs, out, arguments)
    except BrokenPipeError:
        raise
    except OSError as error:  # such as a disk that has become full
        why = (error.strerror or str(error)).lower()
        raise SpecError(f"--out={out}: no report: {why}") from None


def _write(runs: list[Path], out: Path, arguments: argparse.Namespace) -> int:
    """Write what was asked for; returns the exit status."""
    options = Options(
        arguments.base,
        _knobs(arguments.against),
        arguments.timelines,
        tuple(arguments.contenders),
        tuple(arguments.columns),
        arguments.pdf,
    )
    if arguments.compare:
        from benchmarks.report.compare import write_comparison

        before, after = arguments.compare
        comparison = write_comparison([before], [after], out, slower=arguments.slower)
        return 1 if any(comparison.worse.values()) else 0
    from benchmarks.records.lone import is_of_one_gpu
    from benchmarks.report.write import write_one_table, write_report

    if len(runs) == 1 and is_of_one_gpu(runs[0]):
        from benchmarks.report.one_gpu import write_one_gpu

        write_one_gpu(runs[0], out)
        return 0
    if arguments.table:
        made = write_one_table(arguments.table, runs, out=out, options=options)
    else:
        made = write_report(runs, out, options=options)
    if not made.files:
        where = ", ".join(map(str, runs))
        none = "no records (zeropp run makes them, or name another folder)"
        if made.skipped:
            none = f"none of {len(made.skipped)} records can be read, as the lines above say"
        raise SpecError(f"{where}: {none}")
    return 0


def _share(words: str) -> float:
    """A percentage as a share; raises what argparse turns into its message."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", words)
    if match is None or float(match[1]) >= 100:
        raise argparse.ArgumentTypeError(f"{words}: must be a percentage below 100, such as 10%")
    return float(match[1]) / 100


def _knobs(words: str) -> dict[str, str]:
    """The knobs of ``--against``; raises SpecError for a word that is not knob=value."""
    pairs = [word.partition("=") for word in words.split()]
    for knob, _, value in pairs:
        if not knob or not value:
            raise SpecError(f"--against={words!r}: must be knobs as in 'unit=8 chunks=2'")
    return {knob.removeprefix("contender."): value for knob, _, value in pairs}


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeropp report",
        description="Make tables, figures and a page of records, one table, or a comparison of "
        "two sets of runs.",
        epilog="examples: zeropp report results/reference/demo --out /tmp/report; "
        "zeropp report results/reference/claim_33 --table paper --base best_3d",
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, help="records or folders (default: results/runs)")
    add(
        "--table",
        choices=list(TABLES),
        help="write this table only, as CSV, Parquet, Markdown, LaTeX, HTML",
    )
    add(
        "--base",
        default=DEFAULTS.base,
        metavar="CONTENDER",
        help="speed-ups are over this contender (%(default)s)",
    )
    add(
        "--against",
        default="",
        metavar="KNOBS",
        help="base configuration of ablations, as in 'unit=8 chunks=2' (the most default one)",
    )
    add("--timelines", action="store_true", help="draw and trace every cell's timelines (slow)")
    add("--pdf", action="store_true", help="write every figure as PDF, too (slow)")
    add(
        "--contenders",
        nargs="+",
        default=[],
        metavar="NAME",
        help="contenders of the paper's table (all) and of the maps of speed-ups (zeropp)",
    )
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="NAME",
        help="columns of the paper's table (all): tokens_per_s_per_gpu model_tflops_per_gpu mfu "
        "peak_gib speedup",
    )
    add(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="two sets of runs, before and after; exit status 1 if something became worse",
    )
    add("--slower", type=_share, metavar="10%", help="worse is slower by this (and beyond noise)")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write to (results/reports/latest, or results/reports/TABLE)",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="write the records as TensorBoard runs")
    add("--wandb", metavar="PROJECT", help="send the records as runs to Weights & Biases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
