"""Every plan has its predicted memory, whatever the device; the report shows it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.launch.attempt import freeze, new_header
from benchmarks.launch.points import plan_point
from benchmarks.report.charts import memory_breakdown
from benchmarks.report.frame import load_frame
from benchmarks.report.tables import memory_table
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.reading import preset
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.synthetic_records import make_record, spec_values, write_records
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import simulate

SETTINGS: dict[str, dict[str, Any]] = {
    "zeropp": {"pp": 2, "shard": 2, "chunks": 2},
    "deepspeed_3d": {"pp": 2, "tp": 2},
    "torch_pp": {"pp": 2, "shard": 2, "chunks": 2, "schedule": "interleaved_1f1b"},
    "fsdp": {"shard": 4},
    "megatron_core": {"pp": 2, "tp": 2},
    "megatron_core_local": {"pp": 2, "tp": 2},
}


@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_record_holds_what_the_simulator_says(contender: str, tmp_path: Path) -> None:
    values = spec_values() | {"contender": {"name": contender, **SETTINGS.get(contender, {})}}
    values["cluster"] = asdict(preset("cluster", "cpu_gloo", Cluster))
    spec = spec_from_mapping(values)
    assert spec.cluster.device.peak_fp32_tflops is None
    point = plan_point(spec)
    assert point.plan is not None
    freeze(spec, new_header("local", point.plan), tmp_path)
    kept = json.loads((tmp_path / "attempt.json").read_text())["plan"]["predicted_memory"]
    assert kept == [asdict(memory) for memory in simulate(point.plan, spec.cluster).memory]
    assert len(kept) == point.plan.layout.pp
    assert all(rank["parameters"] > 0 and rank["activations"] > 0 for rank in kept)


def test_it_stands_beside_the_measured_peak(tmp_path: Path) -> None:
    planned = {"predicted_memory": [{"parameters": 2**29}, {"parameters": 2**30}]}
    write_records([make_record(fields={"plan": planned})], tmp_path)
    frame, _ = load_frame([tmp_path])
    table = memory_table(frame)
    assert list(table.data["predicted_gib"]) == [1.0]  # of the fuller rank
    assert list(table.data["memory_kind"]) == ["resident"]
    (picture,) = memory_breakdown(frame)
    assert picture.caption.startswith("Predicted memory of the fullest rank by kind")
    assert "The diamond is the measured peak (resident)" in picture.caption
    texts = [text.get_text() for text in picture.figure.axes[0].texts]
    assert f"measured {frame['peak_gib'].iloc[0]:.3f}\npredicted 1.00" in texts
