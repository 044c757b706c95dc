"""Committed tables are what today's code computes.

``./scripts/test.sh evidence`` computes every row again. In all other runs it is every n-th row
of each table, and always the same ones.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.evidence import traced
from benchmarks.evidence.renew import REFERENCE
from benchmarks.launch.points import plan_point
from benchmarks.launch.sweep import run_points, spec_of
from benchmarks.records.simulated import BASES, SEARCHED, line_of, plan_record, prediction
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.ratio_errors import memory_room
from benchmarks.report.tables import published as published_scaling
from benchmarks.report.tables import scaling_table
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import CONTENDERS, PRICED, candidate_in, setting_of
from benchmarks.specification.reading import preset
from benchmarks.specification.run_spec import RunSpec
from benchmarks.validation.errors import errors_of
from benchmarks.validation.predict import Prediction, outcome_of
from benchmarks.validation.rows import read_rows, training_tables
from benchmarks.verdict.assumptions import REPRICED
from benchmarks.verdict.cells import Cell, candidate_of
from benchmarks.verdict.uncertainty import judged
from tests.streams.torch_orders import torch_schedule
from zeropp.choose.contender import describe
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.price.flops import model_flops_per_token, parameter_count
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.event_loop import run
from zeropp.schedule.legality import live_activations, resident_chunks
from zeropp.schedule.program import Op, StageCost

Row = dict[str, str]
BOUND = json.loads((REFERENCE / "schedule_orders.json").read_text())["bound"]


@cache
def read(path: str) -> list[Row]:
    return list(csv.DictReader((REFERENCE / path).read_text(encoding="utf-8").splitlines()))


@cache
def published() -> dict[str, Any]:
    return {line.place: line for path in training_tables() for line in read_rows(path)}


def validation(row: Row) -> dict[str, Any]:
    outcome = outcome_of(published()[row["place"]])
    computed = {name: outcome.line.cells[name] for name in row if name in outcome.line.cells}
    computed |= {"reason": outcome.reason, "predicted": "", "relative_error": "", "fits": ""}
    if outcome.prediction is not None:
        computed["predicted"] = outcome.prediction.text
        computed["relative_error"] = f"{outcome.prediction.relative_error:.4f}"
        computed["fits"] = "yes" if outcome.prediction.fits else "no"
    return computed


@cache
def simulated(name: str, cell: Cell, candidate: Candidate[Any]) -> dict[str, Any]:
    """The columns of a plan. Several rows of a cell, and both modes, may have the same one."""
    result = PRICED[name].simulated(cell.priced, candidate)
    record = plan_record(
        cell.task,
        name,
        BASES["best"],
        bandwidth=cell.bandwidth,
        words=describe(result.plan),
        setting=setting_of(candidate),
        predicted=prediction(result),
    )
    return {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line_of(record).items()}


def plan(row: Row) -> dict[str, Any]:
    if row["plan"].startswith("no plan"):
        return dict.fromkeys(("step_s", "peak_gib", "setting"), "")
    setting = json.loads(row["setting"])
    _, contender, candidate = candidate_of(row["setting"])
    computed = simulated(contender.name, traced.cell_of(row), candidate)
    # A row may have the plan of another row that is its own, too (``with_shared_plans``), and need
    # not name degrees that are 1.
    again = setting_of(candidate)
    again["knobs"] |= {"name": setting["knobs"]["name"]}
    named = {name: again["knobs"].pop(name, None) for name in setting["knobs"]}
    again["knobs"] = named | {name: v for name, v in again["knobs"].items() if v != 1}
    own = {"setting": json.dumps(again)}
    left_out = ("commit", "contender", "mode", *SEARCHED)  # nor what only a search says
    return {k: v for k, v in (computed | own).items() if k not in left_out}


def schedule(row: Row) -> dict[str, Any]:
    ranks, chunks, m = int(row["ranks"]), int(row["chunks"]), int(row["microbatches"])
    if row["schedule"] == "ZeroPP":
        unit = int(row["unit"])
        # The cap is the default, U*V, and each gather starts one use ahead.
        order = build("zeropp", num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=unit)
        order = lower(order, gather=True)
        bound = f"{1 + (ranks - 1) / (3 * m * chunks):.4f}"
    else:
        order, bound = torch_schedule(row["schedule"], ranks, chunks, m), ""
        programs = (tuple(a for a in each if not a.op.is_transfer) for each in order.programs)
        order = replace(order, programs=tuple(programs))
    result = run(order, [StageCost()] * order.num_stages)
    peak = max(max(live_activations(order, rank)) for rank in range(ranks))
    gathers = max(sum(a.op is Op.UNSHARD for a in program) for program in order.programs)
    resident = max(max(resident_chunks(order, rank)) for rank in range(ranks))
    return {
        "step_over_ideal": f"{result.over_ideal:.4f}",
        "bound": bound,
        "activations_over_1f1b": f"{peak / (ranks * chunks):.3f}",
        "gathers_per_step": gathers,
        "parameter_passes_per_step": f"{gathers / chunks:.2f}",
        "resident_chunks": resident,
        "resident_share": f"{resident / chunks:.2f}",
    }


@cache
def points_of(experiment: str) -> dict[str, RunSpec]:
    """A point of a study of scaling by its model and number of GPUs."""
    words = [f"experiment={experiment}", "cluster=a100", "contender=fsdp"]
    specs = map(spec_of, compose("config", words))
    return {f"{spec.model.name} {spec.num_gpus}": spec for spec in specs}


def scaling(experiment: str, row: Row) -> dict[str, Any]:
    """What follows from the columns, which do not have the plans: sizes, the fastest contender's
    share of the peak and FLOP/s of all GPUs, and what the paper measured."""
    spec = points_of(experiment)[f"{row['model']} {row['num_gpus']}"]
    shape, gpus = spec.model, spec.num_gpus
    fastest = max(float(row[name] or 0) for name in row if name in PRICED)
    cluster = preset("cluster", row["cluster"], Cluster)
    if (link := row.get("cluster.host.bandwidth_gb_s")) is not None:
        assert cluster.host is not None
        host = replace(cluster.host, bandwidth_gb_s=float(link)) if link else None
        cluster = replace(cluster, host=host)
    peak = cluster.device.peak_bf16_tflops
    same = {"layers": shape.layers, "hidden": shape.hidden, "num_gpus": gpus}
    same["global_batch"] = spec.global_batch
    runs = published_scaling()
    runs = runs[(runs[[*same]] == [*same.values()]).all(axis=1) & (row["cluster"] == "a100")]
    measured = dict(zip(runs["program"], runs["tflops"], strict=True))
    names = [name for name in row if name.endswith("_2021")]
    task = replace(spec.task, cluster=cluster)
    again = {name: scaled(task, name, row) for name in PRICED if row.get(f"{name}_setting")}
    return {value: text for found in again.values() for value, text in found.items()} | {
        "parameters_b": f"{parameter_count(shape) / 1e9:.6g}",
        **{name: getattr(shape, name) for name in ("heads", "hidden", "layers")},
        "global_batch": spec.global_batch,
        "mfu": f"{fastest / peak:.5g}",
        "pflops": f"{fastest * gpus / 1e3:.5g}",
        **{name: f"{measured[name]:.6g}" if name in measured else "" for name in names},
    }


def scaled(task: Task, name: str, row: Row) -> dict[str, str]:
    """A contender's speed and plan, from the setting that the row keeps; older rows keep none."""
    setting = json.loads(row[f"{name}_setting"])
    own = candidate_in(name, setting["knobs"], setting["microbatch_size"])
    room = memory_room(own[1].published_as)
    result = own[1].simulated(replace(task, memory_margin=room.share), own[2])
    flops = model_flops_per_token(task.shape) * result.tokens_per_s_per_gpu
    return {name: f"{flops / 1e12:.6g}", f"{name}_plan": describe(result.plan)}


