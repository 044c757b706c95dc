"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
one before; the first takes a microbatch of inputs, the loss function the last one's output and
the targets. ``torch.distributed`` must be initialised; every rank calls with equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.cost import cut_by_weight
from zeropp.engine.engine import Engine, EngineOptions, Piece
from zeropp.engine.flat_layout import Name
from zeropp.engine.interpreter import LossFunction
from zeropp.keywords import Keywords, knobs_of
from zeropp.layout import InfeasibleError, Layout, most_microbatches
from zeropp.literals import Precision, StageStyle, if_auto
from zeropp.schedule import validate
from zeropp.schedule.build import StepSizes, step_programs
from zeropp.schedule.program import Schedule
from zeropp.schedule.zeropp_order import default_cap, default_unit
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
    precision: Precision = "fp32",
    weights: Sequence[int] | None = None,
    tied: tuple[Name, Name] | None = None,
    device: torch.device | str = "cpu",
    lr_schedule: Callable[[int], float] | None = None,
    dropout_seed: int | None = None,
    **keywords: Unpack[Keywords],
) -> ParallelModel:
    """Cut layers into ``pp * chunks`` stages and build this rank's.

    ``layers`` are modules, or functions that make the same one at every call: they are made one at
    a time to learn their sizes, and only this rank's are kept. ``sample`` is one microbatch of
    inputs. ``weights`` are the layers' relative costs, by default their numbers of parameters.
    ``tied`` names two parameters as (layer, name). The last layer's weight gradients are not put
    off: its output is taken to be wide. Raises InfeasibleError where something does not fit.
    """
    knobs = knobs_of(keywords)
    stages = _cut(layers, knobs, sample, global_batch, precision, weights)
    device = torch.device(device)
    engine = Engine(
        stages.pieces(layers, device),
        stages.schedule,
        stages.layout,
        loss_fn,
        partial(stages.boundary, device=device),
        optimizer or OptimizerConfig(),
        device,
        _options(knobs, precision, tied, lr_schedule, dropout_seed),
    )
    return ParallelModel(engine, sample.shape[0], stages.rows(global_batch))


def _options(
    knobs: ZeroppKnobs,
    precision: Precision,
    tied: tuple[Name, Name] | None,
    lr_schedule: Callable[[int], float] | None,
    dropout_seed: int | None,
) -> EngineOptions:
    if dropout_seed is None and not knobs.compile:
        dropout_seed = 0
    return EngineOptions(
        precision,
        if_auto(knobs.recompute, "none"),
        knobs.replicate_every,
        knobs.reduce_dtype,
        tied,
        lr_schedule,
        dropout_seed,
        compile=knobs.compile,
    )


@dataclass(frozen=True)
class _Stages:
    """Layers cut into stages, and what passes between them."""

    layout: Layout
    schedule: Schedule
    cuts: tuple[int, ...]
    outputs: Sequence[tuple[torch.Size, torch.dtype]]  # of every layer

    def boundary(self, stage: int, device: torch.device) -> Tensor:
        """An empty tensor for the message into a stage."""
        size, dtype = self.outputs[self.cuts[stage] - 1]
        return torch.empty(size, dtype=dtype, device=device)

    def pieces(self, layers: Sequence[Layer], device: torch.device) -> list[Piece]:
        """This rank's layers."""
        pieces = []
        for stage in self.schedule.stages_of(self.layout.coordinates(dist.get_rank())["pp"]):
            for index in range(self.cuts[stage], self.cuts[stage + 1]):
                layer = layers[index]
                module = (layer if isinstance(layer, nn.Module) else layer()).to(device)
                pieces.append(Piece(index, stage, module, 0 < index < len(layers) - 1))
        return pieces

    def rows(self, global_batch: int) -> slice:
        """This rank's rows of a global batch."""
        count = global_batch // self.layout.dp
        first = count * self.layout.dp_index(dist.get_rank())
        return slice(first, first + count)


def _cut(
    layers: Sequence[Layer],
    knobs: ZeroppKnobs,
    sample: Tensor,
    global_batch: int,
    precision: Precision,
    weights: Sequence[int] | None,
) -> _Stages:
    layout = Layout(
        pp=if_auto(knobs.pp, 1),
        shard=if_auto(knobs.shard, 1),
        replicate=if_auto(knobs.replicate, 1),
        chunks=if_auto(knobs.chunks, 1),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    count = layout.pp * layout.chunks
    if len(layers) < count:
        raise InfeasibleError(
            f"chunks={layout.chunks}: {layout.pp} x {layout.chunks} stages, but there are "
            f"{len(layers)} layers"
        )
    microbatches = _microbatches(layout, global_batch, sample.shape[0])
    schedule = _schedule(layout, knobs, microbatches, precision)
    outputs, parameters = _outputs(layers, sample, precision)
    return _Stages(layout, schedule, cut_by_weight(weights or parameters, count), outputs)


def _schedule(
    layout: Layout, knobs: ZeroppKnobs, microbatches: int, precision: Precision
) -> Schedule:
    style: StageStyle = "loop" if knobs.stage_style == "auto" else knobs.stage_style
    sharded = layout.shard > 1 or precision == "bf16"
    unit = min(if_auto(knobs.unit, default_unit(style, layout.pp, microbatches)), microbatches)
    cap = if_auto(knobs.activation_cap, default_cap(style, layout.pp, layout.chunks, unit))
    sizes = StepSizes(
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=microbatches,
        unit=unit,
        activation_cap=cap,
        stage_style=style,
        split_backward=knobs.split_backward,
        gather=sharded,
        prefetch=knobs.prefetch,
        keep=if_auto(knobs.keep, 0),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
    )
    try:
        (schedule,) = step_programs(sizes)
    except ValueError as error:
        raise InfeasibleError(f"{error} (or a smaller unit)") from None
    validate(schedule, activation_cap=cap)
    return schedule


def _microbatches(layout: Layout, global_batch: int, microbatch_size: int) -> int:
    if layout.world != dist.get_world_size():
        raise InfeasibleError(
            f"pp={layout.pp} x shard={layout.shard} x replicate={layout.replicate} = "
            f"{layout.world}: must be the number of ranks, {dist.get_world_size()}"
        )
    slots = layout.dp * microbatch_size
    if global_batch < 1 or global_batch % slots:
        raise InfeasibleError(
            f"global_batch={global_batch}: must be a multiple of {slots}, the sample's "
            f"{microbatch_size} rows x {layout.dp} data-parallel ranks"
        )
    most = most_microbatches(layout.pp * layout.chunks)
    if global_batch // slots > most:
        raise InfeasibleError(
            f"global_batch={global_batch}: must be at most {most * slots}, for {most} microbatches "
            "that can be planned (or take a larger microbatch)"
        )
    return global_batch // slots


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
