"""Fits the cost model's constants to published measurements and prints them; it writes nothing.

There is one set of constants per device, and a few constants belong to programs
(``conf/program``); none belongs to a single row. The fit is least squares on the logarithm of
predicted over measured throughput, with a soft L1 loss, on at most ``--rows`` rows, drawn with a
fixed seed, of each table whose rows have ``role=fitted``. Weak priors hold constants that the data
do not determine. The rounded results are copied into ``conf/cluster`` and ``conf/program`` by
hand. It takes some minutes.

    python -m benchmarks.validation.fit_constants [--rows 120]
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from scipy.optimize import least_squares

from benchmarks.specification.command import CommandParser, command
from benchmarks.validation.cases import Case, case_of
from benchmarks.validation.predict import predict_case
from benchmarks.validation.rows import (
    PublishedRow,
    UnpredictableError,
    read_rows,
    training_tables,
)


@dataclass(frozen=True)
class Constant:
    """A field of the device or program with the name ``of``, its physical prior, and the width of
    the prior in logarithms."""

    of: str
    field: str
    prior: float
    width: float


# The rates of products on A100 and H100 are those that fit best to measured kernels (the study
# ``product_times``). The other priors are round numbers: three quarters of the V100's peak, four
# fifths of the bandwidth, six tenths of the products' rate, and a kernel's start and end.
CONSTANTS = (
    *(
        Constant(device, field, prior, width)
        for device, rate in (("a100", 240.0), ("h100", 740.0), ("v100", 95.0))
        for field, prior, width in (
            ("matmul_bf16_tflops", rate, 0.2),
            ("memory_efficiency", 0.8, 0.1),
            ("attention_efficiency", 0.6, 0.3),
            ("kernel_us", 5.0, 0.3),
        )
    ),
    Constant("llm_foundry", "traffic_factor", 1.0, 1.0),
    Constant("llm_foundry", "attention_factor", 1.0, 0.5),
    Constant("libai", "traffic_factor", 1.0, 1.0),
    Constant("megatron_lm_v100", "traffic_factor", 1.0, 1.0),
)


@dataclass(frozen=True)
class FittedRow:
    """One published row and the case that it describes."""

    row: PublishedRow
    case: Case

    def log_error(self, values: Sequence[float]) -> float:
        """The logarithm of predicted over measured throughput with these constants."""
        device, program = self.case.cluster.device, self.case.program
        for constant, value in zip(CONSTANTS, values, strict=True):
            if constant.of == device.name:
                device = replace(device, **cast("Any", {constant.field: value}))
            elif constant.of == program.name:
                program = replace(program, **cast("Any", {constant.field: value}))
        cluster = replace(self.case.cluster, device=device)
        case = replace(self.case, cluster=cluster, program=program)
        return math.log1p(predict_case(self.row, case).relative_error)


def samples(rows: int) -> list[FittedRow]:
    """Throughput rows of the sources that take part in the fit, at most ``rows`` per table."""
    chosen = []
    for table in training_tables():
        understood = []
        for row in (line.row for line in read_rows(table)):
            if row is None or row.role != "fitted":
                continue
            try:
                sample = FittedRow(row, case_of(row))
                if predict_case(row, sample.case).kind == "throughput":
                    understood.append(sample)
            except UnpredictableError:
                continue
        random.Random(0).shuffle(understood)
        chosen += understood[:rows]
    return chosen


def fit(chosen: Sequence[FittedRow]) -> Sequence[float]:
    """The fitted constants, in the order of ``CONSTANTS``."""
    priors = np.log([c.prior for c in CONSTANTS])
    widths = np.array([c.width for c in CONSTANTS])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        errors = [sample.log_error(np.exp(logarithms)) for sample in chosen]
        held = (logarithms - priors) / widths
        print(f"median error {100 * np.median(np.abs(errors)):.2f} %", flush=True)
        return np.concatenate([np.array(errors) / 0.05, held])

    done = least_squares(residuals, priors, loss="soft_l1", diff_step=1e-3, xtol=1e-3, max_nfev=12)
    values: list[float] = np.exp(done.x).tolist()
    return values


@command
def main() -> int:
    """Print every constant beside its prior; see ``--help``."""
    parser = CommandParser(
        description="Fit the cost model's constants on published measurements and print them. "
        "Writes nothing; takes some minutes.",
        epilog="example: python -m benchmarks.validation.fit_constants --rows 20",
    )
    parser.add_argument("--rows", type=int, default=120, help="rows per source (%(default)s)")
    chosen = samples(parser.parse_args().rows)
    print(f"{len(chosen)} rows")
    for constant, value in zip(CONSTANTS, fit(chosen), strict=True):
        print(f"{constant.of:20} {constant.field:22} {value:8.3f}   prior {constant.prior:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
