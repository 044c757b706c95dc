"""The engine of one rank: chunks, messages, program and optimizer, one ``step`` at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine import checkpoint
from zeropp.engine.channels import Channels, neighbours
from zeropp.engine.chunk import Chunk
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.evaluation import Evaluator
from zeropp.engine.flat import FlatParameters, settle
from zeropp.engine.groups import make_groups, make_meeting
from zeropp.engine.interpreter import Interpreter, Loss, LossFunction, Microbatches
from zeropp.engine.options import Boundary, EngineOptions, MakeOptimizer, Piece
from zeropp.engine.randomness import StepSeeds
from zeropp.engine.rank_lanes import make_lanes
from zeropp.engine.sharding import ChunkShards, ShardOptions
from zeropp.engine.tied import TiedWeights
from zeropp.engine.together import together
from zeropp.engine.updates import make_updater, square_norm_of
from zeropp.engine.uses import Uses
from zeropp.engine.values import TensorShape
from zeropp.engine.watch import ParameterWatch
from zeropp.layout import Layout
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
        self.steps_done, self._has_updated = 0, False
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
        self.lanes = together(lambda: make_lanes(device))
        undo.callback(self.lanes.close)
        self._meeting = make_meeting(device, options.timeout, self._give_up)
        undo.callback(self._meeting.close)
        self._uses = Uses()
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
            self._uses,
        )
        self._evaluator = Evaluator(
            schedule, layout, self.chunks, self._channels, loss, reduction, self._meeting
        )
        shards = [chunk.shards for chunk in self.chunks.values()]
        self.flats = [flat for chunk in shards for flat in chunk.flats]
        self._watch = ParameterWatch(self.flats, self._uses, layout, options.tied)
        undo.callback(self._watch.close)
        self._tied = TiedWeights(options.tied, shards, schedule, layout, options.timeout)
        undo.callback(self._tied.close)
        self._updater = together(
            lambda: make_updater(self.flats, optimizer, device, options.lr_schedule)
        )

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        keywords: Sequence[Mapping[str, Tensor]] = (),
    ) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank gives its own."""
        batch = Microbatches(inputs, targets, keywords)
        sums = self._meeting.sum(lambda: self._first_half(batch), 2 + self._watch.size)
        loss, square, *reports = sums.tolist()
        self._watch.leave_out_unused(reports, self._updater)
        self._updater.clip(norm := math.sqrt(square))
        if self._has_updated:
            self.update()
        else:  # the optimizer makes its state, for which a rank may have no memory
            together(self.update)
        return StepResult(loss, norm)

    def evaluate(self, batch: Microbatches) -> float:
        """The loss of a batch without training on it; see ``Evaluator.run``."""
        return self._evaluator.run(batch)

    def accumulate(self, batch: Microbatches) -> list[Tensor]:
        """The first half of a step: run the program, so that what this rank updates has its
        gradients. Gives this rank's parts of the loss of the global batch."""
        self._uses.begin_step()
        for flat in self.flats:
            flat.clear_gradients()
        with self._seeds.drawing(self.steps_done) if self._seeds else nullcontext():
            losses = self.interpreter.run(batch)
        self._tied.sum_gradients()
        return losses

    def update(self) -> None:
        """The second half: the optimizer's step, and updated rows on their way to all replicas."""
        self.optimizer.step()
        self._gather_updated()
        self.steps_done += 1
        self._has_updated = True

    def full_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies, named ``{piece}.{name}``; a parameter that has several names
        in the model comes once, or under each of them with ``every_name``."""
        self._meeting.check()
        settle(self.flats)
        for flat in self.flats:
            yield from self._whole(flat, flat.rows, torch.float32, every_name=every_name)

    def full_state(self) -> dict[str, Tensor]:
        """All of ``full_parameters``, under every name, and CPU copies of the buffers."""
        buffers = ((name, one.cpu()) for name, one in self.buffers().items())
        return self._meeting.run(lambda: dict([*self.full_parameters(every_name=True), *buffers]))

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded CPU copies of the last step's gradients, named ``{piece}.{name}``."""
        settle(self.flats)
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
        return together(self._state)

    def take_over(self, state: checkpoint.State) -> None:
        """Go on from what has been written into the tensors of ``state()``."""
        self.steps_done = int(state.steps_done)
        checkpoint.go_on_from(state, self._updater)
        self._gather_updated()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of what this rank updates."""
        return self._updater.optimizer

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
        store = WeightGradStore(self._uses)
        deferred = defer_weight_grads(deferrable, store, warn=True)
        # A store that is never open: at once, inside the product.
        defer_weight_grads(others, WeightGradStore(self._uses))
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
        how = options.of_chunk(stage, seed)
        return Chunk(shards, store, deferrable, arriving, leaving, how)

    def _state(self) -> checkpoint.State:
        settle(self.flats)
        return checkpoint.state_of(self.flats, self._updater, self.steps_done, self.buffers())

    def _gather_updated(self) -> None:
        for chunk in self.chunks.values():
            chunk.shards.gather_updated()

    def _whole(
        self, flat: FlatParameters, mine: Tensor, dtype: torch.dtype, *, every_name: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        for slot, whole in flat.copies(mine, dtype):
            once = () if flat is self._tied.copy else slot.names[:1]
            for piece, name in slot.names if every_name else once:
                yield f"{piece}.{name}", whole

    def _first_half(self, batch: Microbatches) -> Tensor:
        """``accumulate``; gives this rank's part of the loss and of the squared gradient norm, and
        what it reports of its parameters."""
        self._updater.set_rates(self.steps_done)
        losses = self.accumulate(batch)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        if losses:
            loss += torch.stack(losses).sum()
        flats = [flat for flat in self.flats if flat is not self._tied.copy]
        square = square_norm_of(flats, self._layout, self._device)
        return torch.cat([torch.stack([loss, square]), self._watch.report().to(self._device)])

    def _give_up(self) -> None:
        """End the waiting of peers for messages and collectives of this rank."""
        self.lanes.abandon()
        self._groups.close()
        self._channels.close()
        self._tied.close()
