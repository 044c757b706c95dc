"""How far the verdict's ratios may be from what GPUs would show, by the simulator's known errors.

A simulated ratio of two programs is off by what the simulator misses of each program, and by the
constants that it assumes. Both are drawn many times:

* *Errors of programs*, from published runs on the generations of devices that the verdict has. The
  error of a run, ln(predicted speed / published speed), is taken apart into the median error of its
  source and program, which all cells of a program have in common, and the rest, which every cell
  has for itself. A draw gives each program of the comparison, ZeroPP among them, the common error
  of some source and program, and each of its cells the rest of some run; every source and program
  has the same weight, however many runs it published. What is wrong with a device is wrong for both
  programs of a cell, so common errors are taken around their median. The errors are those of
  strangers (``benchmarks.validation.strangers``): nothing of a source had a part in its price.
* *Assumptions* (``assumptions``), each at a place in its range that is drawn once for all cells.

Of KempnerForge's pipelines, the published runs nearest to ZeroPP's layout, the errors are those of
replays of its code: its description is wrong by a third, and ZeroPP's is held to its code by
replays. What is published partly depends on the same constants, so some of the error is counted
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.report.ratio_errors import stranger_runs
from benchmarks.specification.contenders import COMPARED, Compared
from benchmarks.verdict.assumptions import ASSUMPTIONS
from benchmarks.verdict.cells import CELL
from benchmarks.verdict.judge import (
    BASELINES,
    CLAIM,
    JUDGED,
    by_batch,
    judge,
    plans_of,
)

Array = npt.NDArray[np.float64]
DEVICES = ("a100", "a800", "h100", "h800", "h200")  # the generations of the verdict's clusters
FEWEST_RUNS = 3  # of a source and program whose median error counts
DRAWS = 4000
_REFERENCE = CHECKOUT / "results" / "reference"
_REPLAYS = _REFERENCE / "kempnerforge_replays.csv"
LIMITS = (0.05, 0.95)  # an interval's ends, as shares of the draws
SEED = 33


@dataclass(frozen=True)
class ProgramErrors:
    """The errors of published runs, ln(predicted speed / published speed), in two parts."""

    common: Array  # per program its median, around the median over programs
    rest: tuple[Array, ...]  # per program, its runs around its median

    def draw(self, rng: np.random.Generator, cells: int) -> Array:
        """Errors of one program in ``cells`` cells, one line per draw."""
        pool = np.concatenate(self.rest)
        weights = np.concatenate([np.full(len(r), 1 / len(r)) for r in self.rest])
        common = rng.choice(self.common, (DRAWS, 1))
        own = rng.choice(pool, (DRAWS, cells), p=weights / weights.sum())
        return np.asarray(common + own)


def program_errors() -> ProgramErrors:
    """The errors of all sources and programs with enough published runs on ``DEVICES``."""
    table = published()
    groups = table[table["device"].isin(DEVICES)].groupby(["source", "program"])["error"]
    runs = [group.to_numpy(dtype=float) for _, group in groups if len(group) >= FEWEST_RUNS]
    medians = np.array([np.median(run) for run in runs])
    rest = tuple(run - median for run, median in zip(runs, medians, strict=True))
    return ProgramErrors(medians - np.median(medians), rest)


def published() -> pd.DataFrame:
    """The published runs from which errors are drawn, with their cells, ``error`` as a
    logarithm."""
    table = pd.DataFrame(stranger_runs())
    table = table[(table["quantity"] == "speed") & table["layers"].notna()]
    table = table.assign(error=np.log1p(table["stranger"].astype(float)))
    pipelines = table.index[table["program"] == "kempnerforge"]
    replays = kempnerforge_replays()
    table.loc[pipelines, "error"] = np.log1p(replays[: len(pipelines)])
    return table


def blind_errors() -> Array:
    """The errors, as logarithms, of runs that were priced before their numbers had been seen."""
    table = pd.DataFrame(stranger_runs())
    table = table[(table["quantity"] == "speed") & (table["blind"] != table["stranger"])]
    return np.log1p(table["blind"].astype(float).to_numpy())


def kempnerforge_replays() -> Array:
    """The errors of the replays of KempnerForge's pipelines: replayed over measured speed - 1."""
    table = pd.read_csv(_REPLAYS)
    return np.asarray(table["measured_step_s"] / table["replayed_step_s"] - 1, dtype=float)


@dataclass(frozen=True)
class Interval:
    """A simulated value, and the ends between which 90 % of the draws are."""

    value: float
    low: float
    high: float


