"""The interpreter: runs one rank's program, with one method per kind of action. It knows nothing of
schedules: the program alone says what comes next, up to the update and what follows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.action_recorder import ActionRecorder
from zeropp.engine.chunk import Chunk, persistent_buffers
from zeropp.engine.collectives import Channels
from zeropp.engine.errors import ErrorBarrier, together
from zeropp.engine.given_rows import RowsError
from zeropp.engine.optimizer import ParameterUpdate
from zeropp.engine.values import TensorShape, Value, chosen, keywords_of, tensors_of
from zeropp.engine.walk import OperationWatch, Owners
from zeropp.schedule.program import Action, Op, Schedule
from zeropp.types.layout import InfeasibleError, Layout
from zeropp.types.literals import LossReduction
from zeropp.types.training import StepResult

# From the output of the last layer, targets and the keyword inputs that it names to a loss, or to
# a sum and a count.
LossFunction = Callable[..., Tensor | tuple[Tensor, Tensor | float]]
Outputs = Callable[[Any], Value]  # of what the model gives for a microbatch
Key = tuple[int, int]  # stage, microbatch
Tensors = Sequence[Tensor]
Passed = dict[int, Sequence[TensorShape]]  # by stage, what one microbatch sends into it
_Message = list[tuple[Tensor, dist.Work]]


@dataclass(frozen=True)
class Microbatches:
    """One rank's part of a batch, cut into microbatches. ``keywords`` are the keyword inputs of
    each microbatch by name; empty if there are none. ``whole``: all of them by name, uncut, to be
    compared with those of other ranks."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    keywords: Sequence[Mapping[str, Tensor]] = ()
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    def keywords_of(self, microbatch: int) -> Mapping[str, Tensor]:
        """The keyword inputs of one microbatch."""
        return self.keywords[microbatch] if self.keywords else {}

    def digest(self) -> int:
        """A number that tells shapes and types of a microbatch's inputs and keyword inputs."""
        parts = {"": self.inputs[0], **self.keywords_of(0)} if self.inputs else {}
        kinds = sorted((name, tuple(part.shape), str(part.dtype)) for name, part in parts.items())
        return crc32(repr(kinds).encode())


