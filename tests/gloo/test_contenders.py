"""DeepSpeed 3D, FSDP2 alone, torch's pipelines over FSDP2 and Megatron-Core on real processes: the
numbers of one process, and their programs as planned, which are the frameworks' own, action for
action; and the gate of Megatron-Core where test_gate.py has none like it."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining.schedules import OVERLAP_F_B
from torch.profiler import ProfilerActivity, profile

from baselines.blocks import prepare_block
from baselines.deepspeed_3d.pipeline import build
from baselines.deepspeed_3d.private_names import OPS
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from baselines.megatron_core.parameters import contents_of
from baselines.model import build_model, build_piece, cross_entropy
from baselines.torch_pp.trainer import CLASSES
from benchmarks.launch.local import launch
from benchmarks.launch.options import LocalOptions
from benchmarks.launch.points import plan_point
from benchmarks.launch.running import SweepProgress
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import open_batches
from benchmarks.worker.gate import run_gate
from tests.gloo.cases import (
    CPU,
    IN_DEEPSPEEDS_INSTRUCTIONS,
    LLAMA,
    SEED,
    STEPS,
    TEXT,
    TIED,
    check,
    local_batch,
    request,
)
from tests.gloo.world import World
from zeropp.engine.layers.chunk import run_recomputed
from zeropp.engine.layers.deferred import (
    WeightGradStore,
    backward_of_chunk,
    defer_weight_grads,
    save_early,
)
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Action, Op, for_torch
from zeropp.types.literals import Recompute
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

CLIPPED = OptimizerConfig(clip_norm=0.1)
FEW = 4  # microbatches, because DTensors of tensor parallelism take long for each
Options = dict[str, Any]


def plan_of(name: str, options: Options, ranks: int = 4, **more: Any) -> Plan:
    return request(ranks, {"name": name, **options}, **more).plan()


KEPT = {"reshard_after_forward": False}
# The numbers of one process, and the actions of the program.
EXACT: list[tuple[str, Options, Options]] = [
    ("deepspeed_3d", {"pp": 2, "tp": 2}, TIED),
    ("deepspeed", {"pp": 2, "replicate_zero": 1}, LLAMA),
    (
        "deepspeed",
        {"pp": 2, "tp": 1, "placement": "pp_inner", "recompute": "full", "recompute_blocks": 1},
        {},
    ),
    ("deepspeed", {"pp": 1, "tp": 2, "replicate_zero": 1}, LLAMA | TIED),
    ("deepspeed", {"pp": 1, "tp": 2, "replicate_zero": 2, "recompute": "full"}, TIED),
    ("deepspeed", {"pp": 1, "tp": 1, "replicate_zero": 0}, {}),
    # All is gathered once per step.
    ("deepspeed_zero3", {"param_persistence_threshold": 10**6}, TIED),
    # Every tensor is gathered alone for every pass, and reduced alone.
    (
        "deepspeed_zero3",
        {"allgather_sequential": True, "live_parameters": 1, "reduce_bucket_size": 3000}
        | {"param_persistence_threshold": 0, "recompute": "full", "recompute_blocks": 2},
        LLAMA | TIED,
    ),
    # Two ranks of four have a second copy of the parameters between them.
    (
        "deepspeed_zero3",
        {"zero_hpz_partition_size": 2, "param_persistence_threshold": 0},
        TIED,
    ),
    ("fsdp", {"shard": 4, "recompute": "selective"}, {}),
    ("fsdp", {"shard": 4, "reshard_after_backward": False, "offload_blocks": 4}, {}),
    ("fsdp", {"shard": 4, "recompute": "selective", "offload_blocks": 3}, LLAMA),
    ("fsdp", {"shard": 4, "recompute": "full", "offload_blocks": 2}, TIED),
    ("fsdp", {"shard": 2, "replicate": 2, "reduce_every": "step", **KEPT}, LLAMA),
    ("fsdp", {"shard": 2, "replicate": 2, **KEPT, "reshard_after_backward": False}, {}),
    ("fsdp", {"shard": 2, "replicate": 2, "recompute": "full"}, TIED),
    ("torch_pp", {"pp": 2, "shard": 2, "schedule": "1f1b", "recompute": "full"}, {}),
    (
        "torch_pp",
        {"pp": 2, "shard": 2, "schedule": "interleaved_1f1b", "chunks": 3},
        {"layers": 6},
    ),
    ("torch_pp", {"pp": 2, "replicate": 2, "schedule": "zbv", "chunks": 2}, TIED),
    ("torch_pp", {"pp": 2, "shard": 2, "schedule": "dualpipev", "chunks": 2}, {}),
    # Two units of two microbatches: each stage is gathered, released and reduced in both.
    ("torch_pp", {"pp": 2, "shard": 2, "schedule": "zeropp", "chunks": 3}, {"layers": 6}),
    ("torch_pp", {"pp": 2, "tp": 2, "schedule": "1f1b", "recompute": "selective"}, TIED),
    ("torch_pp", {"pp": 2, "tp": 2, "schedule": "1f1b", "sequence_parallel": True}, {}),
    (
        "torch_pp",
        {"pp": 2, "tp": 2, "schedule": "looped_bfs", "chunks": 2, "sequence_parallel": True},
        LLAMA,
    ),
]


@pytest.mark.parametrize(("name", "options", "model"), EXACT, ids=str)
def test_contenders_are_one_process(
    world: World, name: str, options: Options, model: Options
) -> None:
    few = name == "torch_pp" and "tp" in options
    plan = plan_of(name, options, global_batch=FEW if few else 8, model=model)
    for rank, outcome in enumerate(check(world, plan)):
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        planned = [action for action in program if action.op not in IN_DEEPSPEEDS_INSTRUCTIONS]
        for op in (Op.UNSHARD, Op.REDUCE_GRAD) if name == "fsdp" and model != TIED else ():
            assert outcome.counters[op.name.lower()] == STEPS * count_of(program, op)
        if name == "torch_pp":
            assert outcome.counters.get("unshard", 0) == STEPS * count_of(program, Op.UNSHARD)
        if name in ("fsdp", "torch_pp"):
            planned = [action for action in program if action.op.is_compute]
        expected = [str(action) for action in planned]
        seen = [span.action for span in outcome.spans]
        if name == "torch_pp":
            seen = [span.action for span in outcome.spans if span.lane == "compute"]
        if name == "fsdp":
            expected = [text for text in expected if not text.startswith("0B")]
        assert seen == expected or (name == "fsdp" and model == TIED)


def count_of(program: Sequence[Action], op: Op) -> int:
    return sum(action.op is op for action in program)


def build_with(optimizer: str, plan: Plan, *arguments: Any) -> DeepSpeedTrainer:
    """Build a trainer, in which DeepSpeed must have chosen its optimizer of that name."""
    trainer = build(plan, *arguments)
    assert type(trainer._optimizer).__name__ == optimizer
    return trainer


def build_in_python(*arguments: Any) -> DeepSpeedTrainer:
    """Build a trainer whose compiled blocks need no C++ compiler."""
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        return build(*arguments)


build_with_own = partial(build_with, "DeepSpeedZeroOptimizer")
build_with_bf16 = partial(build_with, "BF16_Optimizer")


ALL_AXES = {"pp": 2, "tp": 2, "shard": 2, "schedule": "interleaved_1f1b", "chunks": 2}
IN_BF16 = {"grad_accum_dtype": "bf16", "reduce_dtype": "bf16"}
TO_OWNERS = IN_BF16 | {"use_multi_rank_bucket_allreduce": False}
SMALL = {"reduce_bucket_size": 20_000}  # several buckets
TIED_IN_BF16 = {"precision": "bf16", "model": TIED}
# Ranks, what else the plan has, and the optimizer that DeepSpeed must have chosen. In bf16 the
# numbers are close.
NEAR: list[tuple[str, Options, int, Options, str | None]] = [
    (
        "deepspeed", {"pp": 2, "tp": 2, "replicate_zero": 1}, 4, TIED_IN_BF16,
        "build_with_bf16",
    ),
    (
        "deepspeed", {"pp": 2, "replicate_zero": 1, **TO_OWNERS}, 4, TIED_IN_BF16,
        "build_with_own",
    ),
    (
        "deepspeed", {"pp": 1, "tp": 1, "replicate_zero": 1, **IN_BF16, **SMALL}, 4,
        TIED_IN_BF16, "build_with_own",
    ),
    (
        "deepspeed", {"pp": 1, "tp": 2, "replicate_zero": 2, **SMALL}, 4, TIED_IN_BF16,
        "build_with_own",
    ),
    (
        "deepspeed", {"pp": 1, "tp": 2, "replicate_zero": 2, "reduce_dtype": "bf16"}, 4,
        TIED_IN_BF16, "build_with_own",
    ),
    ("deepspeed_zero3", {"reduce_bucket_size": 3000}, 4, TIED_IN_BF16, None),
    ("deepspeed_zero3", {"reduce_bucket_size": 3000, **IN_BF16}, 4, TIED_IN_BF16, None),
    ("fsdp", {"shard": 2}, 2, {"precision": "bf16"}, None),
    (
        "fsdp", {"shard": 2, "reduce_every": "step", "reduce_dtype": "bf16"}, 2,
        {"precision": "bf16"}, None,
    ),
    (
        "torch_pp", {"pp": 2, "shard": 2, "schedule": "interleaved_zb", "chunks": 2}, 4,
        {"precision": "bf16"}, None,
    ),
    # Blocks are compiled.
    ("deepspeed", {"compile": True, "pp": 2, "recompute": "full"}, 4, {}, "build_in_python"),
    # Clipped, by AdamW.
    ("deepspeed", {"pp": 2, "tp": 2, "replicate_zero": 1}, 8, {}, None),
    ("deepspeed", {"pp": 1, "tp": 2, "replicate_zero": 2}, 4, {}, None),
    ("fsdp", {"shard": 4}, 4, {}, None),
    # Four microbatches per rank: in a steady phase, forwards and backwards take turns.
    ("torch_pp", ALL_AXES, 8, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "ranks", "more", "builder"), NEAR, ids=str)
def test_contenders_clip_adapt_and_round(
    world: World, name: str, options: Options, ranks: int, more: Options, builder: str | None
) -> None:
    how: Options = {"tolerance": 2e-2} if more else {} if builder else {"optimizer": CLIPPED}
    path = builder and f"{__name__}:{builder}"
    check(world, plan_of(name, options, ranks, **more), builder=path, **how)


needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
OF_MEGATRON = {"tp": 2, "pp": 2, "chunks": 2, "schedule": "interleaved_1f1b"}
SEQUENCE = {"sequence_parallel": True}
SHARDED = {"replicate_zero": 1}
INTERLEAVED = OF_MEGATRON | SEQUENCE
# Four microbatches per pipeline; what is left of the ranks is data parallelism.
MEGATRON: list[tuple[int, Options, Options]] = [
    (8, OF_MEGATRON | SEQUENCE | SHARDED, {"global_batch": 8}),
    (4, OF_MEGATRON | {"recompute": "full"}, {"global_batch": 4, "model": TIED}),
    (4, {"tp": 2, "pp": 2, "recompute": "selective"} | SEQUENCE, {"global_batch": 4}),
    (4, {"pp": 2} | SHARDED, {"global_batch": 8, "model": {"layers": 5}}),
    (2, {"pp": 1}, {"global_batch": 8, "model": {"layers": 2}}),
]
MEGATRON_IN_BF16: list[tuple[int, Options, Options]] = [
    (
        4, {"pp": 1, "tp": 2} | SEQUENCE | SHARDED,
        {"global_batch": 8, "model": LLAMA | {"layers": 2}, "precision": "bf16"},
    ),
    (
        2, {"pp": 1, "grad_accum_dtype": "bf16", "bucket_size": 3000} | SHARDED,
        {"global_batch": 8, "model": {"layers": 2}, "precision": "bf16"},
    ),
]  # fmt: skip
_COUNTED = (
    *("all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base"),
    *("all_gather_into_tensor", "_all_gather_base", "isend", "irecv"),
)
_LIKE = {"_reduce_scatter_base": "reduce_scatter_tensor"}
_LIKE |= {"_all_gather_base": "all_gather_into_tensor"}


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Inside, calls of torch's collectives and messages are counted by name."""
    calls = Counter[str]()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[_LIKE.get(name, name)] += 1
            return original(*arguments, **keywords)

        return call

    with ExitStack() as stack:
        for name in _COUNTED:
            wrapped = counted(name, getattr(dist, name))
            for module in (dist, distributed_c10d):  # batched messages compare them by identity
                stack.enter_context(mock.patch.object(module, name, wrapped))
        for module, name in _of_megatron():
            original = getattr(module, name)
            wrapped = counted(original.__name__, original)
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield calls


