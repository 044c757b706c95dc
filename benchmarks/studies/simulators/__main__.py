"""Asks the simulators of others about all published runs; see ``--help``."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.specification.command import CommandParser, command
from benchmarks.studies.simulators.compare import ANSWERS, ASKED
from benchmarks.studies.simulators.install import SIMULATORS, ask, prepare
from benchmarks.studies.simulators.runs import timed_runs
from benchmarks.studies.validation.rows import read_rows, training_tables

_COLUMNS = ("simulator", "place", "value", "measured_s", "step_s", "reason")


@command
def main() -> int:
    """Write the answers of every simulator to results/reference/simulators."""
    parser = CommandParser(
        prog="python -m benchmarks.studies.simulators",
        description="Ask public simulators of training for the published runs of "
        "results/published, and write their answers to results/reference/simulators.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="where the simulators are, or are installed to: env (an environment), llm_analysis, "
        "calculon and simumax (checkouts)",
    )
    folder = parser.parse_args().folder.resolve()
    prepare(folder)
    lines = [line for path in training_tables() for line in read_rows(path)]
    values = {line.place: line.cells["value"] for line in lines}
    timed = timed_runs(lines)
    runs = [run for run, _ in timed.values()]
    ANSWERS.parent.mkdir(parents=True, exist_ok=True)
    with ANSWERS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for simulator in SIMULATORS:
            answers = ask(simulator, folder, runs)
            for (place, (_, seconds)), answer in zip(timed.items(), answers, strict=True):
                head = {"simulator": simulator.adapter, "place": place, "value": values[place]}
                if "step_s" in answer:
                    answer["step_s"] = f"{answer['step_s']:.6g}"
                writer.writerow(head | {"measured_s": f"{seconds:.6g}"} | answer)
            told = sum("step_s" in answer for answer in answers)
            print(f"{simulator.label}: {told} of {len(runs)} runs", flush=True)
    ASKED.write_text(f"{datetime.now(UTC):%Y-%m-%d}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
