"""The engine of one rank: it runs the rank's program on its chunks, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine import checkpoint
from zeropp.engine.chunk import Chunk, StepSeeds
from zeropp.engine.collectives import Channels, make_groups, neighbours
from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.errors import ErrorBarrier, T, together
from zeropp.engine.flat import FlatParameters, TiedWeights
from zeropp.engine.interpreter import Evaluator, Interpreter, Loss, Microbatches, Passed, RowsError
from zeropp.engine.lanes import make_lanes
from zeropp.engine.optimizer import Updater, square_norm_of
from zeropp.engine.options import Boundary, EngineOptions, MakeOptimizer, Piece
from zeropp.engine.preflight import check_cuda
from zeropp.engine.private_names import default_timeout
from zeropp.engine.sharding import make_flats
from zeropp.engine.values import computing_in_fp32
from zeropp.layout import InfeasibleError, Layout
from zeropp.schedule.program import Op, Schedule
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig

# Elements of a weight. To add a smaller one's gradient inside its product saves less time than
# Python takes for it.
_LEAST_ADDED = 2**18

_claimed: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by identity


def _claim(pieces: Sequence[Piece], undo: ExitStack) -> None:
    """Reserve the parameters of some pieces for one model, until ``undo`` gives them back.

    A model puts its flat buffers in the place of its layers' parameters. If a second model were
    made from the same layers, the first would go on with the second one's buffers and never see
    its own updates. Raises InfeasibleError, and reserves nothing, if another model has one of them.
    """
    wanted: dict[int, nn.Parameter] = {}
    for piece in pieces:
        for name, parameter in piece.module.named_parameters():
            if id(parameter) in _claimed:
                raise InfeasibleError(
                    f"layers[{piece.index}]: {name!r} belongs to another model that parallelize "
                    "has made (close that model first, or give each its own layers)"
                )
            wanted[id(parameter)] = parameter
    _claimed.update(wanted)
    undo.callback(lambda: [_claimed.pop(key, None) for key in wanted])


@dataclass(frozen=True)
class StepTensors:
    """The result of one step, on the device, equal on all ranks: the loss of the global batch, and
    the global L2 norm of the gradient before clipping. Reading them waits for the device."""

    loss: Tensor
    grad_norm: Tensor


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
        loss: Loss,
        boundary: Boundary,
        optimizer: OptimizerConfig | MakeOptimizer,
        device: torch.device,
        options: EngineOptions | None = None,
    ) -> None:
        self._layout, self._device = layout, device
        self._options = options = options or EngineOptions()
        self._pieces = sorted(pieces, key=lambda piece: piece.index)
        self.steps_done = 0
        self.skipped_steps = torch.zeros((), dtype=torch.long, device=device)
        self._unusable = ""  # why this engine has no state to give, or nothing
        self._seen: set[tuple[int, int]] = set()  # ranks, and digests of their batches
        self._passed: dict[int, Passed] = {}  # by the digests of this rank's
        self._seeds: StepSeeds | None = None
        if options.dropout_seed is not None:
            first = layout.dp_index(dist.get_rank()) * schedule.num_microbatches
            self._seeds = StepSeeds(options.dropout_seed, first, device)
        timeout = options.timeout or default_timeout(device)
        with ExitStack() as undo:
            self.barrier = ErrorBarrier(timeout)
            undo.callback(self.barrier.close)
            self._groups = make_groups(layout, device, timeout)
            undo.callback(self._groups.close)
            together(lambda: self._make_own(schedule, boundary, optimizer, undo))
            self._channels = Channels(neighbours(schedule), layout, device, timeout)
            undo.callback(self._channels.close)
            ends = [schedule.stage_rank[stage] for stage in options.tied_stages]
            self._tied = TiedWeights(options.tied, ends, self.flats, layout, timeout)
            undo.callback(self._tied.close)
            self._make_runners(schedule, loss)
            self._undo = undo.pop_all()

    def step(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        keywords: Sequence[Mapping[str, Tensor]] = (),
    ) -> StepTensors:
        """One optimizer step on this rank's microbatches; every rank gives its own. A step whose
        gradients are not finite updates nothing, and ``skipped_steps`` counts it."""
        with self._usable_unless_it_fails():
            self.updater.set_rates(self.steps_done)
            losses = self.accumulate(Microbatches(inputs, targets, keywords))
            flats = [flat for flat in self.flats if flat is not self._tied.copy]
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)
            if losses:
                sums[0] = torch.stack(losses).sum()
            sums[1] = square_norm_of(flats, self._layout, self._device)
            if self._groups.world is not None:
                dist.all_reduce(sums, group=self._groups.world)
            result = StepTensors(sums[0], sums[1].sqrt())
            self.skipped_steps += self.updater.update(result.grad_norm)
            self._gather_updated()
            self.steps_done += 1
        return result

    def agree(self, call: str, make: Callable[[], Microbatches]) -> Microbatches:
        """The batch that ``make`` gives, once every rank has given one to the same ``call``; what
        it raises on one rank reaches all of them.

        Where a training batch has shapes that are new to a rank, all ranks run one microbatch of it
        forward, to learn what passes between their stages, and on CUDA warm their kernels up for
        it. Raises RowsError on every rank if ranks of one pipeline were given different shapes.
        """
        self.check_usable()
        batch, digests = self.barrier.run(call, make, Microbatches.digest)
        if call != "train_step":
            return batch
        mine, given = digests[dist.get_rank()], set(enumerate(digests))
        self._check_pipelines(digests)
        is_new = not self._seen.issuperset(given)  # the same on every rank
        self._seen |= given
        with self._usable_unless_it_fails():
            if is_new:
                self._passed[mine] = self._evaluator.boundaries(batch)
            passed = self._passed[mine]
            for stage, chunk in self.chunks.items():
                chunk.arriving = passed.get(stage)
                chunk.leaving = passed.get(stage + 1)
            if is_new and self._device.type == "cuda":
                self.interpreter.warm_up(batch)
        return batch

    def on_all_ranks(self, call: str, work: Callable[[], T]) -> T:
        """The result of ``work`` once every rank is in the same ``call``; what it raises on one
        rank reaches all of them. Raises RuntimeError where a rank is in another one."""

        def checked() -> T:
            self.check_usable()
            return work()

        if self.barrier.is_closed:
            self.check_usable()
        return self.barrier.run(call, checked, lambda _: 0)[0]

    def evaluate(self, batch: Microbatches) -> float:
        """The loss of a batch without training on it; see ``Evaluator.run``."""
        counts = self._evaluator.agree(batch)
        with self._usable_unless_it_fails():
            return self._evaluator.run(batch, *counts)

    def accumulate(self, batch: Microbatches) -> list[Tensor]:
        """The first half of a step: run the program, so that the tensors that this rank updates
        have their gradients. Returns this rank's parts of the loss of the global batch."""
        for flat in self.flats:
            flat.clear_gradients()
        with self._seeds.drawing(self.steps_done) if self._seeds else nullcontext():
            losses = self.interpreter.run(batch)
        self._tied.sum_gradients()
        return losses

    def full_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of this rank's parameters, named ``{piece}.{name}``. One with
        several names comes once, or with ``every_name`` under each of them. Collective."""
        self.check_usable()
        self._settle()
        for flat in self.flats:
            yield from self._whole(flat, flat.rows, torch.float32, every_name=every_name)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded CPU copies of the last step's gradients, after clipping, named as the
        parameters, until the next step begins. Collective."""
        self.check_usable()
        self._settle()
        for flat in self.flats:
            if (mine := flat.gradient()) is not None:
                yield from self._whole(flat, mine, mine.dtype)

    def full_state(self) -> dict[str, Tensor]:
        """All of ``full_parameters``, under every name, and CPU copies of the buffers."""
        self.on_all_ranks("full_state_dict", lambda: None)
        buffers = ((name, one.cpu()) for name, one in self.buffers().items())
        return dict([*self.full_parameters(every_name=True), *buffers])

    def save(self, directory: Path | str) -> None:
        """Write parameters, optimizer state and the number of steps; any topology can load it."""
        checkpoint.save(self.state("save"), directory)

    def load(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """Read what ``save`` wrote, in this topology or another; ``weights_only``: parameters and
        buffers alone."""
        state = self.state("load")
        checkpoint.load(state, directory, weights_only=weights_only)
        self.take_over(state, optimizer=not weights_only)

    def state(self, call: str = "state_dict") -> checkpoint.State:
        """Parameters, buffers and optimizer state of this rank, for a method that all ranks
        ``call``; tensors share memory with the engine's. Raises RuntimeError after a step that has
        failed."""
        return self.on_all_ranks(call, self._state)

    def take_over(self, state: checkpoint.State, *, optimizer: bool = True) -> None:
        """Continue from a ``state()`` into whose tensors a checkpoint has been read, with what it
        has of the ``optimizer``, or with the optimizer as it is."""
        self.steps_done = int(state.steps_done)
        self.skipped_steps.copy_(state.skipped_steps)
        if optimizer:
            updates = self.steps_done - int(state.skipped_steps)
            self.updater.take_over(state.states, updates)
        checkpoint.set_settings(state, self.updater)
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
        """End the engine's threads and process groups; it cannot be used afterwards. Layers have
        the trained values again where this rank has all of them in their own type."""
        if not self._unusable:
            for flat in self.flats:
                flat.give_back()
        self._unusable = "this model was closed (create a new model, and load a checkpoint)"
        self._undo.close()

    def check_usable(self) -> None:
        """Raise RuntimeError if the engine was closed, or if an earlier step has failed."""
        if self._unusable:
            raise RuntimeError(self._unusable)

    def _check_pipelines(self, digests: Sequence[int]) -> None:
        for ranks in self._layout.pipelines():
            if len({digests[rank] for rank in ranks}) > 1:
                raise RowsError(
                    f"train_step: ranks {list(ranks)}, which are one pipeline, were given inputs "
                    "of different shapes"
                )

    @contextmanager
    def _usable_unless_it_fails(self) -> Iterator[None]:
        """After an error in this context parameters may be partially updated, and other ranks may
        wait for this one, so the engine refuses everything else."""
        self.check_usable()
        try:
            yield
        except BaseException as error:
            self._unusable = (
                f"an earlier step raised {type(error).__name__}: {error}; create a new model and "
                "load a checkpoint"
            )
            raise

    def _make_own(
        self,
        schedule: Schedule,
        boundary: Boundary,
        optimizer: OptimizerConfig | MakeOptimizer,
        undo: ExitStack,
    ) -> None:
        """Make what a rank makes without the others: lanes, chunks and the optimizer."""
        if self._device.type == "cuda":
            check_cuda(self._layout.pp)
        _claim(self._pieces, undo)
        self.lanes = make_lanes(self._device, undo)
        pp = self._layout.coordinates(dist.get_rank())["pp"]
        if self._options.precision == "bf16":
            modules = [module for piece in self._pieces for module in piece.module.modules()]
            wide = [one for one in modules if isinstance(one, self._options.fp32_modules)]
            inner = {part for module in wide for part in module.modules() if part is not module}
            for module in wide:
                hooks = computing_in_fp32(module, torch.bfloat16, nested=module in inner)
                undo.enter_context(hooks)
        splits = any(action.op is Op.BACKWARD_INPUT for action in schedule.programs[pp])
        self.chunks = {
            stage: self._chunk(stage, schedule.num_stages, boundary, splits=splits)
            for stage in schedule.stages_of(pp)
        }
        self.flats: list[FlatParameters] = [f for c in self.chunks.values() for f in c.flats]
        self.updater = Updater.make(
            self.flats, optimizer, self._device, self._options.lr_schedule, self._options.groups
        )

    def _chunk(self, stage: int, num_stages: int, boundary: Boundary, *, splits: bool) -> Chunk:
        """The chunk of one stage; ``splits``: backwards delay weight gradients."""
        options, layout, seeds = self._options, self._layout, self._seeds
        pieces = {piece.index: piece for piece in self._pieces if piece.stage == stage}
        blocks = [piece for piece in pieces.values() if piece.deferrable]
        # The first blocks may be recomputed. Half blocks never are, so they come last.
        deferrable = [piece.module for piece in sorted(blocks, key=lambda piece: piece.half)]
        store = WeightGradStore()
        # A store that is never open takes weight gradients at once, inside their product.
        least = 0 if splits else _LEAST_ADDED
        deferred = defer_weight_grads(deferrable, store, least=least, warn=splits)
        others = (piece.module for piece in pieces.values() if not piece.deferrable)
        defer_weight_grads(others, WeightGradStore(), least=_LEAST_ADDED)
        flats = make_flats(
            {index: piece.module for index, piece in pieces.items()},
            deferred if splits else (),
            groups=self._groups,
            lanes=self.lanes,
            options=options,
            zero=layout.replicate_zero == 1,
            keeps_sums=layout.world == 1 and len({one.stage for one in self._pieces}) == 1,
        )
        indices = list(pieces)
        seed = None if seeds is None else lambda place, j: seeds.set(indices[place], j)
        return Chunk(
            [piece.module for piece in pieces.values()],
            list(flats),
            self.lanes,
            store,
            blocks=deferrable,
            arriving=boundary(stage) if stage > 0 else None,
            leaving=boundary(stage + 1) if stage + 1 < num_stages else None,
            options=options.of_chunk(stage, seed),
        )

    def _make_runners(self, schedule: Schedule, loss: Loss) -> None:
        """Make the interpreter and the evaluator, which run the chunks."""
        layout, reduction = self._layout, self._options.loss_reduction
        everywhere = schedule.num_microbatches * layout.dp
        self.interpreter = Interpreter(
            schedule,
            self.chunks,
            channels=self._channels,
            loss=loss,
            loss_count=everywhere if reduction == "mean" else 1,
        )
        self._evaluator = Evaluator(
            schedule,
            layout,
            chunks=self.chunks,
            channels=self._channels,
            loss=loss,
            reduction=reduction,
            barrier=self.barrier,
            world=self._groups.world,
        )

    def _settle(self) -> None:
        for flat in self.flats:
            flat.settle()

    def _state(self) -> checkpoint.State:
        self._settle()
        return checkpoint.state_of(
            self.flats,
            self.updater,
            steps_done=self.steps_done,
            skipped_steps=int(self.skipped_steps),
            buffers=self.buffers(),
        )

    def _gather_updated(self) -> None:
        for flat in self.flats:
            flat.gather_updated()

    def _whole(
        self, flat: FlatParameters, mine: Tensor, dtype: torch.dtype, *, every_name: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        for slot, whole in flat.copies(mine, dtype):
            once = () if flat is self._tied.copy else slot.names[:1]
            for piece, name in slot.names if every_name else once:
                yield f"{piece}.{name}", whole