def _of_megatron() -> Iterator[tuple[Any, str]]:
    """Where Megatron-Core's modules have torch's collectives under names of their own."""
    for module in [m for n, m in sys.modules.items() if n.startswith("megatron.core.")]:
        for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
            if hasattr(module, name):
                yield module, name


def build_counted(*arguments: Any) -> Any:
    """Build a trainer of Megatron-Core that counts what it calls in each step."""
    trainer: Any = CONTENDERS["megatron_core"].build(*arguments)
    step = trainer.step

    def counting(inputs: Tensor, targets: Tensor) -> Any:
        with counted_calls() as calls:
            result = step(inputs, targets)
        trainer.counters = lambda: calls
        return result

    trainer.step = counting
    return trainer


@needs_megatron
@pytest.mark.parametrize(("ranks", "options", "more"), MEGATRON + MEGATRON_IN_BF16, ids=str)
def test_megatron_core_is_one_process_with_the_planned_actions_and_messages(
    world: World, ranks: int, options: Options, more: Options
) -> None:
    plan = plan_of("megatron_core", options, ranks, **more)
    how: Options = {"tolerance": 2e-2} if "precision" in more else {"optimizer": CLIPPED}
    for rank, outcome in enumerate(check(world, plan, builder=f"{__name__}:build_counted", **how)):
        program = plan.schedule.programs[plan.layout.coordinates(rank)["pp"]]
        seen = [span.action for span in outcome.spans]
        assert seen == [str(action) for action in program if action.op.is_compute]
        assert outcome.counters == planned_calls(plan, rank)