def test_a_scaling_table_keeps_plans_that_are_priced_again(tmp_path: Path) -> None:
    spec = points_of("weak_scaling")["gpt_1_7b 32"]
    words = ["experiment=weak_scaling", "cluster=a100", "contender=fsdp"]
    config = compose("config", words)[0] | {"runs_dir": str(tmp_path / "runs")}
    config["report_dir"] = str(tmp_path / "report")
    assert run_points([plan_point(spec, simulated=True)], [config]) == 0
    rows = latest_ok(load_frame([tmp_path / "runs"])[0])
    (line,) = scaling_table(rows).numbers.astype(str).to_dict("records")
    row = {str(name): str(value) for name, value in line.items()}
    found = scaling("weak_scaling", row)
    assert found["fsdp_plan"] == row["fsdp_plan"]
    assert differences(row, {k: v for k, v in found.items() if k.startswith("fsdp")}) == {}
    assert float(row["fsdp_gap"]) == 0.0


AGAIN: dict[str, Callable[[Row], dict[str, Any]]] = {
    "validation/validation.csv": validation,
    "claim_33/plans.csv": plan,
    "atlas/plans.csv": plan,
    "memory/traced_vs_simulated.csv": traced.simulated,
    "schedules.csv": schedule,
    "scaling/weak_scaling.csv": partial(scaling, "weak_scaling"),
    "scaling/strong_scaling.csv": partial(scaling, "strong_scaling"),
    "scaling/host_link.csv": partial(scaling, "host_link"),
}


