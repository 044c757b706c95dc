"""The peak of ranks whose head and loss run in slices of the tokens is the described one."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from benchmarks.specification.contenders import CONTENDERS
from tests.gloo.cases import ADAMW, CLUSTER, LLAMA, TIED, request
from tests.gloo.test_engine_memory import TRACED_SIZES, measured
from tests.gloo.world import World
from zeropp.emulate.trace import trace_ranks
from zeropp.price import price_plan
from zeropp.price.peak_memory import peak_memory
from zeropp.schedule.plan import Plan

# With this many words the head's tensors are the peak, also in four slices.
LARGE = {**TRACED_SIZES, "vocab": 16384, "seq": 1024}


def plan_of(slices: int, degrees: dict[str, Any], model: dict[str, Any], **more: Any) -> Plan:
    contender = {"name": "zeropp", "logits_slices": slices, **degrees}
    ranks = prod(degrees.get(axis, 1) for axis in ("pp", "shard", "context"))
    return request(ranks, contender, global_batch=4, model=LARGE | model, **more).plan()


@pytest.mark.parametrize(
    ("degrees", "model"),
    [
        ({"pp": 2, "shard": 2, "chunks": 2, "unit": 2, "recompute": "full"}, LLAMA | TIED),
        ({"pp": 1, "shard": 2, "chunks": 1, "unit": 2, "split_backward": False}, {}),
        ({"pp": 1, "shard": 1, "context": 2, "chunks": 6, "recompute": "full"}, LLAMA),
    ],
)
def test_a_trace_has_the_described_peak(degrees: dict[str, Any], model: dict[str, Any]) -> None:
    plan, whole = (plan_of(slices, degrees, model, precision="bf16") for slices in (4, 1))
    described, larger = (peak_memory(one, price_plan(one, CLUSTER))[-1] for one in (plan, whole))
    rank = plan.layout.pipeline(0)[-1]
    (found,) = trace_ranks(plan, [rank], optimizer=ADAMW, program=CONTENDERS["zeropp"])
    assert described.total == pytest.approx(found.memory.total, rel=0.01)
    assert described.total < 0.75 * larger.total


def test_a_real_rank_has_the_described_peak(world: World) -> None:
    """It updates by SGD, which keeps nothing."""
    degrees = {"pp": 1, "shard": 1, "context": 2, "chunks": 6, "recompute": "full"}
    plan = plan_of(8, degrees, LLAMA, precision="fp32")
    (described,) = peak_memory(plan, price_plan(plan, CLUSTER))
    for peak in world.run(measured, "zeropp", plan, size=2):
        assert peak == pytest.approx(described.total - described.optimizer, rel=0.01)