def planned_calls(plan: Plan, rank: int) -> dict[str, int]:
    """The messages of a step on a rank, which are the plan's, and the collectives that the cost
    model prices (``zeropp/price``), with the few small ones that it does not."""
    layout, m = plan.layout, plan.num_microbatches
    program = plan.schedule.programs[layout.coordinates(rank)["pp"]]
    ops = Counter(action.op for action in program)
    stages = {action.stage for action in program}
    first, last = 0 in stages, plan.schedule.num_stages - 1 in stages
    blocks = sum(plan.blocks[stage] for stage in stages)
    # Two sums of hidden states per block and pass, one of them in the MLP; embedding and head
    # have one each.
    again = sum(plan.recomputed_per_stage[s] for s in stages) * (
        1 if plan.recompute == "selective" else 2
    )
    forward, backward = 2 * blocks + again + first, 2 * blocks + last
    calls = Counter(isend=ops[Op.SEND_F] + ops[Op.SEND_B], irecv=ops[Op.RECV_F] + ops[Op.RECV_B])
    if layout.tp > 1 and layout.sequence_parallel:
        if first and plan.shape.family == "gpt":  # learned positions are added before the split
            calls["all_reduce"] += m
            calls["reduce_scatter_tensor"] -= m
        # A sum is a reduce-scatter, whose opposite is an all-gather; products' inputs are gathered
        # once more for their weight gradients.
        calls["reduce_scatter_tensor"] += m * (forward + backward)
        calls["all_gather_into_tensor"] += m * (forward + backward + 2 * blocks + last)
        calls["all_reduce"] += 1  # the gradients of norms
    elif layout.tp > 1:
        calls["all_reduce"] += m * (forward + backward)
    if layout.replicate_zero:
        buckets = 5 if "+updated_bucket" in plan.program else 1  # of 3,000 elements
        calls["reduce_scatter_tensor"] += buckets * ops[Op.REDUCE_GRAD]
        calls["all_gather_into_tensor"] += buckets * len(stages)  # what the last step has updated
    else:  # also where there is one data-parallel rank
        calls["all_reduce"] += ops[Op.REDUCE_GRAD]
    calls["all_reduce"] += 3 * m * last  # numbers per token: maximum, sum, the target's logit
    calls["all_reduce"] += 2  # the gradient's norm and the loss
    calls["all_reduce"] += plan.shape.tied_embeddings and layout.pp > 1 and (first or last)
    return +calls