def differences(stored: Row, computed: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The columns in which a stored row differs from what was computed, as (stored, computed)."""
    texts = {name: "" if value is None else str(value) for name, value in computed.items()}
    return {
        name: (stored[name], text) for name, text in texts.items() if not same(stored[name], text)
    }


def same(stored: str, computed: str) -> bool:
    """Whether two texts are equal, or are fractions that agree to the last digit of the coarser
    one, with a little more for binary fractions."""
    try:
        a, b = Decimal(stored), Decimal(computed)
    except InvalidOperation:
        return stored == computed
    places = max(int(number.as_tuple().exponent) for number in (a, b))
    digit = Decimal(1).scaleb(places) if places < 0 else Decimal(0)
    return abs(a - b) <= digit * Decimal("1.01")


def differing(path: str, rows: Iterable[Row]) -> list[tuple[Row, dict[str, tuple[str, str]]]]:
    again = AGAIN[path]
    return [(row, found) for row in rows if (found := differences(row, again(row)))]


PARTS = 8


@pytest.mark.evidence
@pytest.mark.parametrize(("path", "part"), [*product(AGAIN, range(PARTS))])
def test_a_committed_table_is_what_the_code_computes(path: str, part: int) -> None:
    rows = read(path)
    ends = [len(rows) * end // PARTS for end in (part, part + 1)]
    assert differing(path, rows[slice(*ends)]) == []


# Every n-th row, of those that are cheap to compute.
FIXED = {
    "validation/validation.csv": 100,
    "claim_33/plans.csv": 120,
    "atlas/plans.csv": 40,
    "memory/traced_vs_simulated.csv": 20,
    "schedules.csv": 10,
    "scaling/weak_scaling.csv": 1,
    "scaling/strong_scaling.csv": 1,
    "scaling/host_link.csv": 1,
}


def is_cheap(row: Row) -> bool:
    return int(row.get("num_gpus") or 0) <= 256 and int(row.get("microbatches") or 0) <= 16


@pytest.mark.parametrize("path", AGAIN)
def test_rows_of_a_committed_table_are_what_the_code_computes(path: str) -> None:
    rows = [row for row in read(path) if path.startswith("scaling") or is_cheap(row)]
    assert differing(path, rows[:: FIXED[path]]) == []


# A row of each table that has all columns.
SHOWN = {
    "claim_33/plans.csv": 0,
    "atlas/plans.csv": 0,
    "validation/validation.csv": 0,
    "memory/traced_vs_simulated.csv": 1,
    "schedules.csv": 8,
    "scaling/weak_scaling.csv": 0,
    "scaling/strong_scaling.csv": 0,
    "scaling/host_link.csv": 0,
}


@pytest.mark.parametrize(("path", "number"), [*SHOWN.items()])
def test_an_altered_cell_is_found_in_every_table(path: str, number: int) -> None:
    row = read(path)[number]
    computed = AGAIN[path](row)
    assert len(computed) > 5
    for name in computed:
        assert [*differences(row | {name: altered(row[name])}, computed)] == [name]


def altered(cell: str) -> str:
    try:
        return f"{1.01 * float(cell) + 1:.6g}"
    except ValueError:
        return f"{cell} altered"


def sizes(largest: int) -> list[tuple[int, int, int, int]]:
    """P, V, U, m: every P up to a largest one, V from 1 to 4, U from P to 2P, one to four whole
    units and every remainder."""
    return [
        (ranks, chunks, unit, m)
        for ranks, chunks in product(range(2, largest + 1), range(1, 5))
        for unit in range(ranks, 2 * ranks + 1)
        for m in range(unit, 5 * unit)
    ]


def over_bound(ranks: int, chunks: int, unit: int, m: int) -> float:
    """The step time of one size, divided by the bound."""
    order = build("zeropp", num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=unit)
    bound = 1 + (ranks - 1) / (3 * m * chunks)
    return run(order, [StageCost()] * (ranks * chunks)).over_ideal / bound


def test_orders_are_within_the_committed_bound() -> None:
    every = sizes(BOUND["largest_ranks"])
    assert (len(every), BOUND["missed"]) == (BOUND["sizes"], 0)
    assert BOUND["largest_over_bound"] <= 1 + 1e-9
    assert max(over_bound(*size) for size in every[::600]) <= BOUND["largest_over_bound"] + 1e-9


@pytest.mark.evidence
@pytest.mark.parametrize("part", range(PARTS))
def test_all_orders_are_within_the_committed_bound(part: int) -> None:
    every = sizes(BOUND["largest_ranks"])[part::PARTS]
    assert max(over_bound(*size) for size in every) <= BOUND["largest_over_bound"] + 1e-9


def test_every_published_row_is_there() -> None:
    assert {row["place"] for row in read("validation/validation.csv")} == {*published()}


@pytest.mark.evidence
def test_every_best_plan_whose_code_runs_is_a_plan_of_a_trainer() -> None:
    found = traced.best_plans()
    rows = Counter(name for name, *_ in found)
    assert set(rows) == {
        *("zeropp", "fsdp", "torch_pp", "deepspeed_3d", "deepspeed_best", "megatron_core_local")
    }
    assert min(rows.values()) > 20
    for shared in found.values():
        plan = shared[0][1]
        assert CONTENDERS[plan.contender].trainer
        assert not (plan.contender == "deepspeed_zero3" and plan.compile)


def test_errors_follow_from_the_committed_predictions() -> None:
    rows = [r for r in read("validation/validation.csv") if r["predicted"] and r["fits"]]
    found = errors_of(
        [
            Prediction(published()[row["place"]].row, float(row["predicted"]))
            for row in rows
            if row["unit"] != "yes/no"
        ]
    )
    stored = pd.read_csv(REFERENCE / "validation/errors.csv")
    pd.testing.assert_frame_equal(found, stored, rtol=0, atol=1.1e-4)


def test_the_verdict_follows_from_the_committed_plans() -> None:
    folder = REFERENCE / "claim_33"
    verdicts, _ = judged(pd.read_csv(folder / "plans.csv"), pd.read_csv(folder / REPRICED))
    text = verdicts.to_csv(index=False, float_format="%.4g")
    assert text == (folder / "verdict.csv").read_text(encoding="utf-8")


def test_simulated_memory_is_that_of_the_traced_ranks() -> None:
    """DeepSpeed and Megatron-Core are traced with models of some MiB; a few tensors are a
    few percent."""
    limits = {"zeropp": 0.03, "torch_pp": 0.03, "fsdp": 0.03, "deepspeed_3d": 0.10}
    limits["megatron_core_local"] = 0.05
    rows = read("memory/traced_vs_simulated.csv")
    assert {row["contender"] for row in rows} == set(limits)
    off = [row for row in rows if abs(float(row["relative_error"])) > limits[row["contender"]]]
    assert off == []


@pytest.mark.parametrize(
    ("stored", "computed", "equal"),
    [
        ("1.3750", "1.37504", True),
        ("1.3750", "1.3752", False),
        ("1", "2.01", False),
        ("2", "3", False),
        ("OOM", "fits", False),
        ("", "0.0", False),
        ("1338.88", "1338.8811", True),
    ],
)
def test_rounding_is_no_difference(stored: str, computed: str, equal: bool) -> None:
    assert same(stored, computed) is equal
