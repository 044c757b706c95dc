"""Ranks of a larger job, each traced alone with fake tensors, and the cost model held to them."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from baselines.zeropp.contender import ZEROPP
from benchmarks.launch.replay import replayed_plan
from benchmarks.specification.contenders import CONTENDERS
from tests.gloo.cases import ADAMW, CLUSTER, LLAMA, TIED, Case, request
from zeropp.emulate.trace import Trace, trace_ranks
from zeropp.engine.parameters.flat_layout import ALIGNMENT
from zeropp.price import price_plan
from zeropp.price.flops import piece_parameters
from zeropp.price.peak_memory import peak_memory


def test_resident_kinds_are_exact_and_activations_follow_the_cap() -> None:
    case = Case(pp=4, shard=8, layers=8, unit=4, batch=32, precision="bf16")
    plan = case.plan()
    stages = plan.schedule.stages_of(2)  # rank 16 is the first of eight shards
    pieces = [piece for stage in stages for piece in plan.pieces_of(stage)]
    shard_bytes = 4 * sum(piece_parameters(case.shape, piece) for piece in pieces) // 8
    (trace,) = trace_ranks(plan, [16], optimizer=ADAMW, program=ZEROPP)
    memory = trace.memory
    padding = len(stages) * 4 * ALIGNMENT  # per chunk
    # Between steps each of a block's 12 parameters is a NaN of its own, in bf16.
    hidden = len(stages) * 12 * 2
    assert shard_bytes + hidden <= memory.parameters <= shard_bytes + hidden + padding
    assert 2 * shard_bytes <= memory.optimizer < 2 * shard_bytes + 1024  # and the step counts
    assert memory.gradients >= shard_bytes
    (tight,) = trace_ranks(
        Case(**{**vars(case), "cap": 5}).plan(), [16], optimizer=ADAMW, program=ZEROPP
    )
    assert tight.memory.activations < memory.activations


SIX = {"layers": 6}  # in fewer, what is kept beside the layers is too much of all
SIZES = {"hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "seq": 256, "vocab": 2048}


@pytest.mark.parametrize(
    ("batch", "contender", "model"),
    [
        (
            32,
            {"name": "zeropp", "pp": 2, "shard": 8, "chunks": 2, "recompute": "full"},
            SIX | LLAMA,
        ),
        (
            32,
            {"name": "zeropp", "pp": 2, "shard": 2, "replicate": 4, "replicate_zero": 1},
            LLAMA | TIED,
        ),
        (32, {"name": "fsdp", "shard": 16}, TIED),
        (16, {"name": "torch_pp", "pp": 2, "shard": 4, "schedule": "1f1b"}, LLAMA),
        (8, {"name": "deepspeed_3d", "pp": 2, "tp": 2, "replicate": 2, "replicate_zero": 1}, {}),
        (
            8,
            {
                "name": "megatron_core_local",
                "pp": 2,
                "tp": 2,
                "replicate": 2,
                "replicate_zero": 1,
                "sequence_parallel": True,
            },
            LLAMA,
        ),
        (
            8,
            {
                "name": "megatron_core_local",
                "pp": 2,
                "replicate": 4,
                "replicate_zero": 1,
                "chunks": 2,
                "schedule": "interleaved_1f1b",
            },
            {},
        ),
    ],
)
def test_the_cost_model_is_within_five_percent_of_the_trace(
    batch: int, contender: dict[str, Any], model: dict[str, Any]
) -> None:
    name = contender["name"]
    num_gpus = prod(contender.get(degree, 1) for degree in ("pp", "tp", "shard", "replicate"))
    sizes = {**SIZES, **model}
    asked = request(num_gpus, contender, global_batch=batch, model=sizes, precision="bf16")
    plan = asked.plan()
    simulated = peak_memory(plan, price_plan(plan, CLUSTER))
    ends = sorted({0, plan.layout.pp - 1})
    ranks = [plan.layout.pipeline(0)[index] for index in ends]
    traces = [*trace_ranks(plan, ranks, optimizer=ADAMW, program=CONTENDERS[name], steps=2)]
    for index, trace in zip(ends, traces, strict=True):
        assert simulated[index].total == pytest.approx(trace.memory.total, rel=0.05), index
        if name in ("zeropp", "fsdp"):
            for kind in ("parameters", "unsharded", "gradients", "optimizer"):
                expected = getattr(simulated[index], kind)
                assert getattr(trace.memory, kind) == pytest.approx(expected, rel=0.01), kind
        assert_updates(trace)
        if name.startswith("megatron") and plan.layout.chunks > 1:
            assert gathers_before_a_message(trace) == plan.layout.chunks
    replayed = replayed_plan(plan, CLUSTER, traces)
    assert 0 < max(replayed.busy_s.values()) < replayed.step_s


def assert_updates(trace: Trace) -> None:
    """The second step was whole: its optimizer ran, and what it updated was gathered."""
    places = [index for index, issued in enumerate(trace.log) if issued.kind == "place"]
    step = trace.log[places[1] : places[2]]
    assert any(issued.kernel and "fused_adamw" in issued.kernel.name for issued in step)
    assert any("allgather" in issued.what for issued in step)


def gathers_before_a_message(trace: Trace) -> int:
    """The gathers of the second step before its first message, and so before a second chunk's
    forward."""
    places = [index for index, issued in enumerate(trace.log) if issued.kind == "place"]
    issued = [one.what for one in trace.log[places[1] : places[2]] if one.kind == "communication"]
    message = next(i for i, what in enumerate(issued) if what.startswith(("isend", "irecv")))
    return sum("allgather" in what for what in issued[:message])