def passes_gate(spec: RunSpec) -> bool:
    """On a rank: whether the gate passes."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    contender = CONTENDERS[spec.contender.name]
    return bool(run_gate(spec, contender, open_batches(spec), CPU)["passed"])


@needs_megatron
@pytest.mark.parametrize(("ranks", "options", "more"), MEGATRON_IN_BF16, ids=str)
def test_the_gate_of_megatron_core_in_bf16_passes(
    world: World, ranks: int, options: Options, more: Options
) -> None:
    asked: Options = {"name": "megatron_core", **options}
    clipped = {"weight_decay": 0.1, "clip_norm": 1.0}
    model = {"vocab": 256, **more["model"]}
    more = more | {"model": model, "global_batch": 4}
    spec = request(ranks, asked, data=TEXT, optimizer=clipped, **more)
    assert all(world.run(passes_gate, spec, size=ranks))


def actions_in_other_groups(plan: Plan, group: int) -> list[str]:
    """The actions of a step whose interleaving sends this many microbatches through a chunk before
    the next one, instead of the planner's number."""
    trainer: Any = CONTENDERS["megatron_core"].build(plan, CLIPPED, CPU, SEED)
    trainer._config.microbatch_group_size_per_vp_stage = group
    trainer.record_spans(True)
    trainer.step(*local_batch(plan, 0))
    return [span.action for span in trainer.spans()]


