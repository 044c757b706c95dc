"""Ranks of a 64-rank job, each alone with real tensors, through the launcher to the simulator."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

from benchmarks.launch import local, simulate, trace
from benchmarks.launch.options import LocalOptions, SimulateOptions, TraceOptions
from benchmarks.launch.points import plan_point
from benchmarks.launch.running import SweepProgress
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.toy_spec import SWEEP, changed, spec_of
from zeropp.emulate.world import fake_world
from zeropp.engine import collectives

# Only one of them compiles its blocks, which takes as long as all the rest.
CONTENDERS: dict[str, dict[str, Any]] = {
    "zeropp": {"pp": 4, "shard": 8, "chunks": 2, "compile": False},
    "torch_pp": {
        "pp": 4,
        "tp": 2,
        "shard": 8,
        "schedule": "interleaved_1f1b",
        "chunks": 2,
        "compile": False,
    },
    "deepspeed_3d": {"pp": 2, "tp": 2, "replicate_zero": 1, "compile": False},
    "fsdp": {"shard": 8, "compile": True},
    "megatron_core": {
        "pp": 4,
        "tp": 2,
        "chunks": 2,
        "schedule": "interleaved_1f1b",
        "sequence_parallel": True,
        "replicate_zero": 1,
    },
}
OPTIONS = TraceOptions(tensors="real", pipeline_ranks=(0, -1))


@pytest.mark.parametrize("name", CONTENDERS)
def test_lone_ranks_compute_what_the_simulator_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank alone would take every core, and threads that wait for each other in each small product
    # take many times as long where other tests run.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    values = changed("cluster.device.peak_fp32_tflops", 0.1)
    values["model"] |= {"layers": 8, "hidden": 128, "ffn": 512}
    values |= {"contender": {"name": name, **CONTENDERS[name]}, "num_gpus": 64}
    values["global_batch"] = 64 // CONTENDERS[name].get("tp", 1)  # few microbatches
    values["measure"] = {"warmup_steps": 1, "steps": 1, "timeout_s": 240}
    point = plan_point(spec_from_mapping(values))
    assert point.plan is not None
    trace.check([point], OPTIONS, SWEEP)
    with SweepProgress(1) as progress:
        (record,) = trace.launch([point], OPTIONS, tmp_path, progress)
    assert (record.status, record.reason) == ("ok", "")
    assert (record.step_s, record.losses) == ([], [])
    schedule = point.plan.schedule
    stages = {stage for rank in record.ranks for stage in schedule.stages_of(rank.pp_rank)}
    compute = record.predicted["compute_s"]
    assert {int(action[:-1]) for action in compute} == stages
    assert all(seconds > 0 for seconds in compute.values())
    assert len(record.ranks) == min(2, schedule.num_ranks)
    for rank in record.ranks:
        gathers = name not in ("deepspeed_3d", "megatron_core")
        assert not gathers or rank.counters["unshard"] > 0
        assert rank.peak_rss_bytes
        path = tmp_path / record.record_id / f"rank_{rank.rank:03d}.trace.json.gz"
        with gzip.open(path, "rt") as file:
            names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
        assert name == "fsdp" or any(re.fullmatch(r"(PP:)?\d+F\d+", action) for action in names)
    priced = SimulateOptions(compute="traced", traced_runs=str(tmp_path))
    simulate.check([point], priced, SWEEP)
    with SweepProgress(1) as progress:
        (simulated,) = simulate.launch([point], priced, tmp_path, progress)
    on_the_way = [seconds for action, seconds in compute.items() if not action.endswith("W")]
    assert simulated.step_s[0] > sum(on_the_way)  # of one microbatch, there and back


def test_a_lone_rank_reads_nothing_that_was_never_written() -> None:
    """What torch's fake group of 2.11 leaves as it was allocated."""
    sent = torch.arange(8.0)
    with fake_world(rank=1, size=4):
        part = torch.full((2,), torch.nan)
        collectives.reduce_scatter_single(part, sent)
        assert part.tolist() == [2.0, 3.0]
        collectives.reduce_scatter_single(output=part.fill_(torch.nan), input=sent, group=None)
        assert part.tolist() == [2.0, 3.0]
        world = dist.group.WORLD
        assert world is not None
        functional = functional_collectives.reduce_scatter_tensor(sent, "sum", 0, world)
        assert functional.tolist() == [2.0, 3.0]
        taken = torch.full((10,), torch.nan)
        dist.all_to_all_single(taken, sent, [4, 2, 2, 2], [2, 2, 2, 2])
        assert bool(taken.isfinite().all())


def test_a_gpu_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = plan_point(spec_from_mapping(changed("cluster.device.name", "A100")))
    monkeypatch.setattr(trace, "is_here", lambda device: False)
    with pytest.raises(SpecError, match=r"launcher\.tensors=real needs that GPU"):
        trace.check([point], OPTIONS, SWEEP)


def test_more_ranks_than_gpus_are_refused_unless_they_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = plan_point(spec_of())
    monkeypatch.setattr(local, "_gpus", lambda: [Path("/dev/nvidia0")])
    with pytest.raises(SpecError, match=r"^num_gpus=4: this machine has 1 \(launcher.share_gpu="):
        local.check([point], LocalOptions(), SWEEP)
    local.check([point], LocalOptions(share_gpu=True), SWEEP)
