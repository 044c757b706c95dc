"""Plans of the contenders beside ZeroPP: their programs are their frameworks' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.specification.run_spec import RunSpec, SpecError, spec_from_mapping
from tests.unit.toy_spec import mapping
from zeropp.layout import InfeasibleError
from zeropp.schedule.action import Action, Op


def request(num_gpus: int, global_batch: int, **contender: Any) -> RunSpec:
    values = mapping()
    values["model"]["layers"] = 16
    values["cluster"] = yaml.safe_load(Path("conf/cluster/cpu_gloo.yaml").read_text())
    values |= {"num_gpus": num_gpus, "global_batch": global_batch, "contender": contender}
    return spec_from_mapping(values)


def deepspeed_program(stage: int, stages: int, microbatches: int) -> list[Action]:
    """DeepSpeed's own instructions of a stage as actions.

    It names buffers, not microbatches: the n-th instruction of a kind is that of microbatch n.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    from baselines.deepspeed_3d.private_names import OPS

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
    plan = asked.plan()
    for stage in range(stages):
        assert list(plan.schedule.programs[stage]) == deepspeed_program(stage, stages, microbatches)


def torch_programs(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    """Programs of torch's own schedule class in its text form, without transfers."""
    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    from baselines.torch_pp.trainer import CLASSES

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
        programs.append([text for text in actions if "SEND" not in text and "RECV" not in text])
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
    plan = request(2 * ranks, 2 * microbatches, **contender).plan()
    expected = torch_programs(name, ranks, chunks, microbatches)
    for program, theirs in zip(plan.schedule.programs, expected, strict=True):
        assert [str(action) for action in program if not action.op.is_transfer] == theirs


WAY_OUT = r"(use|try|change|it has|input should be)"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "deepspeed_3d": [
        ({"tp": 3, "replicate": 1, "pp": 1}, "contender.tp=3: must divide model.heads=4"),
        ({"chunks": 2}, "contender.chunks=2"),
        ({"shard": 2}, "contender.shard=2"),
        ({"schedule": "zbv"}, "contender.schedule='zbv': deepspeed_3d has no such knob"),
        ({"units": 4, "recomputes": 1}, "contender.units=4"),
        ({"recomputed": "full"}, "did you mean contender.recompute?"),
        ({"compile": True}, "contender.compile=True"),
        ({"pp": 4, "replicate": 2}, "contender.replicate=2: the degrees"),
    ],
    "fsdp": [
        ({"pp": 2}, "contender.pp=2"),
        ({"tp": 2}, "contender.tp=2"),
        ({"replicate_zero": 1}, "contender.replicate_zero=1"),
        ({"prefetch": 2}, "contender.prefetch=2"),
    ],
    "torch_pp": [
        ({"schedule": "gpipe"}, "contender.schedule='gpipe': input should be '1f1b'"),
        ({"schedule": "1f1b", "chunks": 2}, "contender.chunks=2"),
        ({"schedule": "zbv", "chunks": 3}, "contender.chunks=3"),
        ({"schedule": "zbv", "chunks": 2, "recompute": "full"}, "contender.recompute=full"),
        ({"schedule": "zbv", "chunks": 2, "compile": True}, "contender.compile=True"),
        ({"schedule": "1f1b", "pp": 4, "batch": 2}, "at least 4 microbatches"),
        ({"schedule": "interleaved_1f1b", "chunks": 2, "pp": 4, "batch": 9}, "a multiple of 2"),
    ],
}


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [(name, knobs, words) for name, cases in REFUSED.items() for knobs, words in cases],
)
def test_what_a_framework_lacks_is_refused_in_one_line(
    name: str, knobs: dict[str, Any], words: str
) -> None:
    batch = knobs.pop("batch", 8)
    world = 3 if knobs.get("tp") == 3 else 4
    with pytest.raises((InfeasibleError, SpecError), match=WAY_OUT) as caught:
        request(world, batch, name=name, **knobs).plan()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fsdp_gathers_each_layer_for_each_pass() -> None:
    plan = request(4, 8, name="fsdp", shard=4, recompute="none").plan()
    (program,) = plan.schedule.programs
    pieces, microbatches = 18, 2
    gathers = sum(action.op is Op.UNSHARD for action in program)
    # The head turns round from forward to backward, the embedding from one microbatch to the next.
    assert gathers == 2 * pieces * microbatches - microbatches - (microbatches - 1)
    reductions = sum(action.op is Op.REDUCE_GRAD for action in program)
    assert reductions == pieces * microbatches