@needs_megatron
def test_other_groups_of_microbatches_of_megatron_core_are_another_order(world: World) -> None:
    plan = plan_of("megatron_core", INTERLEAVED, global_batch=4)
    seen = world.run(actions_in_other_groups, plan, 4, size=4)
    planned = [str(action) for action in plan.schedule.programs[0] if action.op.is_compute]
    assert seen[0] != planned
    assert sorted(seen[0]) == sorted(planned)


def test_a_compiled_block_leaves_its_last_product_out() -> None:
    """Where it is computed again, as the trait ``stops_recomputing`` says."""
    plan = plan_of("fsdp", {"recompute": "full", "compile": True})
    block = build_piece(plan.shape, 1, 0, torch.device("cpu"))
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
        prepare_block(block, plan, torch.device("cpu"), recomputed=True)
    x = torch.zeros(2, plan.shape.seq, plan.shape.hidden, requires_grad=True)
    block(x).sum().backward()  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        block(x).sum().backward()
    products = sum(event.name in ("aten::mm", "aten::addmm") for event in profiled.events())
    linears = sum(isinstance(module, nn.Linear) for module in block.modules())
    assert products == 3 * linears + linears - 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model", [TIED, LLAMA], ids=["gpt", "llama"])
def test_a_delaying_block_leaves_its_last_product_out(model: Options, compiled: bool) -> None:
    plan = plan_of("zeropp", {"recompute": "full"}, model=model)
    block = build_piece(plan.shape, 1, 0, torch.device("cpu"))
    defer_weight_grads([block], WeightGradStore())
    save_early([block])
    if compiled:
        block.compile(backend="aot_eager_decomp_partition")
    x = torch.randn(2, plan.shape.seq, plan.shape.hidden, requires_grad=True)

    def run(recompute: Recompute) -> tuple[int, list[Tensor]]:
        with profile(activities=[ProfilerActivity.CPU]) as profiled, backward_of_chunk():
            y = run_recomputed(block, x, recompute=recompute, random=False)
            gradients = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        products = sum(event.name in ("aten::mm", "aten::addmm") for event in profiled.events())
        return products, list(gradients)

    run("full")  # compiles
    (once, expected), (again, found) = run("none"), run("full")
    assert again - once == sum(isinstance(module, nn.Linear) for module in block.modules()) - 1
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("name", "options", "layers", "recomputed"),
    [
        ("fsdp", {"shard": 4}, 4, (0, 1, 1, 0, 0, 0)),
        ("torch_pp", {"pp": 2, "shard": 2, "schedule": "1f1b"}, 6, (2, 1)),
    ],
    ids=["fsdp", "torch_pp"],
)
def test_some_blocks_are_recomputed(
    world: World, name: str, options: Options, layers: int, recomputed: tuple[int, ...]
) -> None:
    plan = plan_of(name, options | {"recompute": "full"}, model={"layers": layers})
    check(world, replace(plan, recomputed=recomputed))


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
    contender = {"name": "deepspeed", "pp": stages, "replicate": 2, "replicate_zero": 1}
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


