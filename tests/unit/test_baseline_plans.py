"""Plans of the contenders beside ZeroPP: what their frameworks cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.unit.toy_spec import mapping
from zeropp.schedule.program import Op
from zeropp.types.layout import InfeasibleError


def request(num_gpus: int, global_batch: int, **contender: Any) -> RunSpec:
    values = mapping()
    values["model"]["layers"] = 16
    values["cluster"] = yaml.safe_load(Path("conf/cluster/cpu_gloo.yaml").read_text())
    values["precision"] = contender.pop("precision", "fp32")
    values |= {"num_gpus": num_gpus, "global_batch": global_batch, "contender": contender}
    return spec_from_mapping(values)


WAY_OUT = r"(use|try|change|it has|input should be)"
OWNERS = {"use_multi_rank_bucket_allreduce": False}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "deepspeed_3d": [
        ({"tp": 3, "replicate": 1, "pp": 1}, "contender.tp=3: must divide model.heads=4"),
        ({"chunks": 2}, "contender.chunks=2"),
        ({"shard": 2}, "contender.shard=2"),
        ({"schedule": "zbv"}, "contender.schedule='zbv': deepspeed_3d has no such knob"),
        ({"units": 4, "recomputes": 1}, "contender.units=4"),
        ({"recomputed": "full"}, "did you mean contender.recompute?"),
        ({"pp": 4, "replicate": 2}, "contender.replicate=2: the degrees"),
        ({"sequence_parallel": True}, "contender.sequence_parallel=True"),
        ({"pp": 2, "replicate_zero": 2}, "contender.replicate_zero=2: DeepSpeed's pipelines"),
        ({"grad_accum_dtype": "bf16"}, "contender.grad_accum_dtype=bf16: gradients of fp32"),
        ({"reduce_dtype": "bf16"}, "contender.reduce_dtype=bf16: gradients of fp32"),
        (
            {"grad_accum_dtype": "bf16", "precision": "bf16", "replicate_zero": 1},
            "contender.reduce_dtype=fp32: gradients that are added in bf16",
        ),
        ({"precision": "bf16", "replicate_zero": 0}, "contender.replicate_zero=0"),
        ({"pp": 1, **OWNERS}, "contender.use_multi_rank_bucket_allreduce=False"),
        ({"pp": 2, "precision": "bf16", **OWNERS}, "contender.use_multi_rank_bucket_allreduce"),
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
        ({"schedule": "1f1b", "pp": 4, "batch": 2}, "must be at least 4"),
        ({"schedule": "zeropp", "pp": 4, "chunks": 2}, "contender.shard=1: contender.schedule=zer"),
        ({"schedule": "zeropp", "chunks": 2, "compile": True}, "contender.compile=True"),
        ({"schedule": "interleaved_1f1b", "chunks": 2, "pp": 4, "batch": 9}, "into 2 equal rounds"),
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


@pytest.mark.parametrize(
    ("after_forward", "after_backward", "gathers"),
    [(True, True, 6), (True, False, 4), (False, True, 3), (False, False, 1)],
)
def test_parameters_that_stay_are_gathered_less_often(
    after_forward: bool, after_backward: bool, gathers: int
) -> None:
    released = {"reshard_after_forward": after_forward, "reshard_after_backward": after_backward}
    plan = request(4, 12, name="fsdp", shard=4, recompute="none", **released).plan()
    actions = [action for action in plan.schedule.programs[0] if action.stage == 1]
    assert sum(action.op is Op.UNSHARD for action in actions) == gathers
    assert [a.op for a in actions if not a.op.is_compute][-1] is Op.REDUCE_GRAD


def test_fsdp_gathers_each_layer_for_each_pass() -> None:
    plan = request(4, 8, name="fsdp", shard=4, recompute="none").plan()
    (program,) = plan.schedule.programs
    pieces, microbatches = 18, 2
    gathers = sum(action.op is Op.UNSHARD for action in program)
    # The head turns round from forward to backward, the embedding from one microbatch to the next.
    assert gathers == 2 * pieces * microbatches - microbatches - (microbatches - 1)
    reductions = sum(action.op is Op.REDUCE_GRAD for action in program)
    assert reductions == pieces * microbatches


TIED = [
    ({"name": "fsdp", "shard": 4}, [[]]),  # embedding and head are one parameter
    ({"name": "torch_pp", "pp": 4, "schedule": "1f1b"}, [[0], [], [], [3]]),
    ({"name": "torch_pp", "pp": 4, "schedule": "zbv", "chunks": 2}, [[0], [], [], []]),
    ({"name": "deepspeed", "pp": 2, "replicate": 2}, [[0], [1]]),
    ({"name": "zeropp", "pp": 1, "shard": 4, "chunks": 2}, [[0]]),
]


@pytest.mark.parametrize(("contender", "expected"), TIED, ids=str)
def test_tied_gradients_are_summed_once_per_rank_that_has_a_copy(
    contender: dict[str, Any], expected: list[list[int]]
) -> None:
    values = mapping()
    values["model"] |= {"layers": 16, "tied_embeddings": True}
    values["cluster"] = yaml.safe_load(Path("conf/cluster/cpu_gloo.yaml").read_text())
    values |= {"num_gpus": 4, "global_batch": 32, "contender": contender}
    programs = spec_from_mapping(values).plan().schedule.programs
    summed = [[a.stage for a in program if a.op is Op.REDUCE_TIED] for program in programs]
    assert summed == expected
