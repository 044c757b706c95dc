"""Fits the cost model's constants to published measurements: to all of them, or to those of all
sources but one.

There is one set of constants per chip, and a few constants belong to programs (``conf/program``:
those whose source begins with "fitted on", and those of other entries that say that they are the
same). The fit is least squares on the logarithm of predicted over measured speed, with a soft L1
loss, on at most ``ROWS`` runs of each source, drawn with a fixed seed, so that no source counts for
many. Weak priors hold constants that the data do not determine; they are rates of measured kernels
and round physical numbers. Errors are taken for linear in the logarithms of constants, around those
of ``conf/``, so that leaving a source out needs no price again.
"""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from benchmarks.validation.cases import Case, case_of
from benchmarks.validation.predict import predict_case
from benchmarks.validation.rows import PublishedRow
from benchmarks.validation.stated import preset_of
from zeropp.price.programs import entry_named, program_named, program_names

ROWS = 20  # runs of a source that take part in the fit
_STEP = 0.02  # the change of a constant's logarithm that gives the slope
_SPREAD = 0.05  # errors beyond this count less and less
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FittedConstant:
    """A field of all devices or programs with a name in ``of``, its value today, its physical
    prior, and the width of the prior in logarithms."""

    of: tuple[str, ...]
    field: str  # of a Device (``newer.matmul_bf16_tflops``: of its later kernels), or of a Program
    now: float
    prior: float
    width: float

    @property
    def text(self) -> str:
        """``a100 matmul_bf16_tflops``."""
        return f"{self.of[0]} {self.field}"


# Boards with the same chip; the first one's preset has the value.
_CHIPS = {
    "a100": ("a100", "a100_40gb", "a100_pcie", "a800", "leonardo", "stated"),
    "h100": ("h100", "h100_pcie", "h200", "h800", "gh200"),
    "v100": ("v100",),
    "gb200": ("gb200", "gb300"),
}
# The rates of products are those that fit best to measured kernels (product_times.csv), of GB200
# the B200's by the ratio of their best products; later attention is by arXiv 2407.08608. The other
# priors are round numbers: three quarters of the V100's peak, four fifths of the bandwidth, six
# tenths of the products' rate, and a kernel's start and end.
_PRIORS = (
    *(
        (chip, field, prior, width)
        for chip, rate in (("a100", 240.0), ("h100", 740.0), ("v100", 95.0))
        for field, prior, width in (
            ("matmul_bf16_tflops", rate, 0.2),
            ("memory_efficiency", 0.8, 0.1),
            ("attention_efficiency", 0.6, 0.3),
            ("kernel_us", 5.0, 0.3),
        )
    ),
    ("h100", "newer.matmul_bf16_tflops", 740.0, 0.2),
    ("gb200", "matmul_bf16_tflops", 1163.0, 0.2),
    ("gb200", "newer.matmul_bf16_tflops", 1163.0, 0.2),
)
_THAT_OF = re.compile(r"that of the (\w+) entry")
_WIDTHS = {"traffic_factor": 1.0, "attention_factor": 0.5}  # of priors of 1, which is every default


@cache
def constants() -> tuple[FittedConstant, ...]:
    """All constants that were fitted to published runs."""
    chips = (
        FittedConstant(_CHIPS[chip], field, attrgetter(field)(preset_of(chip).device), prior, width)
        for chip, field, prior, width in _PRIORS
    )
    return (*chips, *_traits())


def _traits() -> Iterator[FittedConstant]:
    """A constant per trait that was fitted, with all entries that have it: by its own source, by
    that of the entry on which they are based, or because they say that it is that entry's."""
    of: dict[tuple[str, str, float], list[str]] = defaultdict(list)
    cited = _THAT_OF.findall(str([entry_named(name).sources for name in program_names()]))
    for name in sorted(program_names(), key=lambda name: name not in cited):
        program, sources = program_named(name), entry_named(name).sources
        for trait, source in sources.items():
            if (there := _THAT_OF.match(source)) and there[1] in cited:
                source = entry_named(there[1]).sources.get(trait, "")
            if source.startswith("fitted on"):
                of[source, trait, getattr(program, trait)].append(name)
    for (_, trait, value), names in of.items():
        yield FittedConstant(tuple(names), trait, value, 1.0, _WIDTHS[trait])


def applies(constant: FittedConstant, case: Case) -> bool:
    """Whether a case has the constant."""
    device, name = case.cluster.device, case.program.name
    later = not constant.field.startswith("newer.") or device.newer is not None
    return (device.name in constant.of and later) or name in constant.of


def with_factors(case: Case, factors: Mapping[FittedConstant, float]) -> Case:
    """The case with constants times so much."""
    for constant, factor in factors.items():
        if applies(constant, case):
            owner = "program" if case.program.name in constant.of else "cluster.device"
            case = _scaled(case, f"{owner}.{constant.field}", factor)
    return case


def _scaled(owner: Any, path: str, factor: float) -> Any:
    """A dataclass with a number of it, or of what it has, times so much."""
    name, _, rest = path.partition(".")
    value = getattr(owner, name)
    return replace(owner, **{name: _scaled(value, rest, factor) if rest else value * factor})


def log_error(row: PublishedRow, case: Case) -> float:
    """The logarithm of predicted over measured speed."""
    return math.log1p(predict_case(row, case).error_of_speed)


def slopes(row: PublishedRow) -> tuple[float, list[float]]:
    """A row's error, and how much it changes with the logarithm of every constant."""
    case = case_of(row)
    error = log_error(row, case)
    return error, [
        (log_error(row, with_factors(case, {c: math.exp(_STEP)})) - error) / _STEP
        if applies(c, case)
        else 0.0
        for c in constants()
    ]


def drawn(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """At most ``ROWS`` of the rows of each source."""
    by_source: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    chosen = []
    for members in by_source.values():
        random.Random(0).shuffle(members)
        chosen += members[:ROWS]
    return chosen


def fit(errors: Array, moved: Array) -> dict[FittedConstant, float]:
    """The constants, as factors of today's, that fit best to runs with these ``errors`` [runs] and
    slopes ``moved`` [runs, constants]."""
    named = constants()
    held = np.log([c.prior / c.now for c in named])
    widths = np.array([c.width for c in named])

    def residuals(changes: Array) -> Array:
        sizes = (errors + moved @ changes) / _SPREAD
        # A soft L1 loss of the errors alone: of the priors, too, it would let go of all of them.
        soft = np.sign(sizes) * np.sqrt(2 * (np.sqrt(1 + sizes**2) - 1))
        return np.concatenate([soft, (changes - held) / widths])

    found = least_squares(residuals, np.zeros(len(named))).x
    return dict(zip(named, np.exp(found).tolist(), strict=True))
