"""How often the simulator finds the configuration that others measured as their fastest.

A group are published runs of one source with the same model, sequence, GPUs, batch and precision,
in which degrees of parallelism differ. The command reads the committed predictions and writes
results/reference/plan_ranks.csv, one row per group:

    python -m benchmarks.studies.plan_ranks

``rank`` is the place that the simulator gives to the measured best; ``behind_percent`` is how much
slower the simulator's first was than the measured best, by their measured times.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.records.record import write_atomically

REFERENCE = CHECKOUT / "results" / "reference"
_SAME = ("source", "model", "seq", "device", "num_gpus", "global_batch", "dtype", "metric")
_DEGREES = ("tp", "pp", "chunks", "cp", "zero", "zero3_group")
_PLAN = (*_DEGREES, "micro_batch", "recompute", "recompute_blocks", "sequence_parallel")
_TIMES = ("step_time",)
_RATES = ("tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "samples_per_s_per_gpu")
COLUMNS = (*_SAME, "plans", "measured_best", "predicted_best", "rank", "behind_percent")

Run = dict[str, str]


def groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """The runs of each group; every run is measured and priced, and the fastest of equal plans
    stands for them."""
    by_setting: dict[tuple[str, ...], dict[tuple[str, ...], Run]] = defaultdict(dict)
    for run in runs:
        if run["first_of_run"] != "yes" or not run["predicted"]:
            continue
        if run["metric"] not in (*_TIMES, *_RATES):
            continue
        plans = by_setting[tuple(run[key] for key in _SAME)]
        plan = tuple(run[key] for key in (*_PLAN, "schedule", "program", "compiled"))
        if plan not in plans or seconds(run, "value") < seconds(plans[plan], "value"):
            plans[plan] = run
    for plans in by_setting.values():
        if len({tuple(run[key] for key in _DEGREES) for run in plans.values()}) > 1:
            yield list(plans.values())


def seconds(run: Run, column: str) -> float:
    """A measured (``value``) or ``predicted`` number, such that less is better."""
    number = float(run[column])
    return number if run["metric"] in _TIMES else 1 / number


def row_of(group: Sequence[Run]) -> dict[str, object]:
    """One row of the table."""
    by_price = sorted(group, key=lambda run: seconds(run, "predicted"))
    best = min(group, key=lambda run: seconds(run, "value"))
    behind = seconds(by_price[0], "value") / seconds(best, "value") - 1
    return {
        **{key: best[key] for key in _SAME},
        "plans": len(group),
        "measured_best": _words(best),
        "predicted_best": _words(by_price[0]),
        "rank": by_price.index(best) + 1,
        "behind_percent": round(100 * behind, 1),
    }


def _words(run: Run) -> str:
    """The degrees and settings of a run; what is 1, no or empty is left out."""
    return " ".join(f"{k}={run[k]}" for k in _PLAN if run[k] not in ("", "1", "no", "none", "0"))


def main(reference: Path = REFERENCE) -> None:
    """Write the table and print its summary."""
    with (reference / "validation" / "validation.csv").open(newline="", encoding="utf-8") as file:
        rows = [row_of(group) for group in groups(list(csv.DictReader(file)))]
    lines = [",".join(COLUMNS)]
    lines += [",".join(_cell(row[key]) for key in COLUMNS) for row in rows]
    write_atomically(reference / "plan_ranks.csv", "\n".join(lines) + "\n")
    print(summary(rows))


def _cell(value: object) -> str:
    text = str(value)
    return f'"{text}"' if "," in text else text


def summary(rows: Sequence[dict[str, object]]) -> str:
    """How often the measured best is first, and how far the simulator's first is behind it."""
    behind = sorted(float(str(row["behind_percent"])) for row in rows)
    first = sum(row["rank"] == 1 for row in rows)
    close = sum(value <= 3 for value in behind)
    return (
        f"{len(rows)} groups: the measured best is the simulator's first in {first}; the "
        f"simulator's first is at most 3 % slower than it in {close}, in the median "
        f"{behind[len(behind) // 2]:.1f} %, at worst {behind[-1]:.1f} %"
    )


if __name__ == "__main__":
    main()
