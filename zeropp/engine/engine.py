"""The engine of one rank: it runs the rank's program on its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.evaluator import Evaluator, Outputs, Passed
from zeropp.engine.interpreter import Interpreter
from zeropp.engine.layers.chunk import Chunk, seed_piece
from zeropp.engine.layers.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.layers.values import POSITIONS, TensorShape, Value
from zeropp.engine.loss import Loss, Microbatches
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.parameters.parts import GradientParts, GradientRoom
from zeropp.engine.private_names import default_timeout
from zeropp.engine.ranks.collectives import Channels, make_groups, neighbours
from zeropp.engine.ranks.cuda_settings import check_cuda
from zeropp.engine.ranks.errors import ErrorBarrier, T, agree, lost_ranks
from zeropp.engine.ranks.given_rows import GivenRows, RowsError
from zeropp.engine.ranks.lanes import make_lanes
from zeropp.engine.settings import Settings
from zeropp.engine.sharding import make_flats
from zeropp.engine.sliced_head import SlicedHead
from zeropp.engine.update.optimizer import ParameterUpdate, Updater
from zeropp.engine.walk import LayerSizes
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Op
from zeropp.types.layout import InfeasibleError
from zeropp.types.training import StepResult

if TYPE_CHECKING:
    from zeropp.engine.layers.context import Context
    from zeropp.engine.layers.offload import HostMemory

_CLOSED = "this model was closed (create a new model, and load a checkpoint)"
Batches = tuple[tuple[int, int], ...]  # (steps, rows of each)
_claimed: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by identity


class Engine:
    """Trains this rank's layers of a plan. All ranks must construct it, and call its methods,
    together.

    ``layers`` are modules by their index in the model, and ``sizes`` those of all layers of the
    model. What the plan decides is read from it, and from the settings what it does not: the
    optimizer and its groups, tied parameters, number types of modules, random numbers, timeout. If
    this rank has no parameters of an optimizer group, the group has one empty tensor.
    """

    _earlier: Batches = ()  # before those of this batch size, in earlier runs
    context: Context | None = None  # the ranks that divide sequences, if there are several
    _head: SlicedHead | None = None  # what runs the last layer and the loss, if they are in slices
    signal = agreed_signal = 0  # that this rank, and that any rank, has been sent
    elements = 0  # of the inputs of the last batch, over all data-parallel ranks
    # Of the last evaluation: the rows and the microbatches of every rank.
    _counts: tuple[Sequence[int], Sequence[int]]

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        sizes: Sequence[LayerSizes],
        plan: Plan,
        settings: Settings,
        *,
        loss: Loss,
        device: torch.device,
    ) -> None:
        layout, schedule, divisor = plan.layout, plan.schedule, _divisor(plan, settings)
        self._layout, self._device = layout, device
        self.loss, self.layers, self.sizes = loss, dict(sorted(layers.items())), sizes
        self.steps_done, self._global_batch = 0, plan.global_batch
        self._compare_every = settings.compare_replicas
        self.skipped_steps = torch.zeros((), dtype=torch.long, device=device)
        self.unusable = ""  # why: it was closed, or a step has failed; refusals leave it as it was
        self._seen: set[tuple[int, int]] = set()  # ranks, and digests of their batches
        self._passed: dict[int, Passed] = {}  # by the digests of this rank's
        self._rows = GivenRows(("inputs", "targets", *settings.sample_keywords), layout, device)
        self._draws = settings.dropout_seed is not None
        timeout = settings.timeout or default_timeout(device)
        with ExitStack() as undo:
            self.barrier = ErrorBarrier(timeout, 7 + self._rows.count, undo)
            self._groups = make_groups(
                layout, device, timeout, undo, owners=plan.step_end.gathers_whole
            )
            agree(lambda: self._make_own(sizes, plan, settings, undo))
            self._channels = Channels(neighbours(schedule), layout, device, timeout, undo)
            tied = None
            if settings.tied is not None:
                from zeropp.engine.parameters.tied import TiedWeights

                tied = TiedWeights(settings.tied, plan, self.flats, timeout, undo)
            self._copy = tied and tied.copy
            self.update = ParameterUpdate(
                self.flats,
                layout,
                self.lanes,
                tied,
                self.updater,
                self._groups.world,
                self.skipped_steps,
                divisor if loss.reduction == "tokens" else None,
            )
            self.interpreter = Interpreter(
                schedule,
                self.chunks,
                channels=self._channels,
                loss=loss,
                head=self._head,
                divisor=divisor,
                update=self.update,
                merged=plan.merged_microbatches,
            )
            self._evaluator = Evaluator(
                schedule,
                layout,
                chunks=self.chunks,
                channels=self._channels,
                loss=loss,
                head=self._head,
                world=self._groups.world,
                context=self.context,
            )
            self._undo = undo.pop_all()

    def step(self, batch: Microbatches) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank gives its own. A step whose
        gradients are not finite updates nothing, and ``skipped_steps`` counts it."""
        with self._usable_unless_it_fails():
            self.updater.set_rates(self.steps_done)
            for flat in self.flats:
                flat.clear_gradients()
            devices = [self._device] if self._device.type == "cuda" else []
            # So that what else a rank draws (a batch, for example) does not depend on its stages.
            drawing = torch.random.fork_rng(devices) if self._draws else nullcontext()
            result = self.interpreter.run(batch, drawing)
            self.steps_done += 1
            if self._compare_every and self.steps_done % self._compare_every == 0:
                self.settle()
                self.update.compare_replicas(self.barrier, self.steps_done)
        return result

    @property
    def batches(self) -> Batches:
        """How many steps were done with how many rows each, in their order."""
        own = self.steps_done - sum(steps for steps, _ in self._earlier)
        return *self._earlier, (own, self._global_batch)

    @batches.setter
    def batches(self, done: Batches) -> None:
        self._earlier = done[:-1] if done[-1][1] == self._global_batch else done

    def agree(self, call: str, make: Callable[[], Microbatches]) -> Microbatches:
        """The batch that ``make`` gives, once every rank has given one to the same ``call``; what
        it raises on one rank reaches all of them.

        Where a training batch has shapes that are new to a rank, all ranks run one microbatch of it
        forward, to learn what passes between their stages, and on CUDA warm their kernels up for
        it. Raises RowsError on every rank if ranks of one pipeline were given different shapes or
        rows, which ``GivenRows`` compares, or all data-parallel ranks the same rows, and ValueError
        if the settings of the optimizer differ between ranks, as a learning rate does that one rank
        alone has changed.
        """
        self.check_usable()
        asked = self.signal
        batch, numbers = self.barrier.run(
            call,
            make,
            lambda batch: [
                batch.digest(),
                crc32(self.updater.described().encode()),
                asked,
                any(flat.is_stale for flat in self.flats),
                sum(part.numel() for part in batch.inputs),
                sum(map(len, batch.inputs)),
                len(batch.inputs),
                *self._rows.numbers(call, batch.whole),
            ],
        )
        digests, settings, signals, stale, elements, rows, microbatches, *sums = zip(
            *numbers, strict=True
        )
        self.agreed_signal = max(signals)
        self.elements = sum(elements) // self._layout.pp
        if call == "train_step":
            if others := [r for r, own in enumerate(settings) if own != settings[0]]:
                raise ValueError(
                    f"train_step: the optimizer of ranks {others} has other settings than that of "
                    f"rank 0 (a learning rate, for example; here {self.updater.described()}): set "
                    "model.optimizer.param_groups alike on all ranks"
                )
            for ranks in self._layout.alike:
                if len({digests[rank] for rank in ranks}) > 1:
                    raise RowsError(
                        f"train_step: ranks {list(ranks)}, which are one pipeline, were given "
                        "inputs of different shapes"
                    )
        self._rows.check(call, [*zip(*sums, strict=True)])
        if any(stale):
            self.update.gather_updated()
        if call != "train_step":
            if not any(rows):
                raise RowsError("inputs: no rank was given any rows")
            self._counts = rows, microbatches
            return batch
        self._rows.begin(batch.whole)
        digest, given = digests[dist.get_rank()], set(enumerate(digests))
        is_new = not self._seen.issuperset(given)  # the same on every rank
        if is_new:
            self._rows.check_apart(batch.whole, self.barrier)
        self._seen |= given
        with self._usable_unless_it_fails():
            if is_new:
                self._passed[digest] = self._evaluator.boundaries(batch)
            passed = self._passed[digest]
            for stage, chunk in self.chunks.items():
                chunk.arriving = passed.get(stage)
                chunk.leaving = passed.get(stage + 1)
            if is_new and self._device.type == "cuda":
                self._evaluator.warm_up(batch)
        return batch

    def on_all_ranks(self, call: str, work: Callable[[], T]) -> T:
        """The result of ``work`` once every rank is in the same ``call``; what it raises on one
        rank reaches all of them. Raises RuntimeError where a rank is in another one."""

        def checked() -> T:
            self.check_usable()
            return work()

        if self.unusable == _CLOSED:
            self.check_usable()
        return self.barrier.run(call, checked)[0]

    def evaluate(self, batch: Microbatches, outputs: Outputs | None = None) -> tuple[float, Value]:
        """The loss of a batch, on which all have just agreed, without training on it, and its
        outputs; see ``Evaluator.run``."""
        with self._usable_unless_it_fails():
            return self._evaluator.run(batch, *self._counts, outputs)

    def full_parameters(self, *, every_name: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of this rank's parameters, named ``{piece}.{name}``. One with
        several names comes once, or with ``every_name`` under each of them. Collective."""
        self.check_usable()
        self.settle()
        for flat in self.flats:
            yield from self._whole(flat, flat.rows, torch.float32, every_name=every_name)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded CPU copies of the last step's gradients, after clipping, named as the
        parameters, until the next step begins. Collective."""
        self.check_usable()
        self.settle()
        for flat in self.flats:
            if (gradient := flat.gradient()) is not None:
                yield from self._whole(flat, gradient, gradient.dtype)

    def full_state(self) -> dict[str, Tensor]:
        """All of ``full_parameters``, under every name, and CPU copies of the buffers."""
        self.on_all_ranks("full_state_dict", lambda: None)
        buffers = ((name, one.cpu()) for name, one in self.buffers().items())
        return dict([*self.full_parameters(every_name=True), *buffers])

    def buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers, named ``{piece}.{name}``."""
        return {
            f"{index}.{name}": buffer
            for index, layer in self.layers.items()
            for saved in [layer.state_dict(keep_vars=True)]
            for name, buffer in layer.named_buffers(remove_duplicate=False)
            if name in saved
        }

    def settle(self) -> None:
        """Let compute wait until the parameters are those of the last update."""
        for flat in self.flats:
            flat.settle()

    def close(self) -> None:
        """End the engine's threads and process groups; it cannot be used afterwards. Layers have
        the trained values again where this rank has all of them in their own type."""
        if not self.unusable:
            for flat in self.flats:
                flat.give_back()
        self.unusable = _CLOSED
        self._undo.close()

    def check_usable(self) -> None:
        """Raise RuntimeError if the engine was closed, or if an earlier step has failed."""
        if self.unusable:
            raise RuntimeError(self.unusable)

    @contextmanager
    def _usable_unless_it_fails(self) -> Iterator[None]:
        """After an error inside the engine refuses all else: peers may wait for it."""
        self.check_usable()
        try:
            with lost_ranks():
                yield
        except BaseException as error:
            self.unusable = (
                f"an earlier step raised {type(error).__name__}: {error}; create a new model and "
                "load a checkpoint"
            )
            raise

    def _make_own(
        self, sizes: Sequence[LayerSizes], plan: Plan, settings: Settings, undo: ExitStack
    ) -> tuple[None, dict[str, str]]:
        """Make lanes, chunks and the optimizer, whose settings must be equal on all ranks."""
        if self._device.type == "cuda":
            check_cuda(self._layout.pp)
        # A second model of the same layers would put its buffers into the place of the first one's,
        # which would never see its own updates.
        wanted: dict[int, nn.Parameter] = {}
        for index, layer in self.layers.items():
            for name, parameter in layer.named_parameters():
                if id(parameter) in _claimed:
                    raise InfeasibleError(
                        f"layers[{index}]: {name!r} belongs to another model that parallelize "
                        "has made (close that model first, or give each its own layers)"
                    )
                wanted[id(parameter)] = parameter
        _claimed.update(wanted)
        undo.callback(lambda: [_claimed.pop(key, None) for key in wanted])
        self.lanes = make_lanes(self._device, undo)
        host = None
        if plan.offloaded_stages:
            from zeropp.engine.layers.offload import HostMemory

            host = HostMemory(self._device, undo)
        pp = self._layout.coordinates(dist.get_rank())["pp"]
        if self._layout.context > 1:
            from zeropp.engine.layers.context import Context

            self.context = Context(
                self._layout.context,
                self._layout.coordinates(dist.get_rank())["context"],
                self._groups.context,
                positions=any(POSITIONS in layer.names for layer in sizes),
                packs=POSITIONS in settings.sample_keywords,
                without_tokens=settings.without_tokens,
            )
        splits = any(action.op is Op.BACKWARD_INPUT for action in plan.schedule.programs[pp])
        room = GradientRoom(self.lanes)
        self.chunks = {
            stage: self._chunk(stage, sizes, plan, settings, host, room=room, splits=splits)
            for stage in plan.schedule.stages_of(pp)
        }
        self.flats: list[FlatParameters] = [f for c in self.chunks.values() for f in c.flats]
        self.updater = Updater.make(
            self.flats,
            settings.optimizer,
            self._device,
            (kind.group for one in sizes for kind in one.kinds.values() if kind.trained),
            whole=plan.whole_groups,
            clip_norm=settings.clipped_to,
            lr_schedule=settings.lr_schedule,
        )
        return None, {"optimizer": self.updater.described()}

    def _chunk(
        self,
        stage: int,
        sizes: Sequence[LayerSizes],
        plan: Plan,
        settings: Settings,
        host: HostMemory | None,
        *,
        room: GradientRoom,
        splits: bool,
    ) -> Chunk:
        """The chunk of one stage; ``splits``: backwards delay weight gradients."""
        layers = {index: self.layers[index] for index in plan.pieces_of(stage)}
        # The first and the last layer of the model are neither delayed nor recomputed.
        ends = {0, len(sizes) - 1}
        blocks = [layer for index, layer in layers.items() if index not in ends]
        for block in blocks if plan.compile else ():
            block.compile()
        store = WeightGradStore()
        # A store that is never open takes weight gradients at once, inside their product.
        delays = splits or plan.gradient_parts > 1
        deferred = defer_weight_grads(blocks, store, delays=delays)
        others = (layer for index, layer in layers.items() if index in ends)
        defer_weight_grads(others, WeightGradStore(), delays=False)
        compute = torch.bfloat16 if plan.precision != "fp32" else None
        made = make_flats(
            layers,
            deferred if delays else (),
            sizes=sizes,
            groups=self._groups,
            lanes=self.lanes,
            plan=plan,
            settings=settings,
        )
        flats = list(made)
        if plan.gradient_parts > 1 and (late := [flat for flat in flats if flat.deferred]):
            store.parts = GradientParts(late[::-1], room)
        sent, offload = blocks[: plan.offloaded_per_stage[stage]], None
        if host is not None and sent:
            from zeropp.engine.layers.offload import Offload

            offload = Offload(host, sent, lambda x: any(flat.is_in_buffer(x) for flat in flats))
        indices = list(layers)
        first = self._layout.dp_index(dist.get_rank()) * plan.num_microbatches

        def seed(place: int, microbatch: int) -> None:
            assert settings.dropout_seed is not None
            seed_piece(settings.dropout_seed, self.steps_done, first + microbatch, indices[place])

        made_of = partial(
            Chunk,
            flats=flats,
            lanes=self.lanes,
            recompute=plan.recompute,
            compute=compute,
            context=self.context,
        )
        if plan.logits_slices > 1 and max(ends) in layers:
            last = layers.pop(max(ends))
            head = made_of([last], store=WeightGradStore(), names=[sizes[-1].names])
            self._head = SlicedHead(head, self.loss, plan.logits_slices, settings.without_tokens)
        return made_of(
            list(layers.values()),
            store=store,
            names=[sizes[index].names for index in layers],
            recomputed=blocks[: plan.recomputed_per_stage[stage]],
            arriving=_passed(sizes, plan.cuts[stage], compute),
            leaving=_passed(sizes, plan.cuts[stage + 1], compute),
            seed=seed if self._draws else None,
            offload=offload,
        )

    def _whole(
        self, flat: FlatParameters, part: Tensor, dtype: torch.dtype, *, every_name: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        for slot, whole in flat.copies(part, dtype):
            once = () if flat is self._copy else slot.names[:1]
            for piece, name in slot.names if every_name else once:
                yield f"{piece}.{name}", whole


def _passed(
    sizes: Sequence[LayerSizes], cut: int, compute: torch.dtype | None
) -> list[TensorShape] | None:
    """What one microbatch sends over a cut, after this many layers; None at an end of the model."""
    if not 0 < cut < len(sizes):
        return None
    return [
        TensorShape(x.size, compute or x.dtype if x.dtype.is_floating_point else x.dtype)
        for x in sizes[cut - 1].outputs
    ]


def _divisor(plan: Plan, settings: Settings) -> int:
    """The number by which the losses of microbatches are divided."""
    means = plan.num_microbatches * plan.layout.dp * plan.layout.context
    # A batch's count of tokens is known only once all of it has run forward: until the update,
    # losses are divided by its rows times their positions, so that gradients stay in range.
    tokens = plan.global_batch * prod(settings.sample.shape[1:2])
    return {"mean": means, "sum": 1, "tokens": tokens}[settings.loss_reduction]
