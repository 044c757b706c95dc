"""Which cause explains best that a step takes another time than its price says.

A cause has variants: a constant of the cluster at several places in its plausible range, or a trait
or setting that the run may have had although its configuration says otherwise. The run is priced
with each. If a variant were what happened, the measured time would differ from its price only by
the simulator's own error, so each variant has a likelihood, a cause has the mean of its variants',
and Bayes's rule with equal priors says how probable each cause is, beside the simulator's error
alone and a cause that is not among these. Within a cause every constant and every switch counts the
same, and the places of a constant share its weight as the normal prior of the fit has it. With
several runs a variant must explain all of them. A cause that the file excludes is less
probable before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, cast

import numpy as np

from benchmarks.measured.fit import CONSTANTS, RUN_ERROR, Constant, Priced, Run
from benchmarks.specification import CONF
from benchmarks.specification.reading import preset
from zeropp.price.cluster import Cluster
from zeropp.types.literals import Recompute

NO_CAUSE = "the simulator's own error"
OTHER = "none of these"
_ANY = 0.5  # the standard deviation of a gap's logarithm whose cause is not among these
_PLACES = 7  # in the range of a constant
_LOST = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # of a step's time, between steps
_AGAINST_THE_FILE = 0.1  # the prior of a setting that the file states otherwise; others have 1
_PACKED = (2, 4, 8, 16, 32)  # documents per sequence
_UNCHANGED = 0.005  # a variant whose logarithm of time is closer to the price's explains nothing


@dataclass(frozen=True)
class Variant:
    """A way in which a run may differ from its price; ``weight`` is its own in the mean of its
    cause."""

    cause: str
    words: str
    step_s: Callable[[Priced], float]
    weight: float = 1.0


@dataclass(frozen=True)
class Explanation:
    """A cause, its probability, and its likeliest variant with the seconds of each run's step."""

    cause: str
    probability: float
    words: str
    steps_s: tuple[float, ...]


def explain(runs: Sequence[Run], stated: Collection[str] = ()) -> list[Explanation]:
    """The causes and their probabilities, the likeliest first; ``stated`` are those that a file
    says are otherwise."""
    steps = tuple(run.priced.step_s() for run in runs)
    nothing = _likelihood(runs, steps)
    found: dict[str, list[tuple[float, Variant, tuple[float, ...]]]] = {}
    for variant in VARIANTS:
        changed = tuple(variant.step_s(run.priced) for run in runs)
        if any(abs(log(a / b)) > _UNCHANGED for a, b in zip(changed, steps, strict=True)):
            entry = (_likelihood(runs, changed), variant, changed)
            found.setdefault(variant.cause, []).append(entry)
    # Gaps without any known cause, on the scale of the other likelihoods.
    unknown = _likelihood(runs, steps, _ANY) * (RUN_ERROR / _ANY) ** len(runs)
    weights = {NO_CAUSE: nothing, OTHER: unknown}
    for cause, of in found.items():
        likely = sum(variant.weight * likelihood for likelihood, variant, _ in of)
        prior = _AGAINST_THE_FILE if cause in stated else 1.0
        weights[cause] = prior * likely / sum(variant.weight for _, variant, _ in of)
    whole = sum(weights.values()) or 1.0
    explanations = [Explanation(c, weights[c] / whole, "", steps) for c in (NO_CAUSE, OTHER)]
    for cause, of in found.items():
        _, variant, changed = max(of, key=lambda v: v[0] * v[1].weight)
        explanations.append(Explanation(cause, weights[cause] / whole, variant.words, changed))
    return sorted(explanations, key=lambda e: -e.probability)


def _likelihood(runs: Sequence[Run], steps_s: Sequence[float], spread: float = RUN_ERROR) -> float:
    missed = [log(run.measured_s / step_s) for run, step_s in zip(runs, steps_s, strict=True)]
    return exp(-sum(error**2 for error in missed) / (2 * spread**2))


def _constants() -> Iterator[Variant]:
    for constant in CONSTANTS:
        factors = np.geomspace(constant.low, constant.high, _PLACES)
        weights = np.exp(-((np.log(factors) / constant.spread) ** 2) / 2)
        for factor, weight in zip(factors, weights / weights.sum(), strict=True):
            words = f"{constant.name} at {factor:.2f} of the preset's"
            yield Variant(constant.cause, words, _at(constant, float(factor)), float(weight))


def _at(constant: Constant, factor: float) -> Callable[[Priced], float]:
    return lambda run: replace(run, cluster=constant.scaled(run.cluster, factor)).step_s()


def _with_traits(**traits: Any) -> Callable[[Priced], float]:
    return lambda run: replace(run, program=replace(run.program, **cast("Any", traits))).step_s()


def _where_it_fits(changed: Callable[[Priced], Priced]) -> Callable[[Priced], float]:
    def step_s(run: Priced) -> float:
        other = changed(run)
        return other.step_s() if other.fits() or not run.fits() else run.step_s()

    return step_s


def _recomputing(recompute: Recompute) -> Callable[[Priced], float]:
    return _where_it_fits(
        lambda run: replace(run, plan=replace(run.plan, recompute=recompute, recomputed=()))
    )


def _packed(documents: int) -> Callable[[Priced], float]:
    def step_s(run: Priced) -> float:
        shape = run.plan.shape
        if shape.document:  # the file says how long they are
            return run.step_s()
        shape = replace(shape, document=max(1, shape.seq // documents))
        return replace(run, plan=replace(run.plan, shape=shape)).step_s()

    return step_s


def _on(name: str) -> Callable[[Priced], float]:
    return _where_it_fits(lambda run: replace(run, cluster=preset("cluster", name, Cluster)))


def _with_bits(bits: int) -> Callable[[Priced], float]:
    switched = _with_traits(eight_bit=bits == 8)
    return lambda run: run.step_s() if run.cluster.device.eight_bit_gain is None else switched(run)


def _slowed(share: float) -> Callable[[Priced], float]:
    return lambda run: run.step_s() * (1 + share)


_OVERLAPS = {
    "overlap_tensor": "of tensor-parallel collectives",
    "overlap_reduction": "of gradient reductions",
    "overlap_updated": "of the gathers after the update",
}
VARIANTS = (
    *_constants(),
    *(
        Variant("overlap", f"overlap {of} is {'on' if on else 'off'}", _with_traits(**{name: on}))
        for name, of in _OVERLAPS.items()
        for on in (False, True)
    ),
    Variant("overlap", "transfers between stages block", _with_traits(blocking_transfers=True)),
    *(
        Variant("recomputation", f"recomputation is {kind}", _recomputing(kind))
        for kind in ("none", "selective", "full")
    ),
    Variant(
        "age of the software",
        "attention is not fused",
        _where_it_fits(lambda run: replace(run, program=replace(run.program, flash=False))),
    ),
    Variant("age of the software", "kernels of before 2025", _with_traits(kernels=0)),
    Variant("age of the software", "kernels of 2025", _with_traits(kernels=2025)),
    Variant("precision", "products of 16 bits", _with_bits(16)),
    Variant("precision", "products of 8 bits", _with_bits(8)),
    *(
        Variant("data", f"a wait between steps of {100 * lost:.0f} % of their time", _slowed(lost))
        for lost in _LOST
    ),
    *(
        Variant("packed rows", f"{n} documents in a row (model.document=N says it)", _packed(n))
        for n in _PACKED
    ),
    *(
        Variant("another machine", f"the machine is as the preset {name}", _on(name))
        for name in sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))
        if not name.startswith("cpu_")
    ),
)
