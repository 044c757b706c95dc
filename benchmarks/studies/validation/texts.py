"""What ``python -m benchmarks.validate`` prints: rows, and errors per source."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.validation.errors import (
    HEADER,
    Errors,
    Outcome,
    oom_line,
    predicted_rows,
    refusals,
)
from benchmarks.studies.validation.reader import Line
from zeropp.contender.contender import ZEROPP


def row_line(outcome: Outcome) -> str:
    """A row's place, configuration, metric, measured and predicted number and error, or the reason
    why nothing was predicted."""
    line = outcome.line
    head = f"{line.place:30} {_configuration(line):46} {line.cells.get('metric', '')[:24]:24}"
    value = f"{line.cells.get('value', '')[:10]:>10} {line.cells.get('unit', '')[:12]:12}"
    if outcome.prediction is None:
        return f"{head} {value} not predicted: {outcome.reason}"
    return f"{head} {value} {outcome.prediction.text:>10} {outcome.prediction.relative_error:+8.1%}"


def _configuration(line: Line) -> str:
    """A row's model, degrees and batch."""
    cells = line.cells
    words = [cells.get("model", "")[:14], f"{cells.get('num_gpus', '')}gpu"]
    words += [f"{k}{cells[k]}" for k in ("tp", "pp", "dp") if cells.get(k)]
    return " ".join(
        [*words, f"mb{cells.get('micro_batch', '')}", f"b{cells.get('global_batch', '')}"]
    )


def summary(outcomes: Sequence[Outcome], errors: Sequence[Errors]) -> str:
    """The errors per source, how many rows were predicted, and why others were not."""
    predicted = predicted_rows(outcomes)
    text = [
        "absolute relative error, simulated against published (ratio: of pairs of runs that differ "
        "in schedule or parallelism alone)",
        "",
        HEADER,
        *(error.line() for error in errors),
        "",
        f"{len(predicted)} of {len(outcomes)} rows predicted",
    ]
    for (table, reason), count in refusals(outcomes).most_common():
        text.append(f"refused: {count:4} of {table}: {reason}")
    return "\n".join([*text, oom_line(predicted), ZEROPP.caveat])