BLOCK = {  # as Megatron-Core's own layers and as Transformer Engine's name them
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
}
OF_GPT = {
    name.replace("weight", "bias"): te.replace("weight", "bias") for name, te in BLOCK.items()
}


def shape_of(family: str) -> ModelShape:
    model = {"family": family, "kv_heads": 2 if family == "llama" else 4}
    return request(4, {"name": "megatron_core", "tp": 2, "pp": 2}, model=model).model


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("engine", [False, True], ids=["own layers", "Transformer Engine"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_is_cut_and_joined(family: str, engine: bool, tp: int) -> None:
    shape, seen = shape_of(family), set[str]()
    block = build_piece(shape, 3, seed=1).state_dict()
    for own, theirs in (BLOCK | (OF_GPT if family == "gpt" else {})).items():
        part = contents_of(shape, theirs if engine else own, 3, tp)
        values = [block[name] for name in part.names]
        parts = part.parts(values, tp)
        assert len(parts) == tp
        if part.cut != "whole":
            assert sum(each.numel() for each in parts) == sum(each.numel() for each in values)
        assert all(map(torch.equal, part.values(parts, [value.shape for value in values]), values))
        assert part.piece == 3
        seen |= set(part.names)
    assert seen == set(block)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    shape = shape_of("llama")
    part = contents_of(shape, "self_attention.linear_qkv.weight", 1, 2)
    rows = [(shape.hidden, "q"), (2 * shape.head_dim, "k"), (2 * shape.head_dim, "v")]
    numbered = [torch.arange(count).view(-1, 1) + 1000 * i for i, (count, _) in enumerate(rows)]
    first = part.parts(numbered, 2)[0].flatten().tolist()
    half = shape.hidden // 2
    expected = [*range(half), *range(1000, 1000 + shape.head_dim)]
    assert first == [*expected, *range(2000, 2000 + shape.head_dim)]


def test_ends_belong_to_the_first_and_the_last_piece() -> None:
    shape = shape_of("gpt")
    assert contents_of(shape, "embedding.word_embeddings.weight", 0, 2).names == ("tokens.weight",)
    assert contents_of(shape, "output_layer.weight", 0, 2).piece == shape.num_pieces - 1
    with pytest.raises(KeyError):
        contents_of(shape, "decoder.renamed.weight", 1, 2)


CURVE = 10
MEASURE = {"warmup_steps": 2, "steps": CURVE - 2, "timeline": True}
# Layers and sequences are as few as give every stage a piece and every pipeline two scheduling
# units, because each costs every rank time in every step.
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any], int]] = {
    "zeropp 2x2": (4, {"name": "zeropp", "pp": 2, "shard": 2, "chunks": 2, "unit": 2}, 4),
    "deepspeed 2x2x2": (8, {"name": "deepspeed", "tp": 2, "pp": 2, "replicate_zero": 1}, 2),
}
GATED = "zeropp 2x2"  # test_gate.py has the axes of all contenders; it takes long


