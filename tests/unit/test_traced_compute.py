"""Compute times of lone ranks in the simulator, through records and the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch import simulate as launcher
from benchmarks.launch.attempt import Ending, finish_attempt, new_header, started, write_unstarted
from benchmarks.launch.options import SimulateOptions
from benchmarks.launch.points import Point, plan_point, still_to_run
from benchmarks.launch.running import SweepProgress
from benchmarks.launch.trace import traced_stages
from benchmarks.records.events import EventWriter
from benchmarks.records.record import RunRecord
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.tables import lone_table
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.toy_spec import SWEEP, changed
from zeropp.price import price_plan
from zeropp.types.timeline import Provenance

OPTIONS = SimulateOptions(compute="traced")
KERNELS = {"step_s": 2.0, "compute_s": 1.2, "kernels_s": 1.0, "host_bound_s": 0.1}
KERNELS |= {"gather_s": 0.4, "gather_beside_compute_s": 0.3}
OF_BLOCK = {"F": 1.0, "I": 2.0, "W": 0.5}


def point_of(contender: Mapping[str, Any]) -> Point:
    values = changed("cluster.device.peak_fp32_tflops", 0.1) | {"contender": dict(contender)}
    values["model"]["layers"] = 8
    return plan_point(spec_from_mapping(values))


def write_trace(point: Point, runs_dir: Path, compute_s: Mapping[str, float]) -> RunRecord:
    """What launcher=trace with real tensors leaves of one rank."""
    header = new_header("trace", point.plan, "real tensors")
    with started(point.spec, header, runs_dir) as directory:
        events = EventWriter(directory, 0)
        events.write("environment", host="here")
        events.write("lone_step", index=0, seconds=0.5)
        events.write("memory", peak_allocated_bytes=2**30, peak_reserved_bytes=2**31)
        events.write("counters", unshard=1)
        events.write("compute", seconds=dict(compute_s))
        events.write("kernels", **KERNELS)
        events.write("done")
        return finish_attempt(directory, num_ranks=1)


ZEROPP = point_of({"name": "zeropp", "pp": 4, "chunks": 2, "unit": 2})
COMPUTE = {f"{stage}{op}": (1 + stage) * s for stage in (0, 4, 7) for op, s in OF_BLOCK.items()}


def test_a_lone_ranks_record_has_no_step_time(tmp_path: Path) -> None:
    record = write_trace(ZEROPP, tmp_path, COMPUTE)
    assert (record.status, record.variant) == ("ok", "real tensors")
    assert record.step_s == record.losses == []
    assert record.ranks[0].peak_allocated_bytes == 2**30
    assert record.predicted["compute_s"] == COMPUTE
    assert record.predicted["lone_step_s"] == [[0.5]]


def test_a_lone_rank_has_a_line_in_the_report(tmp_path: Path) -> None:
    write_trace(ZEROPP, tmp_path, COMPUTE)
    frame, _ = load_frame([tmp_path])
    assert list(frame["evidence"]) == ["traced with real tensors"]
    (line,) = lone_table(latest_ok(frame)).data.to_dict("records")
    assert line["compute_over_kernels"] == pytest.approx(1.2)
    assert line["host_bound"] == pytest.approx(0.05)
    assert line["gathers_beside_compute"] == pytest.approx(0.75)
    assert (line["allocated_gib"], line["reserved_gib"]) == (1.0, 2.0)


def test_stages_take_the_times_of_their_likes() -> None:
    assert ZEROPP.plan is not None
    price = price_plan(ZEROPP.plan, ZEROPP.spec.cluster)
    stages = traced_stages(ZEROPP.plan, price, COMPUTE)
    assert [stage.forward for stage in stages] == [1.0, *[5.0] * 6, 8.0]  # middle ones as stage 4
    assert stages[3].backward_weight == 2.5
    assert [s.transfer for s in stages] == [s.transfer for s in price.stages]


def test_full_backwards_are_split_and_tensor_parallelism_is_added() -> None:
    point = point_of({"name": "torch_pp", "pp": 2, "tp": 2, "schedule": "1f1b"})
    assert point.plan is not None
    price = price_plan(point.plan, point.spec.cluster)
    stages = traced_stages(point.plan, price, {"0F": 1.0, "0B": 3.0, "1F": 1.0, "1B": 4.0})
    for traced, cost, extras in zip(stages, price.stages, price.extras, strict=True):
        assert extras.tensor_forward > 0
        assert traced.forward == 1.0 + extras.tensor_forward
        ratio = cost.backward_input / cost.backward_weight
        assert traced.backward_input / traced.backward_weight == pytest.approx(ratio)
    whole = stages[1].backward_input + stages[1].backward_weight
    assert whole == pytest.approx(4.0 + price.extras[1].tensor_backward)


def test_the_launcher_prices_with_traced_compute(tmp_path: Path) -> None:
    options = replace(OPTIONS, traced_runs=str(tmp_path))
    with pytest.raises(SpecError, match=r"launcher\.tensors=real"):
        launcher.check([ZEROPP], options, SWEEP)
    source = write_trace(ZEROPP, tmp_path, COMPUTE)
    launcher.check([ZEROPP], options, SWEEP)
    with SweepProgress(2) as progress:
        (plain,) = launcher.launch([ZEROPP], SimulateOptions(), tmp_path, progress)
        (record,) = launcher.launch([ZEROPP], options, tmp_path, progress)
    assert record.predicted["compute_from"] == source.record_id
    assert record.predicted["memory"] == plain.predicted["memory"]
    assert record.step_s[0] > max(COMPUTE.values()) > plain.step_s[0]

    def to_run(provenance: Provenance, variant: str) -> list[Point]:
        return still_to_run(
            [ZEROPP], tmp_path, provenance=provenance, variant=variant, rerun="missing"
        )[0]

    assert to_run("simulated", "traced compute") == []
    assert to_run("traced", "real tensors") == []
    assert to_run("traced", "") == [ZEROPP]


def test_an_infeasible_point_of_a_sweep_stops_nothing(tmp_path: Path) -> None:
    infeasible = Point(ZEROPP.spec, None, "no plan")
    launcher.check([infeasible], replace(OPTIONS, traced_runs=str(tmp_path)), SWEEP)
    variant = OPTIONS.variant
    header = new_header("simulate", variant=variant)
    write_unstarted(infeasible.spec, tmp_path, header, Ending("infeasible", "no plan"))
    todo, (failure,) = still_to_run(
        [infeasible], tmp_path, provenance="simulated", variant=variant, rerun="missing"
    )
    assert (todo, failure.reason) == ([], "no plan")


def test_a_trace_of_another_plan_is_not_taken(tmp_path: Path) -> None:
    record = write_trace(ZEROPP, tmp_path, COMPUTE)
    path = tmp_path / record.record_id / "record.json"
    path.write_text(path.read_text().replace('"unit": 2', '"unit": 1'))
    with pytest.raises(SpecError, match="planned as it is today"):
        launcher.check([ZEROPP], replace(OPTIONS, traced_runs=str(tmp_path)), SWEEP)


def test_a_stage_without_a_like_is_named(tmp_path: Path) -> None:
    write_trace(ZEROPP, tmp_path, {"0F": 1.0, "7F": 1.0})
    with pytest.raises(SpecError, match=r"like stage 1 .*pipeline_ranks=\[0,1,-1\]"):
        launcher.check([ZEROPP], replace(OPTIONS, traced_runs=str(tmp_path)), SWEEP)
