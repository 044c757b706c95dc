"""The engine of one rank: chunks, messages, program and optimizer, one ``step`` at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from zeropp.engine import checkpoint
from zeropp.engine.channels import Channels
from zeropp.engine.chunk import Chunk
from zeropp.engine.interpreter import Interpreter, LossFunction
from zeropp.engine.randomness import StepSeeds
from zeropp.engine.replicas import Name, Replicas
from zeropp.engine.sharding import ChunkShards, full, share_streams
from zeropp.engine.tied import TiedWeights
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import Precision, Recompute, ReduceEvery
from zeropp.optimizer import build_optimizer, square_norm
from zeropp.schedule.program import Schedule
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig, StepResult


@dataclass(frozen=True)
class Piece:
    """One pipeline piece that this rank holds. ``deferrable``: its linear layers may put off
    their weight gradients, and it is what recomputation recomputes (a transformer block)."""

    index: int
    stage: int
    module: nn.Module
    deferrable: bool


@dataclass(frozen=True)
class EngineOptions:
    """What an engine may be told beside its part of a plan.

    ``replicate_every``: gradients cross the replicas at every reduction, or at a step's last;
    ``tied`` names two parameters as (piece, name) that are one in the model; ``lr_schedule`` gives
    the factor on the learning rate from the number of steps done; ``dropout_seed`` is needed where
    the model draws random numbers; ``compile``: each block runs through torch.compile. Raises
    InfeasibleError for both of these: compiled code draws from a generator of its own.
    """

    precision: Precision = "fp32"
    recompute: Recompute = "none"
    replicate_every: ReduceEvery = "step"
    tied: tuple[Name, Name] | None = None
    lr_schedule: Callable[[int], float] | None = None
    dropout_seed: int | None = None
    compile: bool = False
    recomputed: tuple[int, ...] = ()  # blocks of each stage, its first ones; empty: all of them

    def __post_init__(self) -> None:
        if self.compile and self.dropout_seed is not None:
            raise InfeasibleError(
                "compile=True: compiled blocks draw dropout from a generator of their own "
                "(use compile=False, or no dropout)"
            )


class Engine:
    """Trains the pieces of one rank. Construction and every method are collective.

    ``schedule`` is lowered; ``boundary(stage)`` makes an empty tensor for the message into a
    stage.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        schedule: Schedule,
        layout: Layout,
        loss_function: LossFunction,
        boundary: Callable[[int], Tensor],
        optimizer: OptimizerConfig,
        device: torch.device,
        options: EngineOptions | None = None,
    ) -> None:
        self._layout, self._device = layout, device
        self._options = options = options or EngineOptions()
        self._learning_rate, self._clip_norm = optimizer.lr, optimizer.clip_norm
        self.steps_done = 0
        rank = dist.get_rank()
        self._seeds: StepSeeds | None = None
        if options.dropout_seed is not None:
            first = layout.dp_index(rank) * schedule.num_microbatches
            self._seeds = StepSeeds(options.dropout_seed, first)
        mesh = make_mesh(layout, device)
        self._pieces = sorted(pieces, key=lambda piece: piece.index)
        self.chunks = {
            stage: self._make_chunk(stage, mesh)
            for stage in schedule.stages_of(layout.coordinates(rank)["pp"])
        }
        share_streams(chunk.shards for chunk in self.chunks.values())
        channels = Channels(neighbours(schedule), layout, device)
        self.interpreter = Interpreter(
            schedule, self.chunks, channels, boundary, loss_function, options.replicate_every
        )
        self.owned = {n: p for c in self.chunks.values() for n, p in c.replicas.owned.items()}
        self._tied = TiedWeights(options.tied, self.owned, schedule, layout)
        self._gather_rows()
        self.optimizer = build_optimizer(self.owned.values(), optimizer)

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank gives its own."""
        losses = self.accumulate(inputs, targets)
        result = self._reduce_result(losses)
        if self._clip_norm and result.grad_norm > self._clip_norm:
            scale = self._clip_norm / (result.grad_norm + 1e-6)  # as torch's clip_grad_norm_
            torch._foreach_mul_(self._gradients(self.owned), scale)
        self.update()
        return result

    def accumulate(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """The first half of a step: run the program, so that owned parameters have gradients."""
        self.optimizer.zero_grad()
        for _, parameter in self.named_parameters():
            parameter.grad = None
        if self._seeds is not None:
            self._seeds.step = self.steps_done
        losses = self.interpreter.run(inputs, targets)
        self._tied.sum_gradients()
        return losses

    def update(self) -> None:
        """The second half: the optimizer's step, and updated rows to all replicas."""
        if self._options.lr_schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate * self._options.lr_schedule(self.steps_done)
        self.optimizer.step()
        self._gather_rows()
        self.steps_done += 1

    def named_parameters(self) -> Iterator[tuple[Name, nn.Parameter]]:
        """((piece, name), parameter) of this rank, sharded where there are shards."""
        for piece in self._pieces:
            for name, parameter in piece.module.named_parameters():
                yield (piece.index, name), parameter

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies, named ``{piece}.{name}``."""
        for (index, name), parameter in self.named_parameters():
            whole = full(parameter.detach())
            if (index, name) != self._tied.copy:
                yield f"{index}.{name}", whole.float().cpu()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded CPU copies of the last step's gradients, named ``{piece}.{name}``."""
        for chunk in self.chunks.values():
            for (index, name), parameter in chunk.replicas.owned.items():
                assert parameter.grad is not None
                whole = full(chunk.replicas.distributed((index, name), parameter.grad))
                if (index, name) != self._tied.copy:
                    yield f"{index}.{name}", whole.cpu()

    def save(self, directory: Path | str) -> None:
        """Write parameters, optimizer state and the number of steps; any topology can load it."""
        checkpoint.save(self._state(), directory)

    def load(self, directory: Path | str) -> None:
        """Read what ``save`` wrote, in this topology or another."""
        self.steps_done = checkpoint.load(self._state(), directory)
        self._gather_rows()

    def counters(self) -> dict[str, int]:
        """Actions run since construction, by name in lower case."""
        return dict(self.interpreter.counters)

    def record_spans(self, enabled: bool) -> None:
        """Record a span an action from here on, or stop."""
        self.interpreter.spans = [] if enabled else None

    def spans(self) -> list[Span]:
        """Spans recorded since recording was switched on."""
        return list(self.interpreter.spans or [])

    def _make_chunk(self, stage: int, mesh: DeviceMesh) -> Chunk:
        options = self._options
        pieces = [piece for piece in self._pieces if piece.stage == stage]
        sharded = self._layout.shard > 1 or options.precision == "bf16"
        shards = ChunkShards(
            [piece.module for piece in pieces],
            mesh["shard"] if sharded else None,
            options.precision,
        )
        names = {
            (piece.index, name): parameter
            for piece in pieces
            for name, parameter in piece.module.named_parameters()
        }
        replicas = Replicas(names, mesh["shard", "replicate"], self._layout.replicate_zero == 1)
        first, seeds = pieces[0].index, self._seeds
        seed = None if seeds is None else lambda piece, j: seeds.set(first + piece, j)
        deferrable = [piece.module for piece in pieces if piece.deferrable]
        return Chunk(
            shards,
            replicas,
            deferrable,
            options.recompute,
            options.compile,
            seed,
            recomputed=options.recomputed[stage] if options.recomputed else None,
        )

    def _state(self) -> dict[str, Any]:
        owned = {
            name: (chunk.replicas, parameter)
            for chunk in self.chunks.values()
            for name, parameter in chunk.replicas.owned.items()
        }
        return checkpoint.state_of(owned, self.optimizer, self.steps_done)

    def _gather_rows(self) -> None:
        for chunk in self.chunks.values():
            chunk.replicas.gather()

    def _gradients(self, names: Iterable[Name]) -> list[Tensor]:
        gradients = (self.owned[name].grad for name in names)
        return [gradient for gradient in gradients if gradient is not None]

    def _reduce_result(self, losses: Sequence[Tensor]) -> StepResult:
        """Mean loss and gradient norm, the same on every rank: one all-reduce of two numbers.

        Replicas that hold the same gradients count for one part of their number each.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        if losses:
            totals[0] = torch.stack(list(losses)).sum() / self._layout.dp
        gradients = self._gradients(name for name in self.owned if name != self._tied.copy)
        copies = 1 if self._layout.replicate_zero else self._layout.replicate
        totals[1] = square_norm(((gradient, copies) for gradient in gradients), self._device)
        dist.all_reduce(totals)
        loss, square = totals.tolist()
        return StepResult(loss, math.sqrt(square))


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """All ranks on the axes pp, shard, replicate, whatever their numbering."""
    ranks = [
        layout.rank_at({"pp": p, "shard": s, "replicate": r, "tp": 0})
        for p in range(layout.pp)
        for s in range(layout.shard)
        for r in range(layout.replicate)
    ]
    with unset_fake_temporarily():  # a mesh reads numbers out of tensors, in a trace, too
        mesh = torch.tensor(ranks).view(layout.pp, layout.shard, layout.replicate)
        return DeviceMesh(device.type, mesh, mesh_dim_names=("pp", "shard", "replicate"))


def neighbours(schedule: Schedule) -> set[tuple[int, int]]:
    """Ordered pairs of ranks between which messages go."""
    pairs = set()
    for source, target in zip(schedule.stage_rank, schedule.stage_rank[1:], strict=False):
        if source != target:
            pairs |= {(source, target), (target, source)}
    return pairs
