"""The engine of one rank: it runs the rank's program on its chunks, and the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine import checkpoint
from zeropp.engine.chunk import Chunk, StepSeeds
from zeropp.engine.collectives import Channels, DataGroups, make_groups, make_meeting, neighbours
from zeropp.engine.deferred import Uses, WeightGradStore, defer_weight_grads
from zeropp.engine.errors import together
from zeropp.engine.flat import FlatParameters
from zeropp.engine.interpreter import Evaluator, Interpreter, Loss, LossFunction, Microbatches
from zeropp.engine.lanes import Lanes, make_lanes
from zeropp.engine.optimizer import TORN, make_updater, square_norm_of
from zeropp.engine.options import Boundary, EngineOptions, MakeOptimizer, Piece
from zeropp.engine.sharding import ChunkShards, ShardOptions, TiedWeights, check_unwritten, settle
from zeropp.engine.values import TensorShape
from zeropp.engine.watch import ParameterWatch
from zeropp.layout import InfeasibleError, Layout
from zeropp.schedule.program import Schedule
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig, StepResult

# A parameter is trained by one model at a time.
#
# A model puts its flat buffers in the place of its layers' parameters. If a second model were made
# from the same layers, the first would go on with the second one's buffers and never see its own
# updates.


_claimed: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by identity


class Claim:
    """Reserves parameters for one model, from ``take`` until ``end``."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def take(self, pieces: Sequence[Piece]) -> None:
        """Reserve the parameters of some pieces; raises InfeasibleError, and reserves none, if
        another model that was not closed has one of them."""
        wanted: list[nn.Parameter] = []
        for piece in pieces:
            for name, parameter in piece.module.named_parameters():
                if id(parameter) in _claimed:
                    raise InfeasibleError(
                        f"layers[{piece.index}]: {name!r} belongs to another model that "
                        "parallelize has made (close that model first, or give each its own layers)"
                    )
                wanted.append(parameter)
        self._parameters = wanted
        _claimed.update({id(parameter): parameter for parameter in wanted})

    def end(self) -> None:
        """Let other models have the parameters."""
        for parameter in self._parameters:
            _claimed.pop(id(parameter), None)
        self._parameters.clear()


# Makes the chunks of one rank out of its pieces.


@dataclass(frozen=True, kw_only=True)
class ChunkMaker:
    """What all chunks of one rank share.

    ``pieces`` are in the order of the model. ``seeds``: what random numbers are drawn from; None
    where nothing is seeded. ``uses`` collects which parameters a step has used.
    """

    pieces: Sequence[Piece]
    layout: Layout
    options: EngineOptions
    groups: DataGroups
    lanes: Lanes
    seeds: StepSeeds | None
    uses: Uses

    def chunks(self, schedule: Schedule, boundary: Boundary) -> dict[int, Chunk]:
        """The chunks of this rank by stage. ``boundary(stage)`` gives the shapes of the tensors
        that one microbatch sends into a stage."""
        stages = schedule.stages_of(self.layout.coordinates(dist.get_rank())["pp"])
        between = {
            stage: boundary(stage) if 0 < stage < schedule.num_stages else None
            for each in stages
            for stage in (each, each + 1)
        }
        return {s: self._chunk(s, between[s], between[s + 1]) for s in stages}

    def _chunk(
        self,
        stage: int,
        arriving: Sequence[TensorShape] | None,
        leaving: Sequence[TensorShape] | None,
    ) -> Chunk:
        options = self.options
        pieces = {piece.index: piece for piece in self.pieces if piece.stage == stage}
        blocks = [piece for piece in pieces.values() if piece.deferrable]
        # The first blocks may be recomputed. Half blocks never are, so they come last.
        deferrable = [piece.module for piece in sorted(blocks, key=lambda piece: piece.half)]
        others = [piece.module for piece in pieces.values() if not piece.deferrable]
        store = WeightGradStore(self.uses)
        deferred = defer_weight_grads(deferrable, store, warn=True)
        # This store is never open, so it takes weight gradients at once, inside their product.
        defer_weight_grads(others, WeightGradStore(self.uses))
        shards = ChunkShards(
            {index: piece.module for index, piece in pieces.items()},
            groups=self.groups,
            lanes=self.lanes,
            options=self._shard_options(),
            deferred=deferred,
            tied=options.tied,
        )
        indices, seeds = list(pieces), self.seeds
        seed = None if seeds is None else lambda place, j: seeds.set(indices[place], j)
        how = options.of_chunk(stage, seed)
        return Chunk(
            shards, store, blocks=deferrable, arriving=arriving, leaving=leaving, options=how
        )

    def _shard_options(self) -> ShardOptions:
        return ShardOptions(
            precision=self.options.precision,
            zero=self.layout.replicate_zero == 1,
            reduce_dtype=self.options.reduce_dtype,
            group_of=self.options.group_of,
            keeps_sums=self.layout.world == 1 and len({one.stage for one in self.pieces}) == 1,
        )


