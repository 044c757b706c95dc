"""The verdict's best plans can be replayed: each is a plan of a contender whose code runs here."""

from __future__ import annotations

from collections import Counter

from benchmarks.evidence.traced import best_plans
from benchmarks.specification.contenders import CONTENDERS


def test_every_best_plan_whose_code_runs_is_a_plan_of_a_trainer() -> None:
    found = best_plans()
    rows = Counter(name for name, *_ in found)
    assert set(rows) == {
        *("zeropp", "fsdp", "torch_pp", "deepspeed_3d", "deepspeed_best", "megatron_core_local")
    }
    assert min(rows.values()) > 20
    for shared in found.values():
        plan = shared[0][1]
        assert CONTENDERS[plan.contender].trainer
        assert not (plan.contender == "deepspeed_zero3" and plan.compile)
