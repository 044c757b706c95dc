"""How far the simulator is from the runs of a source that it has never seen.

    python -m benchmarks.validation.strangers --out results/reference/validation

Every source of results/published is left out in turn. All constants are fitted again to the runs of
the other sources (``fit_constants``), and its runs are priced with those. A program that only this
source runs has no entry then: the entry of another source that shares most traits is taken for it,
with the year of its own kernels and the types of its own parameters, sums of gradients, masters and
moments, which are no secrets. What a row states of its run is kept, and so are the traits that its
run switched. An entry that another source runs, too, stays, although both were in view when it was
written, and so do the few constants that are no field of a device or program.

It writes two tables. ``stranger_runs.csv`` has one line per run: its error in sample, with the
constants and the entry of ``conf/``, and as a stranger. ``strangers.csv`` has one line per source
and one for all. Errors are those of speed, predicted over measured minus 1, or of memory. The
interval, from ``low`` to ``high``, holds nine in ten errors of all other sources, which all weigh
the same; ``inside`` is the share of a source's runs that are in it.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from operator import attrgetter, ne
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.report.ratio_errors import bounds_of
from benchmarks.specification.command import CommandParser, check_writable, command, workers
from benchmarks.specification.progress import track
from benchmarks.validation.cases import Case, case_of, program_of
from benchmarks.validation.errors import first_of_runs, predictions_of
from benchmarks.validation.fit_constants import (
    FittedConstant,
    constants,
    drawn,
    fit,
    slopes,
    with_factors,
)
from benchmarks.validation.predict import Prediction, outcome_of, predict_case
from benchmarks.validation.rows import (
    SHARD_ALONE,
    PublishedRow,
    UnpredictableError,
    read_rows,
    training_tables,
)
from zeropp.price.programs import Program, program_named

_MASTERS_AND_MOMENTS = 12  # bytes per parameter, all in fp32
_MOVES = 0.01  # a slope from which on a constant counts as one on which a run depends
# The traits in which programs are compared.
_SAME = attrgetter(*(f.name for f in fields(Program) if f.name not in ("name", "kernels")))


@dataclass(frozen=True, kw_only=True)
class StrangerRun:
    """A published run: errors are predicted over measured minus 1, of speed or of memory."""

    place: str
    source: str
    program: str
    priced_as: str  # the program's entry, or the one that stands for it
    device: str
    quantity: str
    in_sample: float
    stranger: float


@cache
def nearest(program: str, others: frozenset[str]) -> str:
    """The program of ``others`` that shares most traits with one; of equals the first by name."""
    own = _SAME(program_named(program))
    return min(sorted(others), key=lambda name: sum(map(ne, own, _SAME(program_named(name)))))


def as_stranger(row: PublishedRow, others: frozenset[str]) -> tuple[str, Case]:
    """The name of the entry with which a row of an unknown source is priced, and its case;
    ``others`` are the programs of all other sources."""
    name, *switched = row.program.split("+")
    if name not in others:
        able = others - set(SHARD_ALONE) if row.tp * row.pp > 1 else others
        if row.zero == 3:
            able = frozenset(other for other in able if program_named(other).zero3)
        name = nearest(name, able)
    name = "+".join([name, *switched])
    case, own = case_of(row.model_copy(update={"program": name})), program_of(row)
    state = replace(
        case.program.bf16,
        parameters=own.bf16.parameters,
        gradients=own.bf16.gradients,
        optimizer=min(own.bf16.optimizer, _MASTERS_AND_MOMENTS),
        casts_parameters=own.bf16.casts_parameters,
    )
    return name, replace(case, program=replace(case.program, kernels=own.kernels, bf16=state))


def priced(
    place: str, known: Prediction, others: frozenset[str], factors: Mapping[FittedConstant, float]
) -> StrangerRun | None:
    """A run with its error in sample, and as a stranger; None where it has no price so."""
    row = known.row
    try:
        name, case = as_stranger(row, others)
        stranger = predict_case(row, with_factors(case, factors))
    except UnpredictableError:
        return None
    return StrangerRun(
        place=place,
        source=row.source,
        program=row.program,
        priced_as=name,
        device=row.device,
        quantity="memory" if known.kind == "memory" else "speed",
        in_sample=known.error_of_speed,
        stranger=stranger.error_of_speed,
    )


_FIGURES: dict[str, Callable[[Any], Any]] = {  # of errors, a Series
    "median": lambda errors: errors.abs().median(),
    "p90": lambda errors: errors.abs().quantile(0.9),
    "bias": lambda errors: errors.median(),
}


def errors_by_source(runs: Sequence[StrangerRun]) -> list[dict[str, Any]]:
    """One line per quantity and source, and one over all sources, whose interval is that of every
    further stranger: absolute errors as median and 90th percentile, and the median with its sign
    (``bias``, +: too fast, or too much memory), in sample and as strangers; the interval that the
    other sources give, and the share of runs inside it."""
    table, lines = pd.DataFrame(map(asdict, runs)), []
    for quantity in ("speed", "memory"):
        of_kind = table[table["quantity"] == quantity]
        errors = [*zip(of_kind["source"], of_kind["stranger"], strict=True)]
        sources = [*sorted({source for source, _ in errors}), *["all sources"] * bool(errors)]
        bounds = {s: bounds_of(error for error in errors if error[0] != s) for s in sources}
        inside = [bounds[source][0] <= error <= bounds[source][1] for source, error in errors]
        for source, (low, high) in bounds.items():
            chosen = [source in (of, "all sources") for of, _ in errors]
            figures = {
                f"{figure}{suffix}": of(of_kind.loc[chosen, name])
                for name, suffix in (("in_sample", "_in_sample"), ("stranger", ""))
                for figure, of in _FIGURES.items()
            }
            held = {"inside": float(np.mean(np.compress(chosen, inside))), "low": low, "high": high}
            first = {"quantity": quantity, "source": source, "runs": sum(chosen)}
            lines.append(first | figures | held)
    return lines


Runs = Mapping[str, Prediction]  # by the place of their row


def left_out(known: Runs, pool: Executor) -> tuple[list[StrangerRun], list[str]]:
    """All runs as strangers, and a line of text on every constant."""
    rows = [prediction.row for prediction in known.values()]
    chosen = drawn([p.row for p in known.values() if p.kind == "throughput"])
    programs: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        programs[row.program.partition("+")[0]].add(row.source)
    priced_so = track(pool.map(slopes, chosen, chunksize=8), len(chosen), "slopes")
    errors, moved = (np.array(each) for each in zip(*priced_so, strict=True))
    of = np.array([row.source for row in chosen])
    fits = {s: fit(errors[of != s], moved[of != s]) for s in {row.source for row in rows}}
    others = {s: frozenset(name for name, by in programs.items() if by - {s}) for s in fits}
    waiting = [
        pool.submit(priced, place, p, others[p.row.source], fits[p.row.source])
        for place, p in known.items()
    ]
    done = track((job.result() for job in waiting), len(waiting), "strangers")
    runs = [run for run in done if run is not None]
    whole, words = fit(errors, moved), [f"{len(waiting) - len(runs)} runs cannot be simulated so"]
    for constant, slope in zip(constants(), moved.T, strict=True):
        users = sorted(set(of[np.abs(slope) > _MOVES]))
        words.append(_of_constant(constant, whole, {user: fits[user] for user in users}))
    return runs, words


def _of_constant(
    constant: FittedConstant,
    whole: Mapping[FittedConstant, float],
    fits: Mapping[str, Mapping[FittedConstant, float]],
) -> str:
    """A constant in ``conf/``, fitted to all sources, and without each of those that it moves."""
    refits = [constant.now * of[constant] for of in fits.values()]
    words = f"{constant.text:34} {constant.now:8.4g} in conf/, fitted to all sources "
    words += f"{constant.now * whole[constant]:8.4g}"
    if len(fits) > 1:
        return f"{words}, without one {min(refits):.4g} to {max(refits):.4g}"
    return f"{words}, SERVES ONE SOURCE ALONE: {', '.join(fits) or 'no run moves with it'}"


def _known(pool: Executor) -> Runs:
    """The predictions of all runs of results/published that have a price, by their first row."""
    lines = [line for path in training_tables() for line in read_rows(path)]
    outcomes = list(track(pool.map(outcome_of, lines, chunksize=16), len(lines), "rows"))
    places = {id(o.prediction): o.line.place for o in outcomes}
    first = first_of_runs(predictions_of(outcomes))
    return {places[id(prediction)]: prediction for prediction in first if prediction.kind != "oom"}


@command
def main() -> int:
    """Print and write both tables; see ``--help``."""
    parser = CommandParser(
        description="Simulate every source of results/published as a stranger: with constants "
        "fitted to the other sources, and with a program of theirs. Takes some minutes.",
        epilog="example: python -m benchmarks.validation.strangers --out strangers",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the two tables")
    options = parser.parse_args()
    if options.out is not None:
        check_writable("--out", options.out)
    with workers(os.cpu_count() or 1) as pool:
        runs, words = left_out(_known(pool), pool)
    errors = errors_by_source(runs)
    shown = pd.DataFrame(errors).to_string(index=False, float_format="{:+.1%}".format)
    print("\n".join([*words, "", shown]))
    if options.out is not None:
        for name, lines in (("stranger_runs", map(asdict, runs)), ("strangers", errors)):
            pd.DataFrame(lines).to_csv(
                options.out / f"{name}.csv",
                index=False,
                float_format="%.4f",
                lineterminator="\r\n",
            )
        print(f"wrote {options.out}/strangers.csv and stranger_runs.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
