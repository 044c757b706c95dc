"""Fits the constants of a cluster to the measured steps of a few runs on it.

A cluster's preset has constants (rates, latencies) of machines of its kind, and every machine is a
little different. With few runs most constants are not determined, so each has a prior: it is
around the preset's, as closely as ``Constant.low`` and ``high`` say. The logarithm of a step's time
is taken for linear in the logarithms of the constants, and every run differs from its price by an
error of its own (``RUN_ERROR``), however well the constants are known. Then the most probable
constants, their spread, and that of every priced step follow from the prices of the runs with each
constant changed a little (Bayesian linear regression; Bishop 2006, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from zeropp.cluster import Cluster, Device
from zeropp.plan import Plan
from zeropp.price import price_plan
from zeropp.price.programs import Program
from zeropp.price.simulator import simulate

Array = npt.NDArray[np.float64]

# The standard deviation of ln(measured / priced) that remains once a cluster's constants are known:
# ``benchmarks.studies.measured_fits`` says how often the intervals that follow from it hold.
RUN_ERROR = 0.06
NINETY = 1.645  # standard deviations on both sides of the mean that hold 90 % of a normal variable


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of a cluster: ``low`` and ``high`` are the factors on the preset's value between
    which machines of one kind plausibly are, and ``scaled`` is the cluster with such a factor."""

    name: str
    low: float
    high: float
    scaled: Callable[[Cluster, float], Cluster]

    @property
    def spread(self) -> float:
        """The standard deviation of the factor's logarithm: four of them from low to high."""
        return log(self.high / self.low) / 4


def scaled_device(device: Device, factor: float, *fields: str) -> Device:
    """A device with some fields ``factor`` times as large, those of its newer kernels included."""
    newer = device.newer
    if newer is not None:
        own = [field for field in fields if hasattr(newer, field)]
        newer = replace(newer, **cast("Any", {f: factor * getattr(newer, f) for f in own}))
    changed = {field: factor * getattr(device, field) for field in fields}
    return replace(device, newer=newer, **cast("Any", changed))


def _of_device(*fields: str) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        return replace(cluster, device=scaled_device(cluster.device, factor, *fields))

    return scaled


def _within_node(cluster: Cluster, factor: float) -> Cluster:
    link = cluster.intra
    return replace(cluster, intra=replace(link, efficiency=factor * link.efficiency))


def _between_nodes(cluster: Cluster, factor: float) -> Cluster:
    link = cluster.inter
    return replace(cluster, inter=replace(link, efficiency=factor * link.efficiency))


CONSTANTS = (
    Constant(
        name="rate of matrix products", low=0.75, high=1.15,
        scaled=_of_device("matmul_bf16_tflops", "matmul_fp32_tflops"),
    ),
    Constant(
        name="share of that rate that attention reaches", low=0.5, high=1.5,
        scaled=_of_device("attention_efficiency"),
    ),
    Constant(
        name="bandwidth of element-wise kernels", low=0.6, high=1.25,
        scaled=_of_device("memory_efficiency"),
    ),
    Constant(
        name="time per kernel and launch", low=0.5, high=3.0,
        scaled=_of_device("kernel_us", "launch_us"),
    ),
    Constant(
        name="rate within a node", low=0.4, high=1.3, scaled=_within_node,
    ),
    Constant(
        name="rate between nodes", low=0.15, high=1.3, scaled=_between_nodes,
    ),
    Constant(
        name="slowdown of compute beside collectives", low=0.4, high=3.0,
        scaled=_of_device("overlap_slowdown"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Priced:
    """What the price of a step depends on."""

    plan: Plan
    cluster: Cluster
    program: Program

    @lru_cache(maxsize=4096)  # noqa: B019 (few runs are priced, each with few constants)
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        price = price_plan(self.plan, self.cluster, self.program)
        return simulate(self.plan, self.cluster, price=price).step_s

    def with_factors(self, factors: Sequence[float]) -> Priced:
        """The same run with factors on ``CONSTANTS``."""
        return replace(self, cluster=scaled_cluster(self.cluster, factors))

    @lru_cache(maxsize=4096)  # noqa: B019
    def slopes(self) -> tuple[float, ...]:
        """By how much the logarithm of the step's time changes with that of each constant."""
        at_preset = log(self.step_s())
        slopes = []
        for constant in CONSTANTS:
            factor = exp(-constant.spread)
            changed = replace(self, cluster=constant.scaled(self.cluster, factor))
            slopes.append((at_preset - log(changed.step_s())) / constant.spread)
        return tuple(slopes)


@dataclass(frozen=True)
class Run:
    """A priced run and the seconds of its measured step."""

    priced: Priced
    measured_s: float


def scaled_cluster(cluster: Cluster, factors: Sequence[float]) -> Cluster:
    """A cluster with factors on ``CONSTANTS``."""
    for constant, factor in zip(CONSTANTS, factors, strict=True):
        cluster = constant.scaled(cluster, factor)
    return cluster


@dataclass(frozen=True)
class Fitted:
    """The factors on ``CONSTANTS`` that explain measured runs best: the logarithms of the factors,
    and their covariance."""

    logarithms: Array
    covariance: Array

    @property
    def factors(self) -> tuple[float, ...]:
        """The most probable factor of each constant."""
        return tuple(np.exp(self.logarithms).tolist())

    def intervals(self) -> Mapping[str, tuple[float, float, float]]:
        """By the constant's name: its factor, and the ends between which it is with 90 %."""
        spreads = NINETY * np.sqrt(np.diag(self.covariance))
        ends = np.exp([self.logarithms, self.logarithms - spreads, self.logarithms + spreads])
        return {constant.name: tuple(ends[:, i]) for i, constant in enumerate(CONSTANTS)}

    def step_s(self, priced: Priced) -> tuple[float, float, float]:
        """Seconds of another run's step with these constants, and the ends of its 90 %."""
        slopes = np.array(priced.slopes())
        spread = NINETY * float(np.sqrt(slopes @ self.covariance @ slopes + RUN_ERROR**2))
        seconds = priced.with_factors(self.factors).step_s()
        return seconds, seconds * exp(-spread), seconds * exp(spread)


def fit(runs: Sequence[Run]) -> Fitted:
    """The constants that explain the runs best; without a run those of the preset. Prices bend a
    little, so the straight line is drawn again from where it led to, twice."""
    slopes = np.array([run.priced.slopes() for run in runs]).reshape(len(runs), len(CONSTANTS))
    precision = np.diag([constant.spread**-2 for constant in CONSTANTS])
    covariance = np.linalg.inv(precision + slopes.T @ slopes / RUN_ERROR**2)
    logarithms = np.zeros(len(CONSTANTS))
    for _ in range(3):
        factors = tuple(np.exp(logarithms).tolist())
        missed = [log(r.measured_s / r.priced.with_factors(factors).step_s()) for r in runs]
        line = np.array(missed) + slopes @ logarithms
        logarithms = covariance @ slopes.T @ line / RUN_ERROR**2
    return Fitted(logarithms, covariance)
