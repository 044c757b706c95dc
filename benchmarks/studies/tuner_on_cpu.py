"""Whether the tuner chooses well on a machine that benchmarks.calibrate has measured.

The plans of conf/experiment/tuner_on_cpu.yaml were measured on two ranks with one core each, and
their records have the cluster's constants of that day. The command prices them again and writes
results/reference/tuner_on_cpu.csv, one row per plan of each model, the fastest measured first:

    python -m benchmarks.run experiment=tuner_on_cpu runs_dir=results/reference/tuner_on_cpu
    python -m benchmarks.studies.tuner_on_cpu

``measured_s`` is the median of a plan's runs, ``lowest_s`` and ``highest_s`` are the runs farthest
from it, and ``behind`` is by how much it is longer than the fastest plan's, in percent.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from io import StringIO
from operator import itemgetter
from statistics import median

from benchmarks import CHECKOUT
from benchmarks.records.record import find_records, read_record, write_atomically
from benchmarks.specification.run_spec import spec_from_mapping
from zeropp.choose.contender import describe
from zeropp.price.simulator import simulate

REFERENCE = CHECKOUT / "results" / "reference"


def rows() -> list[dict[str, object]]:
    """The measured plans with their prices, of each model the fastest measured first."""
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    priced: dict[tuple[str, str], float] = {}
    for path in find_records([REFERENCE / "tuner_on_cpu"]):
        record = read_record(path)
        spec = spec_from_mapping(record.spec)
        plan = spec.plan()
        key = spec.model.name, describe(plan)
        runs[key].append(median(record.step_s))
        priced[key] = simulate(plan, spec.cluster).step_s
    found = []
    for model in dict.fromkeys(model for model, _ in runs):
        measured = {key: median(seconds) for key, seconds in runs.items() if key[0] == model}
        fastest = min(measured.values())
        found += [
            {
                "model": model,
                "plan": key[1],
                "runs": len(runs[key]),
                "measured_s": f"{seconds:.4f}",
                "lowest_s": f"{min(runs[key]):.4f}",
                "highest_s": f"{max(runs[key]):.4f}",
                "priced_s": f"{priced[key]:.4f}",
                "place_by_price": 1 + sum(priced[other] < priced[key] for other in measured),
                "behind": f"{100 * (seconds / fastest - 1):.1f}",
            }
            for key, seconds in sorted(measured.items(), key=itemgetter(1))
        ]
    return found


def main() -> None:
    """Write the table and print it."""
    table, text = rows(), StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_atomically(REFERENCE / "tuner_on_cpu.csv", text.getvalue())
    print(text.getvalue())


if __name__ == "__main__":
    main()