class Uncertainty:
    """Drawn ratios of ZeroPP's speed to every other row's, in the cells of ``best``, which are
    judged cells with best plans at the clusters' own bandwidth.

    ``repriced`` has seconds per step as they are and under every assumption, by cell and row, of
    these plans or of others of the same rows; without lines the assumptions are left out.
    """

    def __init__(
        self,
        best: pd.DataFrame,
        repriced: pd.DataFrame,
        errors: ProgramErrors,
    ) -> None:
        self._best = best.set_index(CELL)
        self._repriced = repriced
        rng = np.random.default_rng(SEED)
        programs = dict.fromkeys(map(_program, COMPARED.values()))
        self._errors = {name: errors.draw(rng, len(best)) for name in programs}
        self._places = rng.uniform(-1.0, 1.0, (DRAWS, len(ASSUMPTIONS)))

    def median(self, name: str, cells: pd.Series | None = None) -> Interval:
        """The median ratio over the cells for which ``cells`` is true (by default, all)."""
        return self._interval(name, cells, lambda ratios: np.median(ratios, axis=-1))

    @cached_property
    def medians(self) -> Mapping[str, Mapping[str, Interval]]:
        """The median ratios by row, and by the words for the sequences per GPU."""
        groups = by_batch(self._best.reset_index())
        return {
            name: {words: self.median(name, cells) for words, cells in groups.items()}
            for name in BASELINES
        }

    def reached(self, name: str) -> Interval:
        """The number of cells in which ZeroPP is at least 1.33 times as fast."""
        return self._interval(name, None, lambda ratios: (ratios >= CLAIM).sum(axis=-1))

    def surely_reached(self, name: str) -> int:
        """In how many of these cells the low end of the ratio's own interval is 1.33, too."""
        low = np.quantile(self.drawn[name], LIMITS[0], axis=0)
        return int(((low >= CLAIM) & (self.simulated(name) >= CLAIM)).sum())

    def _interval(
        self, name: str, cells: pd.Series | None, of: Callable[[Array], Array]
    ) -> Interval:
        chosen = np.isfinite(self.simulated(name))  # both have a plan that fits
        if cells is not None:
            chosen &= cells.to_numpy(dtype=bool)
        if not chosen.any():
            return Interval(np.nan, np.nan, np.nan)
        value = float(of(self.simulated(name)[chosen]))
        low, high = np.quantile(of(self.drawn[name][:, chosen]), LIMITS)
        return Interval(value, float(low), float(high))

    def simulated(self, name: str) -> Array:
        """The simulated ratios over a row, by cell."""
        return self._best[f"speedup_over_{name}"].to_numpy(dtype=float)

    @cached_property
    def drawn(self) -> Mapping[str, Array]:
        """By row, a line of ratios per draw, with a column per cell."""
        zeropp = self._errors["zeropp"]
        return {
            name: self.simulated(name)
            * np.exp(self._errors[_program(COMPARED[name])] - zeropp + self._assumed(name))
            for name in BASELINES
        }

    def _assumed(self, name: str) -> Array:
        """What the assumptions change of a row's ratios, as logarithms: straight lines between the
        ends of every range."""
        total = np.zeros((DRAWS, len(self._best)))
        for number, (low, high) in enumerate(self.moved(name)):
            place = self._places[:, [number]]
            total += np.where(place > 0, place * np.log(high), -place * np.log(low))
        return total

    def moved_medians(self, name: str) -> dict[str, list[tuple[float, float]]]:
        """By the words for the sequences per GPU, the median ratio over a row at both ends of the
        range of each of ``ASSUMPTIONS``."""
        ratios = [[self.simulated(name) * end for end in ends] for ends in self.moved(name)]
        return {
            words: [
                (float(pd.Series(low)[cells].median()), float(pd.Series(high)[cells].median()))
                for low, high in ratios
            ]
            for words, cells in by_batch(self._best.reset_index()).items()
        }

    def moved(self, name: str) -> list[tuple[Array, Array]]:
        """Per assumption the factors of a row's ratios, by cell, at both ends of its range."""
        if self._repriced.empty:
            return []
        zeropp, other = (
            step_times(self._repriced, row, self._best.index) for row in ("zeropp", name)
        )
        ratios = other / zeropp
        simulated = ratios["step_s"].to_numpy()
        return [
            (ratios[low].to_numpy() / simulated, ratios[high].to_numpy() / simulated)
            for low, high in (assumption.columns for assumption in ASSUMPTIONS)
        ]


def _program(row: Compared) -> str:
    """The program of a row; one with a pipeline alone is the same."""
    return row.contender.name.removesuffix("_3d")


def step_times(table: pd.DataFrame, name: str, cells: pd.Index[Any]) -> pd.DataFrame:
    """Seconds per step, by cell and column of a table, of the fastest plan that a row has."""
    own = table[table["contender"].isin(plans_of(name))]
    return own.drop(columns="contender").groupby(CELL).min().reindex(cells)


def judged(plans: pd.DataFrame, repriced: pd.DataFrame) -> tuple[pd.DataFrame, Uncertainty]:
    """The judged cells (``judge``), and the uncertainty of those with best plans at the clusters'
    own bandwidth, whose ends are the columns ``low_over_NAME`` and ``high_over_NAME``."""
    verdicts = judge(plans)
    own = (verdicts["mode"] == "best") & (verdicts["bandwidth"] == 1.0)
    uncertainty = Uncertainty(verdicts[own], repriced, program_errors())
    for name in JUDGED:
        ends = np.quantile(uncertainty.drawn[name], LIMITS, axis=0)
        for word, values in zip(("low", "high"), ends, strict=True):
            verdicts.loc[own, f"{word}_over_{name}"] = values
    return verdicts, uncertainty
