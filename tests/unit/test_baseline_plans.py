"""Plans of the contenders beside ZeroPP: their programs are their frameworks' own."""

from __future__ import annotations

from typing import Any

import pytest

from baselines.deepspeed_3d.plan import plan as plan_deepspeed
from benchmarks.spec import spec_from_mapping
from tests.unit.test_spec import mapping
from zeropp.layout import InfeasibleError
from zeropp.plan import PlanRequest
from zeropp.schedule.action import Action, Op


def request(num_gpus: int, global_batch: int, **contender: Any) -> PlanRequest:
    values = mapping()
    values["model"]["layers"] = 16
    values |= {"num_gpus": num_gpus, "global_batch": global_batch, "contender": contender}
    return spec_from_mapping(values).request


def deepspeed_program(stage: int, stages: int, microbatches: int) -> list[Action]:
    """DeepSpeed's own instructions of a stage as actions.

    It names buffers, not microbatches: the n-th instruction of a kind is that of microbatch n.
    """
    from baselines.deepspeed_3d.trainer import OPS
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    schedule = TrainSchedule(micro_batches=microbatches, stages=stages, stage_id=stage)
    actions = []
    counts = dict.fromkeys(Op, 0)
    for instruction in (i for commands in schedule for i in commands if type(i) in OPS):
        op = OPS[type(instruction)]
        microbatch = counts[op] if op.has_microbatch else None
        counts[op] += 1
        actions.append(Action(stage, op, microbatch))
        if microbatch is not None:
            assert instruction.buffer_id == microbatch % schedule.num_pipe_buffers()
    return actions


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 16])
def test_deepspeed_plan_is_its_train_schedule(stages: int, microbatches: int) -> None:
    asked = request(stages, microbatches, name="deepspeed_3d", pp=stages)
    plan = plan_deepspeed(asked)
    for stage in range(stages):
        assert list(plan.schedule.programs[stage]) == deepspeed_program(stage, stages, microbatches)
