"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
one before; the first takes a microbatch of inputs, the loss function the last one's output and
the targets. ``torch.distributed`` must be initialised; every rank calls with equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeropp.cost import cut_by_weight
from zeropp.engine.engine import Engine, Piece
from zeropp.engine.interpreter import LossFunction
from zeropp.engine.replicas import Name
from zeropp.layout import InfeasibleError, Layout, Placement
from zeropp.plan import Precision, Recompute, ReduceEvery
from zeropp.schedule import build, lower, validate
from zeropp.schedule.program import Schedule
from zeropp.training import OptimizerConfig, StepResult

Layer = nn.Module | Callable[[], nn.Module]


class ParallelModel:
    """What ``parallelize`` gives. Every method is collective."""

    def __init__(self, engine: Engine, microbatch_size: int, rows: slice) -> None:
        self.engine = engine
        self.rows = rows  # of the global batch: what this rank's ``step`` is to be given
        self._microbatch_size = microbatch_size

    def step(self, batch: tuple[Tensor, Tensor]) -> StepResult:
        """Train one step on (inputs, targets), this rank's ``rows`` of the global batch."""
        inputs, targets = (torch.split(part, self._microbatch_size) for part in batch)
        return self.engine.step(inputs, targets)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of this rank's layers, named ``{layer}.{parameter}``."""
        return self.engine.full_parameters()

    def save(self, directory: Path | str) -> None:
        """Write a checkpoint that any topology can load."""
        self.engine.save(directory)

    def load(self, directory: Path | str) -> None:
        """Read a checkpoint of this topology or another."""
        self.engine.load(directory)


def parallelize(
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    *,
    sample: Tensor,
    global_batch: int,
    optimizer: OptimizerConfig | None = None,
    pp: int = 1,
    shard: int = 1,
    replicate: int = 1,
    replicate_zero: Literal[0, 1] = 0,
    chunks: int = 1,
    unit: int | None = None,
    activation_cap: int | None = None,
    prefetch: int = 1,
    reduce_every: ReduceEvery = "unit",
    placement: Placement = "dp_inner",
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    weights: Sequence[int] | None = None,
    tied: tuple[Name, Name] | None = None,
    lr_schedule: Callable[[int], float] | None = None,
    dropout_seed: int | None = None,
    device: torch.device | str = "cpu",
) -> ParallelModel:
    """Cut layers into ``pp * chunks`` stages and build this rank's.

    ``layers`` are modules, or functions that make the same one at every call: they are made one at
    a time to learn their sizes, and only this rank's are kept.
    ``sample`` is one microbatch of inputs; its rows set the microbatch's size. ``unit``
    (microbatches for which parameters are gathered once) is ``pp`` by default. ``weights`` are
    the layers' relative costs, by default their numbers of parameters. ``tied`` names two
    parameters as (layer, name). The last layer keeps its weight gradients undeferred: its output
    is taken to be wide. Raises InfeasibleError where degrees, stages or batch do not fit.
    """
    layout = Layout(pp, 1, shard, replicate, chunks, replicate_zero, placement=placement)
    microbatches = _microbatches(layout, global_batch, sample.shape[0])
    sharded = shard > 1 or precision == "bf16"
    schedule = _schedule(
        layout, microbatches, unit, activation_cap, sharded, prefetch, reduce_every
    )
    messages, sizes = _outputs(layers, sample, precision)
    if len(layers) < schedule.num_stages:
        raise InfeasibleError(
            f"chunks={chunks}: {pp} x {chunks} stages, but there are {len(layers)} layers"
        )
    cuts = cut_by_weight(weights or sizes, schedule.num_stages)
    device = torch.device(device)

    def boundary(stage: int) -> Tensor:
        size, dtype = messages[cuts[stage] - 1]
        return torch.empty(size, dtype=dtype, device=device)

    rank = dist.get_rank()
    engine = Engine(
        _pieces(layers, schedule, cuts, layout.coordinates(rank)["pp"], device),
        schedule,
        layout,
        loss_fn,
        boundary,
        optimizer or OptimizerConfig(),
        device,
        precision=precision,
        recompute=recompute,
        tied=tied,
        lr_schedule=lr_schedule,
        dropout_seed=dropout_seed,
    )
    rows = global_batch // layout.dp
    first = rows * layout.dp_index(rank)
    return ParallelModel(engine, sample.shape[0], slice(first, first + rows))


def _microbatches(layout: Layout, global_batch: int, microbatch_size: int) -> int:
    if layout.world != dist.get_world_size():
        raise InfeasibleError(
            f"pp={layout.pp} x shard={layout.shard} x replicate={layout.replicate} = "
            f"{layout.world}: must be the number of ranks, {dist.get_world_size()}"
        )
    slots = layout.dp * microbatch_size
    if global_batch % slots:
        raise InfeasibleError(
            f"global_batch={global_batch}: must be a multiple of {slots}, the sample's "
            f"{microbatch_size} rows x {layout.dp} data-parallel ranks"
        )
    return global_batch // slots


def _schedule(
    layout: Layout,
    microbatches: int,
    unit: int | None,
    activation_cap: int | None,
    gather: bool,
    prefetch: int,
    reduce_every: ReduceEvery,
) -> Schedule:
    unit = min(unit or layout.pp, microbatches)
    cap = activation_cap or unit * layout.chunks
    schedule = build(
        "zeropp",
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=microbatches,
        unit=unit,
        activation_cap=cap,
    )
    schedule = lower(schedule, gather=gather, prefetch=prefetch, reduce_every=reduce_every)
    validate(schedule, activation_cap=cap)
    return schedule


def _outputs(
    layers: Sequence[Layer], sample: Tensor, precision: Precision
) -> tuple[list[tuple[torch.Size, torch.dtype]], list[int]]:
    """Every layer's output (size, type) and number of parameters, without computing anything."""
    outputs, sizes = [], []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x: Tensor = mode.from_tensor(sample)
    for layer in layers:
        module = layer if isinstance(layer, nn.Module) else layer()
        with mode, torch.no_grad():
            x = module(x)
        bf16 = precision == "bf16" and x.is_floating_point()
        outputs.append((x.shape, torch.bfloat16 if bf16 else x.dtype))
        sizes.append(sum(parameter.numel() for parameter in module.parameters()))
    return outputs, sizes


def _pieces(
    layers: Sequence[Layer],
    schedule: Schedule,
    cuts: Sequence[int],
    pp_rank: int,
    device: torch.device,
) -> list[Piece]:
    pieces = []
    for stage in schedule.stages_of(pp_rank):
        for index in range(cuts[stage], cuts[stage + 1]):
            layer = layers[index]
            module = (layer if isinstance(layer, nn.Module) else layer()).to(device)
            pieces.append(Piece(index, stage, module, 0 < index < len(layers) - 1))
    return pieces
