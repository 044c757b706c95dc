"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
one before; the first takes a microbatch of inputs, the loss function the last one's output and
the targets. ``torch.distributed`` must be initialised; every rank calls with equal arguments.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.cost import cut_by_weight
from zeropp.engine.checks import agreed, check_batch, check_layers, described
from zeropp.engine.engine import Engine, EngineOptions, MakeOptimizer, Piece, one_group
from zeropp.engine.flat_layout import Name
from zeropp.engine.interpreter import LossFunction
from zeropp.engine.mesh import degrees_of
from zeropp.engine.sharding import GroupOf
from zeropp.engine.together import together
from zeropp.engine.trial import Layer, LayerSizes, try_layers
from zeropp.keywords import Keywords, knobs_of
from zeropp.layout import InfeasibleError, Layout, most_microbatches
from zeropp.literals import Precision, StageStyle, if_auto
from zeropp.schedule import validate
from zeropp.schedule.build import StepSizes, step_programs
from zeropp.schedule.program import Schedule
from zeropp.schedule.zeropp_order import default_cap, default_unit
from zeropp.training import OptimizerConfig, StepResult


class ParallelModel:
    """What ``parallelize`` gives: this rank's part of the model, its optimizer included.

    Every method but ``close`` is collective: all ranks call it. ``rows`` are this rank's of a
    global batch, those of ``data_parallel_rank`` out of ``data_parallel_size`` equal parts, as a
    ``DistributedSampler`` numbers them.
    """

    def __init__(self, engine: Engine, microbatch_size: int, rows: slice, layout: Layout) -> None:
        self.engine = engine
        self.rows = rows
        self.data_parallel_rank = layout.dp_index(dist.get_rank())
        self.data_parallel_size = layout.dp
        self._microbatch_size = microbatch_size
        self._failure = ""

    def train_step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Train one step on this rank's ``rows`` of the global batch.

        ``inputs`` and ``targets`` have [rows, ...] entries; microbatch j is rows j*b .. (j+1)*b-1.
        Gives the mean loss over the global batch and the gradient's norm before clipping, equal
        on every rank. Raises ValueError where the number of rows is another, and RuntimeError
        under ``torch.no_grad`` or after a step that raised: what it left undone on the ranks
        cannot be told, so the model must be built anew.
        """
        if self._failure:
            raise RuntimeError(
                f"an earlier step raised {self._failure}; build the model anew and load a "
                "checkpoint"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError("train_step: gradients are disabled (leave torch.no_grad first)")
        check_batch(inputs, targets, self.rows.stop - self.rows.start)
        try:
            microbatches = (torch.split(part, self._microbatch_size) for part in (inputs, targets))
            return self.engine.step(*microbatches)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's shards, for ``torch.optim.lr_scheduler``."""
        return self.engine.optimizer

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of this rank's layers, named ``{layer}.{parameter}``."""
        return self.engine.full_parameters()

    def full_state_dict(self) -> dict[str, Tensor]:
        """On rank 0 all parameters, unsharded, fp32 and on the CPU, named ``{layer}.{parameter}``;
        empty on the other ranks. For models that fit into one machine's memory."""
        mine = dict(self.full_parameters())  # which all ranks gather
        if self.data_parallel_rank > 0:
            mine = {}
        parts: list[dict[str, Tensor]] | None = None
        if dist.get_rank() == 0:
            parts = [{} for _ in range(dist.get_world_size())]
        dist.gather_object(mine, parts, dst=0)
        return {name: value for part in parts or [] for name, value in part.items()}

    def save(self, directory: Path | str) -> None:
        """Write a checkpoint that any topology can load: parameters, optimizer, steps done.

        It is whole or not there: the last checkpoint of that name stays until this one is written.
        """
        self.engine.save(directory)

    def load(self, directory: Path | str) -> None:
        """Read a checkpoint of this topology or another; raises CheckpointError where a file is
        missing or is not as it was written."""
        self.engine.load(directory)

    def close(self) -> None:
        """Give up the threads and process groups of this model, which is of no more use."""
        self.engine.close()

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def parallelize(
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    *,
    sample: Tensor,
    global_batch: int,
    mesh: DeviceMesh | None = None,
    optimizer: OptimizerConfig | MakeOptimizer | None = None,
    group_of: GroupOf = one_group,
    precision: Precision = "fp32",
    weights: Sequence[float] | None = None,
    tied: tuple[Name, Name] | None = None,
    device: torch.device | str | None = None,
    lr_schedule: Callable[[int], float] | None = None,
    dropout_seed: int | None = None,
    timeout: timedelta | None = None,
    **keywords: Unpack[Keywords],
) -> ParallelModel:
    """Cut layers into ``pp * chunks`` stages and build this rank's.

    ``layers`` are modules, or functions that make the same one at every call: a function is called
    on the meta device to learn sizes, and for real only on the ranks that hold its layer.
    ``sample`` is one microbatch of inputs. ``mesh`` has axes among ``pp``, ``shard`` and
    ``replicate`` and stands for these degrees. ``weights`` are the layers' relative costs, by
    default their numbers of parameters. ``tied`` names two parameters as (layer, name).
    ``optimizer``: a configuration, or a function that makes any optimizer of ``torch.optim`` that
    works element by element, from flat fp32 tensors by group: ``lambda groups:
    torch.optim.AdamW([{"params": groups["all"]}], lr=1e-3)``. ``group_of`` puts a parameter into a
    group, given its (layer, name) and itself. Clipping needs ``OptimizerConfig``.
    ``device`` is by default the mesh's, or this process's CUDA device where the process group has
    NCCL, else the CPU. ``timeout``: how long this model's collectives and messages wait for their
    peers; by default as long as those of torch's new groups. The last layer's weight gradients are
    not put off: its output is taken to be wide.

    Raises TypeError for an argument that there is not, and InfeasibleError with one line, the same
    on every rank, where something does not fit or ranks were given different things.
    """
    if not dist.is_initialized():
        raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
    knobs = together(lambda: _knobs(keywords, mesh))
    config = optimizer or OptimizerConfig()
    asked = config if isinstance(config, OptimizerConfig) else "of the caller's own"
    request = (knobs, asked, precision, weights, tied, dropout_seed, global_batch)
    agreed(
        lambda: check_layers(layers, weights, tied),
        lambda: (*request, tuple(sample.shape), sample.dtype, len(layers)),
    )
    device = _device(device, mesh)
    if device.type == "cuda":
        _prepare_cuda()
    stages = together(lambda: _cut(layers, knobs, sample, global_batch, precision, weights))
    pieces = together(lambda: stages.pieces(layers, device))
    _compare_values(pieces)
    engine = Engine(
        pieces,
        stages.schedule,
        stages.layout,
        loss_fn,
        partial(stages.boundary, device=device),
        config,
        device,
        _options(knobs, precision, tied, lr_schedule, dropout_seed, group_of, timeout),
    )
    return ParallelModel(engine, sample.shape[0], stages.rows(global_batch), stages.layout)


