"""What ``scripts/gpu`` has measured on one GPU, beside what the cost model says of the same.

``zeropp report FOLDER`` of such a folder writes four tables: a lone rank's actions, its step with
host and memory, kernels beside their prices, and the gates of whole runs. The described side is
priced anew from each rank's specification, without what a lone rank has not: network, waits, slower
nodes. It is empty on a CPU, which has no prices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks.records.lone import LONE, LoneRank, read_files, read_lone
from benchmarks.records.record import BLIND
from benchmarks.report import display
from benchmarks.report.table import Column, Table, print_table, table
from benchmarks.report.write import ReportPaths, finished, write_tables
from benchmarks.specification.run_spec import is_priced
from zeropp.choose.contender import describe
from zeropp.price import price_plan
from zeropp.price.peak_memory import rank_peak
from zeropp.price.plan_price import PlanPrice
from zeropp.schedule.plan import Plan

_KINDS = {"F": "forward", "I": "B", "W": "W", "B": "B + W"}
_RATIO = Column("described_over_measured", "described / measured", form=display.ratio)
_KEYS = (
    Column("evidence", "evidence", is_key=True),
    Column("point", "point", is_key=True),
    Column("contender", "contender", is_key=True),
    Column("layout", "layout", is_key=True),
)
_OF_ACTIONS = (
    *_KEYS[:2],
    *(replace(column, hidden=True) for column in _KEYS[2:]),
    Column("action", "action"),
    Column("described_s", "described [s]", form=display.seconds),
    Column("measured_s", "measured [s]", form=display.seconds),
    _RATIO,
)
_OF_STEPS = (
    *_KEYS,
    Column("described_s", "described [s]", form=display.seconds),
    Column("step_s", "step [s]", form=display.seconds),
    _RATIO,
    Column("host_s", "host [s]", form=display.seconds),
    Column("described_gib", "described [GiB]", form="{:.1f}".format),
    Column("peak_gib", "peak [GiB]", form="{:.1f}".format),
    Column("memory_ratio", "described / peak", form=display.ratio),
    Column("megahertz", "MHz", form=display.count),
    Column("loss", "loss", form=display.seconds),
)
_OF_KERNELS = (
    Column("group", "group", is_key=True),
    Column("kernel", "kernel"),
    Column("count", "sizes", form=display.count),
    _RATIO,
    Column("least", "least", form=display.ratio),
    Column("most", "most", form=display.ratio),
)
_OF_GATES = (
    Column("run", "run", is_key=True),
    Column("ranks", "ranks", form=display.count),
    Column("gate", "gate"),
    Column("ended", "ended"),
    Column("run_s", "run [s]", form=display.seconds),
    Column("worst", "nearest to its limit"),
)


def write_one_gpu(folder: Path, out: Path, console: Console | None = None) -> ReportPaths:
    """Print and write the tables of a folder of ``scripts/gpu``; what failed comes first."""
    console = console or Console()
    failed = [f"failed: {one.name}: {one.failed}" for one in read_lone(folder) if one.failed]
    for line in failed:
        console.print(line, markup=False, soft_wrap=True)
    tables = one_gpu_tables(folder)
    for each in tables:
        print_table(each, console)
    names = write_tables("one_gpu", tables, out)
    return finished(names, out, failed, console)


def one_gpu_tables(folder: Path) -> list[Table]:
    """The tables ``actions``, ``steps``, ``kernels`` and ``gates`` of a folder."""
    whole = [one for one in read_lone(folder) if one.spec and one.compute_s]
    planned = [(one, one.spec.plan()) for one in whole if one.spec]
    recomputed = partial(action_lines, plain=_without_recomputation(whole))
    return [
        _ranks_table("actions", "Described against measured", _OF_ACTIONS, planned, recomputed),
        _ranks_table("steps", "Steps, host and memory", _OF_STEPS, planned, step_lines),
        kernel_table(read_files(folder, "prices").get("", {})),
        gate_table(read_files(folder, "many_")),
    ]


Lines = Iterator[dict[str, Any]]


def _ranks_table(
    name: str,
    title: str,
    columns: Sequence[Column],
    ranks: Sequence[tuple[LoneRank, Plan]],
    lines_of: Callable[[LoneRank, Plan, PlanPrice | None], Lines],
) -> Table:
    rows = []
    for one, plan in ranks:
        assert one.spec is not None
        key = {"evidence": LONE, "point": one.name, "contender": plan.contender}
        is_known = is_priced(one.spec.cluster, one.spec.precision)
        price = price_plan(plan, one.spec.cluster) if is_known else None
        key["layout"] = describe(plan)
        rows += [key | line for line in lines_of(one, plan, price)]
    return table(name, title, columns, pd.DataFrame(rows))


def action_lines(
    one: LoneRank, plan: Plan, price: PlanPrice | None, *, plain: Mapping[str, LoneRank]
) -> Lines:
    """One line per kind of action, with the seconds of a step's, and one of all of them. Spans show
    no recomputation, which is in B: it is what B takes longer than that of ``plain`` with the same
    name, a rank of the same job that recomputes nothing."""
    measured = _measured(one, plan)
    measured |= {"update": one.update_s} if one.update_s else {}
    described = described_seconds(one, plan, price) if price else {}
    described["all"] = sum(described.get(action, math.nan) for action in measured)
    measured["all"] = sum(measured.values())
    if one.name in plain:
        saved, place = _measured(plain[one.name], plan), "B" if "B" in measured else "B + W"
        measured["recomputation"] = measured[place] - saved.get(place, math.nan)
    for action, seconds in measured.items():
        told = described.get(action, math.nan)
        yield {
            "action": action,
            "described_s": told,
            "measured_s": seconds,
            "described_over_measured": told / seconds if seconds else math.nan,
        }


def _measured(one: LoneRank, plan: Plan) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for name, median_s in one.compute_s.items():
        seconds[_KINDS[name[-1]]] += plan.num_microbatches * median_s
    return seconds


def _without_recomputation(ranks: Sequence[LoneRank]) -> dict[str, LoneRank]:
    """By the name of a rank that recomputes, one of the same job that does not, if there is one."""

    def job(one: LoneRank) -> object:
        knobs = {"recompute": "none", "recompute_blocks": "auto"}
        values: dict[str, Any] = one.spec.to_dict() if one.spec else {}
        return values | {"contender": values["contender"] | knobs}

    plain = [one for one in ranks if one.spec and _recompute(one) == "none"]
    pairs = ((one, of) for one in ranks for of in plain if _recompute(one) != "none")
    return {one.name: of for one, of in pairs if job(one) == job(of)}


def _recompute(one: LoneRank) -> str:
    return str(getattr(one.spec and one.spec.contender, "recompute", "none"))


def described_seconds(one: LoneRank, plan: Plan, price: PlanPrice) -> dict[str, float]:
    """The cost model's seconds of a step by action, of the stages that the rank has timed, without
    collectives and transfers."""
    told: dict[str, float] = defaultdict(float)
    for stage in sorted({int(name[:-1]) for name in one.compute_s}):
        cost, more, count = price.stages[stage], price.extras[stage], plan.num_microbatches
        own = {
            "forward": cost.forward - more.tensor_forward - more.transfer_forward,
            "B": cost.backward_input - more.tensor_backward - more.transfer_backward,
            "W": cost.backward_weight - more.reductions,
            "recomputation": more.recomputation,
        }
        own["B + W"] = own["B"] + own["W"]
        for action, seconds in own.items():
            told[action] += count * seconds
        told["update"] += cost.update
    return told


def step_lines(one: LoneRank, plan: Plan, price: PlanPrice | None) -> Lines:
    """One line: the median step with its update, which not every contender has a span of, when its
    host had issued it, and the peak."""
    told, step, peak = math.nan, math.nan, one.peak_bytes / 2**30
    if price is not None:
        described = described_seconds(one, plan, price)
        step = sum(described[action] for action in ("forward", "B + W", "update"))
        told = rank_peak(plan, price, plan.layout.coordinates(one.rank)["pp"]).total / 2**30
    yield {
        "described_s": step,
        "step_s": median(one.step_s),
        "described_over_measured": step / median(one.step_s),
        "host_s": median(one.host_s),
        "described_gib": told,
        "peak_gib": peak,
        "memory_ratio": told / peak if peak else math.nan,
        "megahertz": one.megahertz,
        "loss": one.loss,
    }


def kernel_table(prices: Mapping[str, Any]) -> Table:
    """The described time of kernels over what they took: median of their sizes, least, most."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in ("ceilings", "products", "attention", "elementwise"):
        for row in prices.get(group, []):
            if row.get("model_over_measured"):
                ratios[group, row["what"]].append(row["model_over_measured"])
    for row in prices.get("blocks", []):
        for kind, seconds in row.get("device_s", {}).items():
            if kind in row["model_s"]:
                way = "compiled" if row["compiled"] else "eager"
                ratios[f"blocks, {way}", _KINDS[kind]].append(row["model_s"][kind] / seconds)
    rows = [
        {"group": group, "kernel": kernel, "count": len(values), "least": min(values)}
        | {"described_over_measured": median(values), "most": max(values)}
        for (group, kernel), values in ratios.items()
    ]
    return table("kernels", "Kernels, described over measured", _OF_KERNELS, pd.DataFrame(rows))


def gate_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Whether whole runs passed the gate, and how they ended."""
    rows = []
    for name, run in runs.items():
        events = {event["event"]: event for event in run.get("events", [])}
        gate = events.get("gate", {})
        seen = [check for check in gate.get("checks", []) if check["limit"] <= BLIND]
        checks = sorted(seen, key=lambda check: check["error"] / check["limit"])
        row = {"run": name, "ranks": len(run["codes"]), "run_s": run.get("seconds"), "worst": ""}
        row["gate"] = {True: "passed", False: "failed"}.get(gate.get("passed"), "none")
        row["ended"] = "done" if "done" in events else str(run["codes"])
        if checks:
            row["worst"] = "{kind}: {error:.1e} of {limit:.1e}".format(**checks[-1])
        rows.append(row)
    return table("gates", "Gates of whole runs", _OF_GATES, pd.DataFrame(rows))