def spec_of(ranks: int, contender: dict[str, Any], layers: int, *, gate: bool = True) -> RunSpec:
    """A run on real text; microbatches of one sequence."""
    model = {"layers": layers, "hidden": 64, "ffn": 256, "vocab": 256, "seq": 32}
    return request(ranks, contender, model=model, data=TEXT, measure=MEASURE | {"gate": gate})


@cache
def losses_of_one_process(layers: int) -> list[float]:
    """The loss curve of one process, the whole global batch at once."""
    spec = spec_of(1, {"name": "zeropp", "pp": 1}, layers)
    model = build_model(spec.model, spec.seed)
    optimizer = build_optimizer(model.parameters(), spec.optimizer)
    batches, losses = open_batches(spec), []
    for step in range(CURVE):
        inputs, targets = (torch.from_numpy(part) for part in batches.batch(step))
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5  # it learns
    return losses


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_loss_curve_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    gated, case = name == GATED, CONFIGURATIONS[name]
    expected = losses_of_one_process(case[-1])
    point = plan_point(spec_of(*case, gate=gated))
    assert point.plan is not None, point.reason
    with SweepProgress(1) as progress:
        (record,) = launch([point], LocalOptions(share_gpu=not gated), tmp_path, progress)
    assert record.status == "ok", record.reason
    assert record.variant == ("" if gated else "shared GPU")  # gloo takes no notice of it
    assert record.losses == pytest.approx(expected, rel=1e-4)
    assert (record.gate is not None and record.gate.passed) == gated
    if point.spec.contender.name == "zeropp":
        steps, chunks = CURVE, point.plan.layout.chunks
        units = point.plan.num_microbatches // point.plan.schedule.unit
        assert units >= 2
        assert len(record.ranks) == point.spec.num_gpus
        for rank in record.ranks:
            # Once per chunk, unit and phase would be 2 * chunks * units. The last chunk turns round
            # from forward to backward, and chunk 0 from one unit to the next, without a gather.
            assert rank.counters["unshard"] == steps * (2 * (chunks - 1) * units + 1)


def test_a_layer_that_delays_keeps_its_own_names_and_can_be_pickled() -> None:
    class Mine(nn.Linear):
        transposed = True  # a name of its own

    torch.manual_seed(0)
    layer, x = Mine(3, 3), torch.randn(2, 3)
    expected = layer(x)
    whole = nn.Sequential(layer, nn.Linear(3, 3))
    defer_weight_grads([whole], WeightGradStore())
    assert torch.equal(layer(x), expected)
    copy = pickle.loads(pickle.dumps(whole[1]))  # as after ``model.close()``
    assert torch.equal(copy(x), whole[1](x))