class Loss:
    """The user's loss function, which is called with the keyword inputs that it names. In its first
    call it is refused if it reads one of ``owners``, which are parameters of layers: no rank would
    add up that part of the gradient."""

    def __init__(
        self, function: LossFunction, reduction: LossReduction, owners: Owners | None = None
    ) -> None:
        self._function, self.keywords = function, keywords_of(function)
        self.reduction, self._unread = reduction, owners or {}
        self.modules = [function] if isinstance(function, nn.Module) else []
        self._is_compared = False

    def __call__(
        self, output: object, batch: Microbatches, microbatch: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of one microbatch, and its count if the reduction is ``tokens``, both without
        dimensions; raises TypeError if the function gives something else."""
        targets = batch.targets[microbatch]
        keywords = chosen(batch.keywords_of(microbatch), self.keywords)
        watched, self._unread = self._unread, {}
        given = (id(output), id(targets))
        owners = {key: owner for key, owner in watched.items() if key not in given}
        with OperationWatch(owners, "loss_fn") if owners else nullcontext():
            loss: Any = self._function(output, targets, **keywords)
        if self.reduction != "tokens":
            return _number(loss), None
        if not isinstance(loss, tuple | list) or len(loss) != 2:
            raise TypeError(
                f"loss_fn: gives {_kind(loss)}, but (sum, count) of a microbatch is needed with "
                "loss_reduction='tokens'"
            )
        total, count = loss
        if isinstance(count, int | float):  # a kernel fills it in, so that the host does not wait
            count = torch.full((), count, dtype=torch.float64, device=_number(total).device)
        return _number(total), _number(count).detach().double()

    def compare_halves(self, output: Value, batch: Microbatches) -> None:
        """Raise InfeasibleError if the loss of the first microbatch, for which the model gives
        ``output``, is not what its halves make it, so that it would depend on how a batch is cut.

        Only the first call compares, and only where the output has rows; a single row is taken with
        the next microbatch's. Losses that draw random numbers, or take no halves, are not compared.
        """
        whole, outputs = self._values(output, batch), tensors_of(output)
        rows = len(batch.inputs[0])
        is_single = rows == 1 < len(batch.inputs)
        has_rows = (rows > 1 or is_single) and all(x.dim() and len(x) == rows for x in outputs)
        if self._is_compared or not has_rows or not all(map(math.isfinite, whole)):
            return
        self._is_compared = True
        try:
            if is_single:
                output, batch = _two_rows(output, batch)
                rows, whole = 2, self._values(output, batch)
            parts = slice(0, rows // 2), slice(rows // 2, rows)
            again = self._values(output, batch)
            first, second = (self._values(*_rows(part, output, batch)) for part in parts)
        except Exception:  # the loss of a whole microbatch is all that is asked of it
            return
        floats = [x.dtype for x in outputs if x.is_floating_point()]
        tolerance = max([1e-3, *(torch.finfo(dtype).eps ** 0.5 for dtype in floats)])
        share = (rows // 2) / rows if self.reduction == "mean" else 1.0
        other = 1.0 - share if self.reduction == "mean" else 1.0
        for ours, repeated, a, b in zip(whole, again, first, second, strict=True):
            bound = tolerance * max(abs(ours), abs(a), abs(b))
            if abs(ours - repeated) > bound or (is_single and ours == a):  # of the first row alone
                return
            if not abs(ours - (share * a + other * b)) <= bound:  # also where a half is NaN
                raise InfeasibleError(
                    f"loss_fn: is not what loss_reduction={self.reduction!r} says of rows: the "
                    f"first rows give {ours:.6g}, and their halves {a:.6g} and {b:.6g} (where "
                    "tokens are ignored, give (sum, count) with loss_reduction='tokens'; a loss "
                    "between rows would change with the size of microbatches)"
                )

    def _values(self, output: Value, batch: Microbatches) -> list[float]:
        """The loss of the first microbatch and, if there is one, its count; waits for them."""
        return [float(value) for value in self(output, batch, 0) if value is not None]


def _rows(part: slice, output: Value, batch: Microbatches) -> tuple[Value, Microbatches]:
    """Some rows of the first microbatch."""
    outputs = output[part] if isinstance(output, Tensor) else tuple(x[part] for x in output)
    keywords = {name: value[part] for name, value in batch.keywords_of(0).items()}
    return outputs, Microbatches([batch.inputs[0][part]], [batch.targets[0][part]], [keywords])


def _two_rows(output: Value, batch: Microbatches) -> tuple[Value, Microbatches]:
    """The only rows of the first two microbatches as one, both with the first one's output."""
    outputs = tuple(torch.cat([x, x]) for x in tensors_of(output))
    parts = {name: value[:2] for name, value in batch.whole.items()}
    made = Microbatches([parts.pop("inputs")], [parts.pop("targets")], [parts])
    return outputs if isinstance(output, tuple) else outputs[0], made


def _number(value: object) -> Tensor:
    """A tensor of one number, without dimensions; raises TypeError for anything else."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError(
            f"loss_fn: gives {_kind(value)}, but a tensor of one number is needed (the mean over a "
            "microbatch; or with loss_reduction='sum' the sum, with 'tokens' a sum and a count)"
        )
    return value.squeeze()


def _kind(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


@dataclass
class _Step:
    """The tensors of one step while it runs, by (stage, microbatch); ``passes`` is left once its
    forwards and backwards are over."""

    batch: Microbatches
    passes: ExitStack = field(default_factory=ExitStack, init=False)
    # The inputs of forwards, and the gradients of outputs, that are still to be used.
    activations: dict[Key, Tensors] = field(default_factory=dict, init=False)
    gradients: dict[Key, Tensors] = field(default_factory=dict, init=False)
    receiving: dict[tuple[Op, Key], _Message] = field(default_factory=dict, init=False)
    losses: list[Tensor] = field(default_factory=list, init=False)
    counts: list[Tensor] = field(default_factory=list, init=False)
    result: StepResult | None = field(default=None, init=False)


class Interpreter(ActionRecorder):
    """Runs one rank's program over its chunks, which are by stage.

    ``update`` is that of all of them. The loss of every microbatch is divided by ``divisor``, so
    that the sum over microbatches and ranks is the loss of the global batch, or, where the loss
    gives counts, becomes it by the update. Raises ValueError if the rank's program is not that of a
    whole step.
    """

    def __init__(
        self,
        schedule: Schedule,
        chunks: dict[int, Chunk],
        *,
        channels: Channels,
        loss: Loss,
        divisor: int,
        update: ParameterUpdate,
    ) -> None:
        self._chunks = chunks
        self._stage_rank = schedule.stage_rank
        super().__init__(next(schedule.stage_rank[stage] for stage in chunks), channels.device)
        self._program = schedule.programs[self._rank]
        self._last = schedule.num_stages - 1
        self._channels = channels
        self._loss = loss
        self._divisor = divisor
        self._parameters = update
        self.on_action: Callable[[Action], None] | None = None  # called before every action
        self._handlers: dict[Op, Callable[[Action, _Step], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: lambda action, _: chunks[action.stage].backward_weight(
                _key(action)[1]
            ),
            Op.FULL_BACKWARD: self._backward,
            Op.UNSHARD: lambda action, _: chunks[action.stage].unshard(),
            Op.RESHARD: lambda action, _: chunks[action.stage].reshard(),
            Op.REDUCE_GRAD: lambda action, _: chunks[action.stage].reduce(),
            Op.REDUCE_REPLICAS: lambda action, _: chunks[action.stage].reduce_over_replicas(),
            Op.REDUCE_TIED: lambda *_: update.sum_tied(),
            Op.GATHER_WHOLE: self._gather_whole,
            Op.UPDATE: self._update,
            Op.GATHER_UPDATED: lambda *_: update.gather_updated(),
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
        }
        self._actions = [(action, str(action)) for action in self._program]

    def run(
        self, batch: Microbatches, drawing: AbstractContextManager[None] | None = None
    ) -> StepResult:
        """Run the program over one step's microbatches; inside ``drawing`` forwards and backwards
        draw their random numbers."""
        step = _Step(batch)
        with step.passes:
            step.passes.enter_context(shown(self._chunks.values()))
            step.passes.enter_context(drawing or nullcontext())
            self._begin_step()
            for action, name in self._actions:
                if self.on_action is not None:
                    self.on_action(action)
                with self._running(action.op, name):
                    self._handlers[action.op](action, step)
        assert step.result is not None
        return step.result

    def warm_up(self, batch: Microbatches) -> None:
        """Run every chunk forward and backward once; see ``zeropp.engine.warm_up``."""
        from zeropp.engine.warm_up import warm_up

        splits = any(action.op is Op.BACKWARD_INPUT for action in self._program)
        place = self._channels.device, self._last
        warm_up(self._chunks, batch, self._loss, *place, splits=splits)

    def reads(self, keywords: Mapping[str, Tensor]) -> set[str]:
        """What this rank reads of a batch with these keyword inputs: ``inputs`` in the first stage,
        ``targets`` in the last, and the keyword inputs that its layers or, in the last stage, the
        loss function name."""
        ends = {"inputs": 0, "targets": self._last}
        named = [chunk.keywords for chunk in self._chunks.values()]
        if self._last in self._chunks:
            named.append(self._loss.keywords)
        read = {name for name, stage in ends.items() if stage in self._chunks}
        return read.union(*(chosen(keywords, names) for names in named))

    def _forward(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        chunk = self._chunks[stage]
        if stage == 0:
            inputs: Tensors = (step.batch.inputs[microbatch],)
        else:
            inputs = self._arrived(Op.RECV_F, (stage, microbatch), step.activations, step)
        output, loss = chunk.forward(inputs, microbatch, step.batch.keywords_of(microbatch))
        if stage == self._last:
            main, count = self._loss(output, step.batch, microbatch)
            loss = main if loss is None else main + loss
            step.counts += [] if count is None else [count]
            if not loss.requires_grad:
                raise RuntimeError(
                    "train_step: the loss depends on nothing that is trained (is it detached, or "
                    "computed under no_grad?)"
                )
        else:
            step.activations[stage + 1, microbatch] = [x.detach() for x in tensors_of(output)]
        if loss is not None:
            loss = loss / self._divisor
            chunk.set_loss(microbatch, loss, alone=stage == self._last)
            step.losses.append(loss.detach())

    def _backward(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        gradients: Tensors = ()
        if stage != self._last:
            gradients = self._arrived(Op.RECV_B, (stage, microbatch), step.gradients, step)
        split = action.op is Op.BACKWARD_INPUT
        input_gradients = self._chunks[stage].backward(microbatch, gradients, split=split)
        if stage > 0:
            step.gradients[stage - 1, microbatch] = input_gradients

    def _gather_whole(self, action: Action, step: _Step) -> None:
        del action, step
        self._channels.drain()  # so that what was sent is freed
        self._parameters.gather_whole()

    def _update(self, action: Action, step: _Step) -> None:
        del action
        self._channels.drain()  # so that what was sent is freed before the optimizer needs memory
        step.passes.close()
        step.result = self._parameters.update(step.losses, step.counts)

    def _send(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        forward = action.op is Op.SEND_F
        target = stage + 1 if forward else stage - 1
        store = step.activations if forward else step.gradients
        for tensor in store.pop((target, microbatch)):
            self._channels.send(tensor, self._stage_rank[target])

    def _receive(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        forward = action.op is Op.RECV_F
        chunk, source = self._chunks[stage], stage - 1 if forward else stage + 1
        shapes = chunk.arriving if forward else chunk.leaving
        message: _Message = []
        for shape in shapes or ():
            if forward or shape.has_gradient:
                tensor = shape.empty(self._channels.device)
                work = self._channels.receive(tensor, self._stage_rank[source])
                message.append((tensor, work))
        step.receiving[action.op, (stage, microbatch)] = message

    def _arrived(self, op: Op, key: Key, local: dict[Key, Tensors], step: _Step) -> Tensors:
        """The message into a stage, from another rank or from another stage of this rank."""
        message = step.receiving.pop((op, key), None)
        if message is None:
            return local.pop(key)
        for _, work in message:
            work.wait()
        return [tensor for tensor, _ in message]


def _key(action: Action) -> Key:
    assert action.microbatch is not None
    return action.stage, action.microbatch


@contextmanager
def shown(chunks: Iterable[Chunk]) -> Iterator[None]:
    """Inside this context parameters are views of their buffers; outside they may be NaN."""
    flats = [flat for chunk in chunks for flat in chunk.flats]
    for flat in flats:
        flat.show()
    try:
        yield
    finally:
        for flat in flats:
            flat.hide()


@contextmanager
def same_buffers(chunks: Iterable[Chunk], loss: Loss) -> Iterator[None]:
    """After this context modules, and a loss that is one, have the persistent buffers that they had
    before, with the same values. Others may be caches, which their modules believe to be filled."""
    held = []
    for module in (*chain.from_iterable(chunk.modules for chunk in chunks), *loss.modules):
        for name, buffer in persistent_buffers([(0, module)]).items():
            path, _, own = name.partition(".")[2].rpartition(".")
            held.append((module.get_submodule(path), own, buffer, buffer.clone()))
    yield
    with torch.no_grad():
        for part, name, buffer, value in held:
            if 0 not in buffer.stride():  # else nothing can have written to it
                buffer.copy_(value)
            setattr(part, name, buffer)


class Evaluator:
    """Runs batches forward through this rank's chunks. All ranks must call its methods together.

    Modules run in evaluation mode and without gradients; afterwards their modes and torch's random
    generators are as before. Units of microbatches run through one chunk after another, so that a
    chunk is gathered once per unit. Ranks may have different numbers of rows, and the last
    microbatch may have fewer rows than the others.
    """

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        *,
        chunks: Mapping[int, Chunk],
        channels: Channels,
        loss: Loss,
        barrier: ErrorBarrier,
        world: dist.ProcessGroup | None,
    ) -> None:
        self._schedule, self._layout = schedule, layout
        self.chunks, self._channels = dict(sorted(chunks.items())), channels
        self._loss, self._barrier = loss, barrier
        self._rank = layout.coordinates(dist.get_rank())["pp"]
        self._last, self._world = schedule.num_stages - 1, world

    def run(
        self, batch: Microbatches, rounds: int, all_rows: int, outputs: Outputs | None
    ) -> tuple[float, Value]:
        """The loss over the batches of all ranks: the mean over their rows, the sum, or the sum
        over the count; it is 0 without targets. ``rounds`` and ``all_rows`` are what ``agree``
        gives. With ``outputs`` also what that makes of what the model gives for this rank's
        rows."""
        rows = [len(part) for part in batch.inputs]
        is_mean = self._loss.reduction == "mean"
        sums = torch.zeros(2, dtype=torch.float64, device=self._channels.device)
        given: list[Value] = []
        with self._evaluating():
            for first in range(0, rounds * self._schedule.unit, self._schedule.unit):
                unit = range(first, min(first + self._schedule.unit, len(rows)))
                for microbatch, output, loss in self._run_unit(batch, unit, {}):
                    count = None
                    if output is not None and outputs is not None:
                        given.append(outputs(output))
                    if output is not None and batch.targets:
                        loss, count = self._loss(output, batch, microbatch)
                    if loss is not None:
                        sums[0] += loss * (rows[microbatch] if is_mean else 1)
                    sums[1] += 0 if count is None else count
        value: Value = ()
        if outputs is not None:
            from zeropp.engine.outputs import on_pipelines

            last, device = self._schedule.stage_rank[self._last], self._channels.device
            value = on_pipelines(given, self._layout, last, device, self._world)
        dist.all_reduce(sums, group=self._world)
        total, count = sums.tolist()
        divisor = {"tokens": count, "mean": all_rows, "sum": 1}[self._loss.reduction]
        return total / divisor if divisor else math.nan, value

    def agree(self, batch: Microbatches) -> tuple[int, int]:
        """(the number of units that every rank runs, as gathers are collective; the rows of all
        ranks).

        Raises RowsError on every rank if no rank has any rows.
        """
        rows = sum(len(part) for part in batch.inputs)
        counts = self._barrier.exchange([rows, len(batch.inputs)])
        all_rows, all_microbatches = zip(*counts, strict=True)
        total = sum(all_rows[pipeline[0]] for pipeline in self._layout.pipelines())
        if not total:
            raise RowsError("inputs: no rank was given any rows")
        return -(-max(all_microbatches) // self._schedule.unit), total

    def boundaries(self, batch: Microbatches) -> Passed:
        """The shapes of what passes into and out of this rank's stages, for microbatches like the
        first one of a batch, which all ranks run forward. What the loss function raises for it,
        and what is said of its halves, reaches all ranks. Persistent buffers are then as before."""
        passed: Passed = {}
        outputs: list[Value] = []

        def compare() -> None:
            for output in outputs:
                self._loss.compare_halves(output, batch)

        with self._evaluating(), same_buffers(self.chunks.values(), self._loss):
            for _, output, _ in self._run_unit(batch, range(1), passed):
                outputs += [] if output is None else [output]
            together(compare)
        return passed

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside this context chunks can run forward; afterwards random generators and the modes of
        modules are as before."""
        device = self._channels.device
        roots = [module for chunk in self.chunks.values() for module in chunk.modules]
        training = [module for root in roots for module in root.modules() if module.training]
        seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with torch.no_grad(), seeds, shown(self.chunks.values()):
            for module in training:
                module.training = False
            try:
                yield
            finally:
                for module in training:
                    module.training = True

    def _run_unit(
        self, batch: Microbatches, unit: range, passed: Passed
    ) -> Iterator[tuple[int, Value | None, Tensor | None]]:
        """(microbatch, what the model gives, or the loss of a stage's own) of a unit. ``passed``
        collects the shapes between stages."""
        local: dict[Key, Tensors] = {}
        for stage, chunk in self.chunks.items():
            chunk.unshard()
            for microbatch in unit:
                if stage == 0:
                    inputs: Tensors = (batch.inputs[microbatch],)
                else:
                    inputs = local.pop((stage, microbatch), ()) or self._receive(stage)
                    passed[stage] = _shapes(inputs)
                output, loss = chunk.infer(inputs, batch.keywords_of(microbatch))
                if loss is not None:
                    yield microbatch, None, loss
                if stage < self._last:
                    passed[stage + 1] = _shapes(tensors_of(output))
                    self._pass_on((stage + 1, microbatch), tensors_of(output), local)
                else:
                    yield microbatch, output, None
            chunk.reshard()
        self._channels.drain()

    def _pass_on(self, key: Key, outputs: Tensors, local: dict[Key, Tensors]) -> None:
        target = self._schedule.stage_rank[key[0]]
        if target == self._rank:
            local[key] = outputs
            return
        sizes = [size for output in outputs for size in output.shape]
        self._channels.send(torch.tensor(sizes, device=self._channels.device), target)
        for output in outputs:
            self._channels.send(output, target)

    def _receive(self, stage: int) -> list[Tensor]:
        """Receive tensors with as many dimensions as in training, after a message with their
        sizes."""
        device, source = self._channels.device, self._schedule.stage_rank[stage - 1]
        shapes = self.chunks[stage].arriving or ()
        count = sum(len(shape.size) for shape in shapes)
        sizes = torch.empty(count, dtype=torch.long, device=device)
        self._channels.receive(sizes, source).wait()
        left = iter(sizes.tolist())
        tensors = []
        for shape in shapes:
            size = torch.Size(next(left) for _ in shape.size)
            tensors.append(TensorShape(size, shape.dtype).empty(device))
            self._channels.receive(tensors[-1], source).wait()
        return tensors


def _shapes(tensors: Tensors) -> list[TensorShape]:
    return [TensorShape(x.shape, x.dtype) for x in tensors]
