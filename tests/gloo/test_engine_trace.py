"""One rank of a larger job, traced alone with fake tensors."""

from __future__ import annotations

from tests.gloo.engine_cases import ADAMW, Case
from zeropp.cost.flops import piece_parameters
from zeropp.engine.trace import trace_rank


def test_resident_kinds_are_exact_and_activations_follow_the_cap() -> None:
    case = Case(pp=4, shard=8, layers=8, unit=4, batch=64, precision="bf16")
    plan = case.plan()
    stages = plan.schedule.stages_of(2)  # rank 16 is the first of eight shards
    pieces = [piece for stage in stages for piece in plan.pieces_of(stage)]
    shard_bytes = 4 * sum(piece_parameters(case.shape, piece) for piece in pieces) // 8
    memory = trace_rank(plan, 16, ADAMW).memory
    assert memory.parameters == shard_bytes  # every size divides by eight
    assert 2 * shard_bytes <= memory.optimizer < 2 * shard_bytes + 1024  # and the step counts
    assert memory.gradients >= shard_bytes
    tight = trace_rank(Case(**{**vars(case), "cap": 5}).plan(), 16, ADAMW).memory
    assert tight.activations < memory.activations
