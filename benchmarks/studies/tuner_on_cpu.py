"""Whether the tuner chooses well on a machine that benchmarks.calibrate has measured.

The plans of conf/experiment/tuner_on_cpu.yaml were measured on two ranks with one core each, and
their records have the cluster's constants of that day. The command prices them again and writes
results/reference/tuner_on_cpu.csv, one row per plan, the fastest measured first:

    python -m benchmarks.run experiment=tuner_on_cpu runs_dir=results/reference/tuner_on_cpu
    python -m benchmarks.studies.tuner_on_cpu

``behind`` is by how much a plan's measured step is longer than the fastest's, in percent.
"""

from __future__ import annotations

import csv
from io import StringIO

from benchmarks import CHECKOUT
from benchmarks.records.record import find_records, read_record, write_atomically
from benchmarks.records.samples import summarise
from benchmarks.specification.run_spec import spec_from_mapping
from zeropp.choose.contender import describe
from zeropp.price.simulator import simulate

REFERENCE = CHECKOUT / "results" / "reference"


def rows() -> list[dict[str, object]]:
    """The measured plans with their prices, the fastest measured first."""
    found = []
    for path in find_records([REFERENCE / "tuner_on_cpu"]):
        record = read_record(path)
        spec = spec_from_mapping(record.spec)
        plan = spec.plan()
        measured = summarise(record.step_s)
        priced_s = simulate(plan, spec.cluster).step_s
        found.append((measured.median, measured.spread, priced_s, describe(plan)))
    found.sort()
    return [
        {
            "plan": plan,
            "measured_s": f"{seconds:.4f}",
            "spread": f"{spread:.3f}",
            "priced_s": f"{priced_s:.4f}",
            "place_by_price": 1 + sum(other[2] < priced_s for other in found),
            "behind": f"{100 * (seconds / found[0][0] - 1):.1f}",
        }
        for seconds, spread, priced_s, plan in found
    ]


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
