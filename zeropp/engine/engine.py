"""The engine of one rank: chunks, messages, program and optimizer, one ``step`` at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine import checkpoint
from zeropp.engine.channels import Channels, neighbours
from zeropp.engine.chunk import Chunk, ChunkOptions
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.evaluation import Evaluator
from zeropp.engine.flat import FlatParameters
from zeropp.engine.groups import make_groups
from zeropp.engine.interpreter import Interpreter, Loss, LossFunction, Microbatches
from zeropp.engine.options import Boundary, EngineOptions, MakeOptimizer, Piece
from zeropp.engine.randomness import StepSeeds
from zeropp.engine.rank_lanes import make_lanes
from zeropp.engine.sharding import ChunkShards, ShardOptions
from zeropp.engine.tied import TiedWeights
from zeropp.engine.together import together
from zeropp.engine.updates import gradients_of, make_optimizer
from zeropp.engine.values import TensorShape
from zeropp.engine.watch import ParameterWatch
from zeropp.layout import Layout
from zeropp.optimizer import square_norm
from zeropp.schedule.program import Schedule
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig, StepResult


class Engine:
    """Trains the pieces of one rank. Construction and every method are collective.

    ``schedule`` is lowered; ``boundary(stage)`` gives the shapes of the tensors that one microbatch
    sends into a stage. ``optimizer``: a configuration, or a function that makes one from flat
    tensors by optimizer group (``EngineOptions.group_of``; a group that this rank has nothing of
    has one empty tensor). Any optimizer that works element by element will do.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        schedule: Schedule,
        layout: Layout,
        loss_function: LossFunction,
        boundary: Boundary,
        optimizer: OptimizerConfig | MakeOptimizer,
        device: torch.device,
        options: EngineOptions | None = None,
    ) -> None:
        self._layout, self._device = layout, device
        self._options = options = options or EngineOptions()
        self.steps_done = 0
        rank = dist.get_rank()
        self._seeds: StepSeeds | None = None
        if options.dropout_seed is not None:
            first = layout.dp_index(rank) * schedule.num_microbatches
            self._seeds = StepSeeds(options.dropout_seed, first, device)
        with ExitStack() as undo:
            self._build(pieces, schedule, Loss(loss_function), boundary, optimizer, undo)
            self._owned = undo.pop_all()

    def _build(
        self,
        pieces: Sequence[Piece],
        schedule: Schedule,
        loss: Loss,
        boundary: Boundary,
        optimizer: OptimizerConfig | MakeOptimizer,
        undo: ExitStack,
    ) -> None:
        """Make all parts, in the order in which they need each other; ``undo`` gives up what has
        been made. What a rank does on its own is followed by an exchange of errors."""
        layout, device, options = self._layout, self._device, self._options
        self._groups = make_groups(layout, device, options.timeout)
        undo.callback(self._groups.close)
        self.lanes = make_lanes(device)
        undo.callback(self.lanes.close)
        self._used: set[int] = set()  # weights that have had gradients, by identity
        self._pieces = sorted(pieces, key=lambda piece: piece.index)
        self.chunks = together(lambda: self._make_chunks(schedule, boundary))
        self._channels = Channels(neighbours(schedule), layout, device, options.timeout)
        undo.callback(self._channels.close)
        reduction = options.loss_reduction
        everywhere = schedule.num_microbatches * layout.dp
        self.interpreter = Interpreter(
            schedule,
            self.chunks,
            self._channels,
            loss,
            options.replicate_every,
            everywhere if reduction == "mean" else 1,
        )
        self._evaluator = Evaluator(schedule, layout, self.chunks, self._channels, loss, reduction)
        shards = [chunk.shards for chunk in self.chunks.values()]
        self.flats = [flat for chunk in shards for flat in chunk.flats]
        self._watch = ParameterWatch(self.flats, self._used)
        self._tied = TiedWeights(options.tied, shards, schedule, layout, options.timeout)
        undo.callback(self._tied.close)
        self._clip_norm = optimizer.clip_norm if isinstance(optimizer, OptimizerConfig) else 0.0
        made = together(lambda: make_optimizer(self.flats, optimizer, device))
        self.optimizer, self._group_names = made
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        keywords: Sequence[Mapping[str, Tensor]] = (),
    ) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank gives its own."""
        losses = self.accumulate(Microbatches(inputs, targets, keywords))
        result = self._reduce_result(losses)
        if self._clip_norm and result.grad_norm > self._clip_norm:
            scale = self._clip_norm / (result.grad_norm + 1e-6)  # as torch's clip_grad_norm_
            for gradient in gradients_of(self.flats):
                gradient.mul_(scale)
        self.update()
        return result

    def evaluate(self, batch: Microbatches) -> float:
        """The loss of a batch without training on it; see ``Evaluator.run``."""
        return self._evaluator.run(batch)

    def accumulate(self, batch: Microbatches) -> list[Tensor]:
        """The first half of a step: run the program, so that what this rank updates has its
        gradients. Gives this rank's parts of the loss of the global batch."""
        for flat in self.flats:
            flat.clear_gradients()
        if self._seeds is not None:
            with self._seeds.drawing(self.steps_done):
                losses = self.interpreter.run(batch)
        else:
            losses = self.interpreter.run(batch)
        self._tied.sum_gradients()
        return losses

    def update(self) -> None:
        """The second half: the optimizer's step, and updated rows on their way to all replicas."""
        schedule = self._options.lr_schedule
        if schedule is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * schedule(self.steps_done)
        with self._watch.keeping_unused(self.optimizer):
            self.optimizer.step()
        self._gather_updated()
        self.steps_done += 1

    def full_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies, named ``{piece}.{name}``; a parameter that has several names
        in the model comes once, or under each of them with ``every_name``."""
        self._settle()
        for flat in self.flats:
            yield from self._whole(flat, flat.rows, torch.float32, every_name=every_name)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded CPU copies of the last step's gradients, named ``{piece}.{name}``."""
        self._settle()
        for flat in self.flats:
            if (mine := flat.gradient()) is not None:
                yield from self._whole(flat, mine, mine.dtype)

    def save(self, directory: Path | str) -> None:
        """Write parameters, optimizer state and the number of steps; any topology can load it."""
        checkpoint.save(self.state(), directory)

    def load(self, directory: Path | str) -> None:
        """Read what ``save`` wrote, in this topology or another."""
        state = self.state()
        checkpoint.load(state, directory)
        self.take_over(state)

    def state(self) -> checkpoint.State:
        """Parameters, buffers and optimizer state, as this rank holds them: tensors that share
        their memory."""
        self._settle()
        updated = self.flats, self.optimizer, self._group_names
        return together(lambda: checkpoint.state_of(*updated, self.steps_done, self.buffers()))

    def take_over(self, state: checkpoint.State) -> None:
        """Go on from what has been written into the tensors of ``state()``."""
        self.steps_done = int(state.steps_done)
        checkpoint.go_on_from(state, self.optimizer, self._group_names)
        self._gather_updated()

    def buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers, named ``{piece}.{name}``."""
        return checkpoint.persistent_buffers((p.index, p.module) for p in self._pieces)

    def counters(self) -> dict[str, int]:
        """Actions run since construction, by name in lower case."""
        return dict(self.interpreter.counters)

    def record_spans(self, enabled: bool) -> None:
        """Record one span per action from here on, or stop."""
        self.interpreter.spans = [] if enabled else None

    def spans(self) -> list[Span]:
        """Spans recorded since recording was switched on."""
        return list(self.interpreter.spans or [])

    def close(self) -> None:
        """Give up threads and process groups; the engine is of no more use."""
        self._owned.close()

    def _make_chunks(self, schedule: Schedule, boundary: Boundary) -> dict[int, Chunk]:
        stages = schedule.stages_of(self._layout.coordinates(dist.get_rank())["pp"])
        between = {
            stage: boundary(stage) if 0 < stage < schedule.num_stages else None
            for each in stages
            for stage in (each, each + 1)
        }
        return {s: self._make_chunk(s, between[s], between[s + 1]) for s in stages}

    def _make_chunk(
        self,
        stage: int,
        arriving: Sequence[TensorShape] | None,
        leaving: Sequence[TensorShape] | None,
    ) -> Chunk:
        options = self._options
        pieces = {piece.index: piece for piece in self._pieces if piece.stage == stage}
        blocks = [piece for piece in pieces.values() if piece.deferrable]
        # The first ones may be recomputed; half blocks never are, so they come last.
        deferrable = [piece.module for piece in sorted(blocks, key=lambda piece: piece.half)]
        others = [piece.module for piece in pieces.values() if not piece.deferrable]
        store = WeightGradStore(self._used)
        deferred = defer_weight_grads(deferrable, store, warn=True)
        # A store that is never open: at once, inside the product.
        defer_weight_grads(others, WeightGradStore(self._used))
        shards = ChunkShards(
            {index: piece.module for index, piece in pieces.items()},
            self._groups,
            self.lanes,
            ShardOptions(
                options.precision,
                self._layout.replicate_zero == 1,
                options.reduce_dtype,
                options.group_of,
            ),
            deferred,
            options.tied,
        )
        indices, seeds = list(pieces), self._seeds
        seed = None if seeds is None else lambda place, j: seeds.set(indices[place], j)
        how = ChunkOptions(
            options.recompute,
            options.recomputed[stage] if options.recomputed else None,
            options.compile,
            seed,
            options.random,
            torch.bfloat16 if options.precision == "bf16" else None,
        )
        return Chunk(shards, store, deferrable, arriving, leaving, how)

    def _settle(self) -> None:
        for flat in self.flats:
            flat.settle()

    def _gather_updated(self) -> None:
        for chunk in self.chunks.values():
            chunk.shards.gather_updated()

    def _whole(
        self, flat: FlatParameters, mine: Tensor, dtype: torch.dtype, *, every_name: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        for slot, tensor in flat.views(flat.whole(mine)):
            once = () if flat is self._tied.copy else slot.names[:1]
            whole = tensor.to(dtype, copy=True).cpu()
            for piece, name in slot.names if every_name else once:
                yield f"{piece}.{name}", whole

    def _reduce_result(self, losses: Sequence[Tensor]) -> StepResult:
        """Loss and gradient norm, the same on every rank: one all-reduce of three numbers.

        Replicas that hold the same gradients count for one part of their number each. The third
        number says whether any rank has news of its parameters, which then all ranks are told.
        """
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        if losses:
            totals[0] = torch.stack(list(losses)).sum()
        gradients = gradients_of(flat for flat in self.flats if flat is not self._tied.copy)
        copies = 1 if self._layout.replicate_zero else self._layout.replicate
        totals[1] = square_norm(((gradient, copies) for gradient in gradients), self._device)
        totals[2] = self._watch.has_news()
        dist.all_reduce(totals)
        loss, square, news = totals.tolist()
        if news:
            self._watch.exchange()
        return StepResult(loss, math.sqrt(square))
