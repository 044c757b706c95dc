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
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from zeropp.price import price_plan
from zeropp.price.cluster import Cluster, Device, Link
from zeropp.price.programs import Program
from zeropp.price.simulator import SimResult, simulate
from zeropp.schedule.plan import Plan

Array = npt.NDArray[np.float64]

# The standard deviation of ln(measured / priced) that remains once a cluster's constants are known:
# results/reference/measured_fits.csv says how often the intervals that follow from it hold.
RUN_ERROR = 0.06
STEPS = 4  # of Gauss and Newton
NINETY = 1.645  # standard deviations on both sides of the mean that hold 90 % of a normal variable


@dataclass(frozen=True)
class Constant:
    """A constant of a cluster: ``low`` and ``high`` are the factors on the preset's value between
    which machines of one kind plausibly are, ``scaled`` is the cluster with such a factor, and
    ``cause`` is what a machine with another value would be said to suffer from."""

    name: str
    cause: str
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


def _of_link(part: Literal["intra", "inter"]) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        link: Link = getattr(cluster, part)
        changed = {part: replace(link, efficiency=factor * link.efficiency)}
        return replace(cluster, **cast("Any", changed))

    return scaled


CONSTANTS = (
    Constant(
        "rate of matrix products", "clock or power", 0.8, 1.12,
        _of_device("matmul_bf16_tflops", "matmul_fp32_tflops"),
    ),
    Constant(
        "attention's share of the products' rate", "age of the software", 0.7, 1.3,
        _of_device("attention_efficiency"),
    ),
    Constant(
        "bandwidth of element-wise kernels", "age of the software", 0.6, 1.25,
        _of_device("memory_efficiency"),
    ),
    Constant(
        "time per kernel and launch", "host-bound", 0.5, 3.0, _of_device("kernel_us", "launch_us")
    ),
    Constant("rate within a node", "network", 0.4, 1.3, _of_link("intra")),
    Constant("rate between nodes", "network", 0.15, 1.3, _of_link("inter")),
    Constant(
        "time per hop between nodes", "network", 0.25, 16.0,
        lambda cluster, factor: replace(
            cluster, inter=replace(cluster.inter, hop_us=factor * cluster.inter.hop_us)
        ),
    ),
    Constant(
        "slowdown of compute beside collectives", "overlap", 0.4, 3.0,
        _of_device("overlap_slowdown"),
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
        return self._simulated().step_s

    def fits(self) -> bool:
        """Whether every rank's peak is within the device's memory for tensors."""
        return self._simulated().peak_bytes <= self.cluster.device.usable_bytes

    def _simulated(self) -> SimResult:
        price = price_plan(self.plan, self.cluster, self.program)
        return simulate(self.plan, self.cluster, price=price)

    def with_factors(self, factors: Sequence[float]) -> Priced:
        """The same run with factors on ``CONSTANTS``."""
        return replace(self, cluster=scaled_cluster(self.cluster, factors))

    def slopes(self, logarithms: Array) -> Array:
        """By how much the logarithm of the step's time changes with that of each constant, where
        their factors have these logarithms: between one standard deviation to either side, because
        what is hidden by compute at one rate is not at another."""
        slopes = []
        for i, constant in enumerate(CONSTANTS):
            ends = logarithms + np.outer(
                (-constant.spread, constant.spread), np.eye(len(CONSTANTS))[i]
            )
            below, above = (self.with_factors(np.exp(end).tolist()).step_s() for end in ends)
            slopes.append(log(above / below) / (2 * constant.spread))
        return np.array(slopes)


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

    @property
    def beyond(self) -> dict[Constant, float]:
        """The factors that no machine of the kind plausibly has."""
        of = zip(CONSTANTS, self.factors, strict=True)
        return {constant: f for constant, f in of if not constant.low <= f <= constant.high}

    def intervals(self) -> Mapping[str, tuple[float, float, float]]:
        """By the constant's name: its factor, and the ends between which it is with 90 %."""
        spreads = NINETY * np.sqrt(np.diag(self.covariance))
        ends = np.exp([self.logarithms, self.logarithms - spreads, self.logarithms + spreads])
        return {constant.name: tuple(ends[:, i]) for i, constant in enumerate(CONSTANTS)}

    def step_s(self, priced: Priced) -> tuple[float, float, float]:
        """Seconds of another run's step with these constants, and the ends of its 90 %."""
        slopes = priced.slopes(self.logarithms)
        spread = NINETY * float(np.sqrt(slopes @ self.covariance @ slopes + RUN_ERROR**2))
        seconds = priced.with_factors(self.factors).step_s()
        return seconds, seconds * exp(-spread), seconds * exp(spread)


def fit(runs: Sequence[Run]) -> Fitted:
    """The constants that explain the runs best (Gauss-Newton steps of the line's least squares)."""
    logarithms = np.zeros(len(CONSTANTS))
    prior = np.diag([constant.spread**-2 for constant in CONSTANTS])
    for _ in range(STEPS):
        priced = [run.priced.with_factors(np.exp(logarithms).tolist()) for run in runs]
        missed = [log(run.measured_s / p.step_s()) for run, p in zip(runs, priced, strict=True)]
        slopes = np.array([run.priced.slopes(logarithms) for run in runs])
        covariance = np.linalg.inv(prior + slopes.T @ slopes / RUN_ERROR**2)
        logarithms = covariance @ slopes.T @ (missed + slopes @ logarithms) / RUN_ERROR**2
    return Fitted(logarithms, covariance)