def _knobs(keywords: Keywords, mesh: DeviceMesh | None) -> ZeroppKnobs:
    """What the caller asked for by name, with the mesh's degrees if there is one."""
    knobs = knobs_of(keywords)
    return knobs if mesh is None else replace(knobs, **degrees_of(mesh, keywords))


def _device(asked: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live."""
    if asked is not None:
        return torch.device(asked)
    on_cuda = (
        "nccl" in str(dist.get_backend_config()) if mesh is None else mesh.device_type == "cuda"
    )
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _prepare_cuda() -> None:
    """Ask CUDA for what early receives need, as long as it can be asked.

    A kernel that is loaded on first use would wait for receives that are posted early; of the 8
    hardware queues that are the default, two streams could share one. Warns where CUDA was
    initialised without these settings.
    """
    wanted = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    missing = [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]
    if missing and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warnings.warn(f"set {' '.join(missing)} before CUDA is used: steps may hang", stacklevel=3)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _compare_values(pieces: Sequence[Piece]) -> None:
    """Refuse ranks that hold the same layer with other values; collective."""
    mine = {piece.index: described(piece.module.named_parameters()) for piece in pieces}
    held: list[dict[int, dict[str, object]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(held, mine)
    first: dict[int, tuple[int, dict[str, object]]] = {}
    for rank, layers in enumerate(held):
        for index, values in layers.items():
            owner, expected = first.setdefault(index, (rank, values))
            for name in expected | values:
                if repr(expected.get(name)) != repr(values.get(name)):  # NaN equals itself here
                    raise InfeasibleError(
                        f"layers[{index}]: {name!r} is not the same on ranks {owner} and {rank} "
                        "(seed all ranks alike before the layers are made, or load a checkpoint)"
                    )


def _options(
    knobs: ZeroppKnobs,
    precision: Precision,
    tied: tuple[Name, Name] | None,
    lr_schedule: Callable[[int], float] | None,
    dropout_seed: int | None,
    group_of: GroupOf,
    timeout: timedelta | None,
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
        group_of=group_of,
        timeout=timeout,
    )


@dataclass(frozen=True)
class _Stages:
    """Layers cut into stages, and what passes between them."""

    layout: Layout
    schedule: Schedule
    cuts: tuple[int, ...]
    sizes: Sequence[LayerSizes]  # of every layer
    precision: Precision

    def boundary(self, stage: int, device: torch.device) -> Tensor:
        """An empty tensor for the message into a stage."""
        output = self.sizes[self.cuts[stage] - 1]
        bf16 = self.precision == "bf16" and output.output_dtype.is_floating_point
        dtype = torch.bfloat16 if bf16 else output.output_dtype
        return torch.empty(output.output_size, dtype=dtype, device=device)

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
    weights: Sequence[float] | None,
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
    sizes = try_layers(layers, sample)
    costs = list(weights) if weights is not None else [max(1, s.parameters) for s in sizes]
    return _Stages(layout, schedule, cut_by_weight(costs, count), sizes, precision)


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
