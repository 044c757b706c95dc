"""Programs of the plans of DeepSpeed and torch: they are the frameworks' own, action for action.

No rank is started, because a schedule class of either framework works without a process group.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch.distributed.pipelining.schedules import OVERLAP_F_B

from baselines.deepspeed_3d.private_names import OPS
from baselines.torch_pp.trainer import CLASSES
from tests.gloo.cases import IN_DEEPSPEEDS_INSTRUCTIONS, request
from zeropp.schedule.program import Action, Op, for_torch

DEEP = {"layers": 16}


def deepspeed_program(
    stage: int, stages: int, microbatches: int, tied: tuple[int, ...]
) -> list[Action]:
    """DeepSpeed's own instructions of a stage as actions.

    It names buffers, not microbatches: the n-th instruction of a kind is that of microbatch n.
    Without tied weights ``ReduceTiedGrads`` does nothing.
    """
    schedule = TrainSchedule(micro_batches=microbatches, stages=stages, stage_id=stage)
    actions = []
    counts = dict.fromkeys(Op, 0)
    for instruction in (i for commands in schedule for i in commands if type(i) in OPS):
        op = OPS[type(instruction)]
        if op is Op.REDUCE_TIED and stage not in tied:
            continue
        microbatch = counts[op] if op.has_microbatch else None
        counts[op] += 1
        actions.append(Action(stage, op, microbatch))
        if microbatch is not None:
            assert instruction.buffer_id == microbatch % schedule.num_pipe_buffers()
    return actions


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 16])
def test_deepspeed_plan_is_its_train_schedule(stages: int, microbatches: int) -> None:
    """Its ``ReduceGrads`` goes over all data-parallel ranks, which are replicas, and with ZeRO-1
    its ``OptimizerStep`` gathers."""
    contender = {"name": "deepspeed_3d", "pp": stages, "replicate": 2, "replicate_zero": 1}
    tied = DEEP | {"tied_embeddings": True}
    plan = request(2 * stages, contender, global_batch=2 * microbatches, model=tied).plan()
    ends = (0, stages - 1)
    for stage in range(stages):
        program = list(plan.schedule.programs[stage])
        ours = [action for action in program if action.op not in IN_DEEPSPEEDS_INSTRUCTIONS]
        assert ours == deepspeed_program(stage, stages, microbatches, ends)
        reduced = program.index(Action(stage, Op.REDUCE_GRAD))
        end = [Op.REDUCE_GRAD, Op.REDUCE_REPLICAS, Op.UPDATE, Op.GATHER_UPDATED]
        assert [action.op for action in program[reduced:]] == end


def torch_programs(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    """Programs of torch's own schedule class in its text form."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            submod=None,
            stage_index=chunk * ranks,
            has_backward=True,
        )
        for chunk in range(chunks)
    ]
    schedule = CLASSES[name](stages, n_microbatches=microbatches, loss_fn=lambda output, target: 0)
    programs = []
    for rank in range(ranks):
        actions = []
        for action in schedule.pipeline_order_with_comms[rank]:
            overlaps = action.computation_type is OVERLAP_F_B
            parts = (action.sub_actions or ()) if overlaps else (action,)
            actions += [str(part) for part in parts]
        programs.append(actions)
    return programs


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches"),
    [
        ("1f1b", 1, 1, 3),
        ("1f1b", 4, 1, 8),
        ("interleaved_1f1b", 2, 3, 4),
        ("interleaved_1f1b", 4, 4, 8),
        ("interleaved_1f1b", 4, 2, 6),
        ("interleaved_1f1b", 4, 2, 3),
        ("looped_bfs", 2, 2, 3),
        ("looped_bfs", 4, 4, 6),
        ("interleaved_zb", 2, 2, 4),
        ("interleaved_zb", 3, 5, 9),
        ("interleaved_zb", 4, 2, 6),
        ("interleaved_zb", 4, 3, 2),
        ("zbv", 2, 2, 4),
        ("zbv", 4, 2, 11),
        ("dualpipev", 2, 2, 4),
        ("dualpipev", 4, 2, 9),
        ("dualpipev", 8, 2, 16),
    ],
)
def test_torch_plan_is_that_of_torch(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    contender = {"name": "torch_pp", "pp": ranks, "shard": 2, "schedule": name, "chunks": chunks}
    plan = request(2 * ranks, contender, global_batch=2 * microbatches, model=DEEP).plan()
    expected = torch_programs(name, ranks, chunks, microbatches)
    # Messages of 1F1B's own class go both ways at once, and those of an overlapped forward and
    # backward come after both.
    with_messages = name not in ("1f1b", "dualpipev")
    for program, theirs in zip(plan.schedule.programs, expected, strict=True):
        actions = [a for a in for_torch(program) if with_messages or not a.op.is_transfer]
        theirs = [t for t in theirs if with_messages or not re.search("SEND|RECV", t)]
        assert list(map(str, actions)) == theirs