class Engine:
    """Trains the pieces of one rank. All ranks must construct it, and call its methods, together.

    ``schedule`` is a lowered schedule. ``boundary(stage)`` gives the shapes of the tensors that one
    microbatch sends into a stage. ``optimizer`` is a configuration, or a function that makes an
    optimizer from flat tensors by optimizer group (``EngineOptions.group_of``); if this rank has no
    parameters of a group, the group has one empty tensor. The optimizer must work element by
    element, because each rank updates a part of the flat tensors.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        schedule: Schedule,
        layout: Layout,
        *,
        loss_function: LossFunction,
        boundary: Boundary,
        optimizer: OptimizerConfig | MakeOptimizer,
        device: torch.device,
        options: EngineOptions | None = None,
    ) -> None:
        self._layout, self._device = layout, device
        self._options = options = options or EngineOptions()
        self.steps_done = 0
        self._unusable = ""  # why this engine has no state to give, or nothing
        self._seeds: StepSeeds | None = None
        if options.dropout_seed is not None:
            first = layout.dp_index(dist.get_rank()) * schedule.num_microbatches
            self._seeds = StepSeeds(options.dropout_seed, first, device)
        with ExitStack() as undo:
            self._make_chunks(pieces, schedule, boundary, undo)
            self._make_runners(schedule, Loss(loss_function))
            self._make_updates(schedule, optimizer, undo)
            self._owned = undo.pop_all()

    def _make_chunks(
        self, pieces: Sequence[Piece], schedule: Schedule, boundary: Boundary, undo: ExitStack
    ) -> None:
        """Make process groups, lanes, chunks and channels; ``undo`` collects how to close them.
        After work that a rank does on its own, all ranks learn whether it failed on any."""
        layout, device, timeout = self._layout, self._device, self._options.timeout
        self._pieces = sorted(pieces, key=lambda piece: piece.index)
        claim = Claim()
        undo.callback(claim.end)  # registered first, because ``together`` also raises for a peer
        together(lambda: claim.take(self._pieces))
        self._groups = make_groups(layout, device, timeout)
        undo.callback(self._groups.close)
        self.lanes = together(lambda: make_lanes(device, undo))
        self.meeting = make_meeting(device, timeout, self._give_up)
        undo.callback(self.meeting.close)
        self._uses = Uses()
        maker = ChunkMaker(
            pieces=self._pieces,
            layout=layout,
            options=self._options,
            groups=self._groups,
            lanes=self.lanes,
            seeds=self._seeds,
            uses=self._uses,
        )
        self.chunks = together(lambda: maker.chunks(schedule, boundary))
        self._channels = Channels(neighbours(schedule), layout, device, timeout)
        undo.callback(self._channels.close)

    def _make_runners(self, schedule: Schedule, loss: Loss) -> None:
        """Make the interpreter and the evaluator, which run the chunks."""
        layout, reduction = self._layout, self._options.loss_reduction
        everywhere = schedule.num_microbatches * layout.dp
        self.interpreter = Interpreter(
            schedule,
            self.chunks,
            channels=self._channels,
            loss=loss,
            replicate_every=self._options.replicate_every,
            loss_count=everywhere if reduction == "mean" else 1,
            uses=self._uses,
        )
        self._evaluator = Evaluator(
            schedule,
            layout,
            chunks=self.chunks,
            channels=self._channels,
            loss=loss,
            reduction=reduction,
            meeting=self.meeting,
        )

    def _make_updates(
        self, schedule: Schedule, optimizer: OptimizerConfig | MakeOptimizer, undo: ExitStack
    ) -> None:
        """Make the optimizer, the watch over its parameters and the tie between two copies."""
        layout, device, options = self._layout, self._device, self._options
        shards = [chunk.shards for chunk in self.chunks.values()]
        self.flats = [flat for chunk in shards for flat in chunk.flats]
        self._watch = ParameterWatch(
            self.flats, self._uses, layout, tied=options.tied, pieces=self._pieces
        )
        undo.callback(self._watch.close)
        self._tied = TiedWeights(
            options.tied, shards, schedule=schedule, layout=layout, timeout=options.timeout
        )
        undo.callback(self._tied.close)
        self.updater = together(
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
        with self.meeting.left_by_interrupts():
            sums = self.meeting.sum(lambda: self._first_half(batch), 2 + self._watch.size)
            loss, square, *reports = sums.tolist()
            self._watch.leave_out_unused(reports, self.updater)
            self.updater.clip(norm := math.sqrt(square))
            self.update()
        return StepResult(loss, norm)

    def evaluate(self, batch: Microbatches) -> float:
        """The loss of a batch without training on it; see ``Evaluator.run``."""
        return self._evaluator.run(batch)

    def accumulate(self, batch: Microbatches) -> list[Tensor]:
        """The first half of a step: run the program, so that the tensors that this rank updates
        have their gradients. Returns this rank's parts of the loss of the global batch."""
        self._uses.begin_step()
        for flat in self.flats:
            flat.clear_gradients()
        with self._seeds.drawing(self.steps_done) if self._seeds else nullcontext():
            losses = self.interpreter.run(batch)
        self._tied.sum_gradients()
        return losses

    def update(self) -> None:
        """The second half of a step: the optimizer's step, and, where it succeeded, the start of
        the gathers of updated rows. ``Meeting.update`` says when all ranks learn of a failure."""
        self._unusable = TORN  # until the optimizer has succeeded
        self.meeting.update(self.optimizer.step)
        self._unusable = ""
        self._gather_updated()
        self.steps_done += 1

    def full_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of this rank's parameters, named ``{piece}.{name}``. One with
        several names comes once, or with ``every_name`` under each of them."""
        self._check_whole()
        self.meeting.check()
        settle(self.flats)
        for flat in self.flats:
            yield from self._whole(flat, flat.rows, torch.float32, every_name=every_name)

    def full_state(self) -> dict[str, Tensor]:
        """All of ``full_parameters``, under every name, and CPU copies of the buffers."""
        self._check_whole()
        buffers = ((name, one.cpu()) for name, one in self.buffers().items())
        return self.meeting.run(lambda: dict([*self.full_parameters(every_name=True), *buffers]))

    def save(self, directory: Path | str) -> None:
        """Write parameters, optimizer state and the number of steps; any topology can load it."""
        checkpoint.save(self.state(), directory)

    def load(self, directory: Path | str) -> None:
        """Read what ``save`` wrote, in this topology or another."""
        state = self.state()
        checkpoint.load(state, directory)
        self.take_over(state)

    def state(self) -> checkpoint.State:
        """Parameters, buffers and optimizer state of this rank; tensors share memory with the
        engine's. Raises RuntimeError after an error of the optimizer."""
        return together(self._state)

    def take_over(self, state: checkpoint.State) -> None:
        """Continue from a ``state()`` into whose tensors a checkpoint has been read."""
        self.steps_done = int(state.steps_done)
        checkpoint.go_on_from(state, self.updater)
        self._gather_updated()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of what this rank updates."""
        return self.updater.optimizer

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
        """End the engine's threads and process groups; it cannot be used afterwards."""
        self._unusable = "this model was closed (build it anew, and load a checkpoint)"
        self._owned.close()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the engine was closed, or if since it was made a parameter was
        written to, replaced or added."""
        self._check_whole()
        self._watch.check_same()
        check_unwritten(self.flats)

    def _check_whole(self) -> None:
        if self._unusable:
            raise RuntimeError(self._unusable)

    def _state(self) -> checkpoint.State:
        self._check_whole()
        settle(self.flats)
        return checkpoint.state_of(self.flats, self.updater, self.steps_done, self.buffers())

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
        self.updater.set_rates(self.steps_done)
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
        for flat in self.flats:  # what a save reads is this rank's own
            flat.updated = None
