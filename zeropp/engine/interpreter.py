"""The interpreter: runs one rank's program, with one method per kind of action. It knows nothing of
schedules: the program alone says what comes next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from zeropp.engine.checkpoint import persistent_buffers
from zeropp.engine.chunk import Chunk
from zeropp.engine.collectives import Channels
from zeropp.engine.errors import ErrorBarrier, together
from zeropp.engine.values import TensorShape, Value, chosen, keywords_of, tensors_of
from zeropp.engine.walk import OperationWatch, Owners
from zeropp.layout import Layout
from zeropp.literals import LossReduction
from zeropp.schedule.event_loop import LANES
from zeropp.schedule.program import Action, Op, Schedule
from zeropp.timeline import Span

LossFunction = Callable[..., Tensor]  # output of the last layer, targets, keyword inputs it names
Key = tuple[int, int]  # stage, microbatch
Tensors = Sequence[Tensor]
Passed = dict[int, Sequence[TensorShape]]  # by stage, what one microbatch sends into it
_Message = list[tuple[Tensor, dist.Work]]


class RowsError(ValueError):
    """Ranks were given rows that do not go together; every rank raises it before anything runs."""


@dataclass(frozen=True)
class Microbatches:
    """One rank's part of a batch, cut into microbatches. ``keywords`` are the keyword inputs of
    each microbatch by name; empty if there are none."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    keywords: Sequence[Mapping[str, Tensor]] = ()

    def keywords_of(self, microbatch: int) -> Mapping[str, Tensor]:
        """The keyword inputs of one microbatch."""
        return self.keywords[microbatch] if self.keywords else {}

    def digest(self) -> int:
        """A number that tells shapes and types of a microbatch's inputs and keyword inputs."""
        parts = {"": self.inputs[0], **self.keywords_of(0)} if self.inputs else {}
        kinds = sorted((name, tuple(one.shape), str(one.dtype)) for name, one in parts.items())
        return crc32(repr(kinds).encode())


class Loss:
    """The user's loss function, which is called with the keyword inputs that it names. In its first
    call it is refused if it reads one of ``owners``, which are parameters of layers: no rank would
    add up that part of the gradient."""

    def __init__(self, function: LossFunction, owners: Owners | None = None) -> None:
        self._function, self.keywords = function, keywords_of(function)
        self._unread = owners or {}

    def __call__(self, output: object, batch: Microbatches, microbatch: int) -> Tensor:
        """The loss of one microbatch; raises TypeError if it is not one number."""
        targets = batch.targets[microbatch]
        keywords = chosen(batch.keywords_of(microbatch), self.keywords)
        watched, self._unread = self._unread, {}
        owners = {key: one for key, one in watched.items() if key not in (id(output), id(targets))}
        with OperationWatch(owners, "loss_fn") if owners else nullcontext():
            loss = self._function(output, targets, **keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                f"loss_fn: gives {what}, but a tensor of one number is needed (the mean, or with "
                "loss_reduction='sum' the sum, over a microbatch)"
            )
        return loss.squeeze()


@dataclass
class _Step:
    """The tensors of one step while it runs, by (stage, microbatch)."""

    batch: Microbatches
    # The inputs of forwards, and the gradients of outputs, that are still to be used.
    activations: dict[Key, Tensors] = field(default_factory=dict, init=False)
    gradients: dict[Key, Tensors] = field(default_factory=dict, init=False)
    receiving: dict[tuple[Op, Key], _Message] = field(default_factory=dict, init=False)
    losses: list[Tensor] = field(default_factory=list, init=False)


class Interpreter:
    """Runs one rank's program over its chunks.

    ``chunks`` are by stage. Gradients are reduced over the replicas with the last reduction over
    the shards of a step. The loss of every microbatch is divided by ``loss_count``, so that the sum
    over microbatches and ranks is the loss of the global batch.
    """

    def __init__(
        self,
        schedule: Schedule,
        chunks: dict[int, Chunk],
        *,
        channels: Channels,
        loss: Loss,
        loss_count: int,
    ) -> None:
        self._chunks = chunks
        self._stage_rank = schedule.stage_rank
        self._rank = next(schedule.stage_rank[stage] for stage in chunks)
        self._program = schedule.programs[self._rank]
        self._on_cuda = channels.device.type == "cuda"
        self._last = schedule.num_stages - 1
        self._channels = channels
        self._loss = loss
        self._loss_count = loss_count
        self._unreduced = Counter(a.stage for a in self._program if a.op is Op.REDUCE_GRAD)
        self.counters: Counter[str] = Counter()
        self.spans: list[Span] | None = None
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
            Op.REDUCE_GRAD: self._reduce,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
        }
        self._actions = [(a, str(a), a.op.name.lower()) for a in self._program]

    def run(self, batch: Microbatches) -> list[Tensor]:
        """Run the program over one step's microbatches. Returns the losses that this rank's stages
        give (the main one is the last stage's), each divided by ``loss_count``."""
        step = _Step(batch)
        self._reductions_left = self._unreduced.copy()
        with shown(self._chunks.values()):
            begin = time.perf_counter()
            for action, name, kind in self._actions:
                if self.on_action is not None:
                    self.on_action(action)
                start = self._clock(begin)
                with record_function(name):
                    self._handlers[action.op](action, step)
                self.counters[kind] += 1
                if self.spans is not None:
                    place = self._rank, LANES[action.op], name
                    self.spans.append(Span(*place, start, self._clock(begin)))
            self._channels.drain()
        for chunk in self._chunks.values():
            chunk.finish()
        return step.losses

    def warm_up(self, batch: Microbatches) -> None:
        """Run every chunk forward and backward once, with zeros for messages. Persistent buffers
        and torch's random generators are as before, but the last step's gradients are dropped.

        The first use of a kernel, and of a library's workspace, may make the host wait for the
        whole device. In a step that could be for ever, because receives are posted that depend on
        what this rank is yet to send.
        """
        device = self._channels.device
        seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with seeds, shown(self._chunks.values()), _same_buffers(self._chunks.values()):
            for stage, chunk in self._chunks.items():
                chunk.unshard()
                shapes = chunk.arriving or ()
                inputs = [torch.zeros_like(shape.empty(device)) for shape in shapes]
                inputs = [batch.inputs[0]] if stage == 0 else inputs
                output, loss = chunk.forward(inputs, 0, batch.keywords_of(0))
                if stage == self._last:
                    loss = self._loss(output, batch, 0)
                if loss is not None:
                    chunk.set_loss(0, loss, alone=stage == self._last)
                shapes = [shape for shape in chunk.leaving or () if shape.has_gradient]
                gradients = [torch.zeros_like(shape.empty(device)) for shape in shapes]
                for_split = any(action.op is Op.BACKWARD_INPUT for action in self._program)
                chunk.backward(0, gradients, split=for_split)
                chunk.backward_weight(0)
                chunk.reshard()
                for flat in chunk.flats:  # else the sums of all chunks would be held at once
                    flat.clear_gradients()

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

    def _clock(self, begin: float) -> float:
        """Seconds since the step began; while spans are recorded, it waits for the compute stream.

        It does not wait for the whole device, which could be for ever: a receive that was posted
        early may depend on messages that this rank has yet to send.
        """
        if self.spans is None:
            return 0.0
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin

    def _forward(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        chunk = self._chunks[stage]
        if stage == 0:
            inputs: Tensors = (step.batch.inputs[microbatch],)
        else:
            inputs = self._arrived(Op.RECV_F, (stage, microbatch), step.activations, step)
        output, loss = chunk.forward(inputs, microbatch, step.batch.keywords_of(microbatch))
        if stage == self._last:
            main = self._loss(output, step.batch, microbatch)
            loss = main if loss is None else main + loss
            if not loss.requires_grad:
                raise RuntimeError(
                    "train_step: the loss depends on nothing that is trained (is it detached, or "
                    "computed under no_grad?)"
                )
        else:
            step.activations[stage + 1, microbatch] = [x.detach() for x in tensors_of(output)]
        if loss is not None:
            loss = loss / self._loss_count
            chunk.set_loss(microbatch, loss, alone=stage == self._last)
            step.losses.append(loss.detach())

    def _backward(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        gradients: Tensors = ()
        if stage != self._last:
            gradients = self._arrived(Op.RECV_B, (stage, microbatch), step.gradients, step)
        split = action.op is Op.BACKWARD_INPUT
        found = self._chunks[stage].backward(microbatch, gradients, split=split)
        if stage > 0:
            step.gradients[stage - 1, microbatch] = found

    def _reduce(self, action: Action, step: _Step) -> None:
        del step
        self._reductions_left[action.stage] -= 1
        last = self._reductions_left[action.stage] == 0
        self._chunks[action.stage].reduce(over_replicas=last)

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
def _same_buffers(chunks: Iterable[Chunk]) -> Iterator[None]:
    """After this context modules have the persistent buffers that they had before, with the same
    values. Others may be caches, which their modules believe to be filled."""
    held = []
    for module in (one for chunk in chunks for one in chunk.modules):
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
        reduction: LossReduction,
        barrier: ErrorBarrier,
        world: dist.ProcessGroup | None,
    ) -> None:
        self._schedule, self._layout = schedule, layout
        self._chunks, self._channels = dict(sorted(chunks.items())), channels
        self._loss, self._reduction, self._barrier = loss, reduction, barrier
        self._rank = layout.coordinates(dist.get_rank())["pp"]
        self._last, self._world = schedule.num_stages - 1, world

    def run(self, batch: Microbatches, rounds: int, all_rows: int) -> float:
        """The loss over the batches of all ranks: the mean over their rows, or the sum. ``rounds``
        and ``all_rows`` are what ``agree`` gives."""
        rows = [len(part) for part in batch.inputs]
        total = torch.zeros((), dtype=torch.float64, device=self._channels.device)
        with self._evaluating():
            for first in range(0, rounds * self._schedule.unit, self._schedule.unit):
                unit = range(first, min(first + self._schedule.unit, len(rows)))
                for microbatch, loss in self._run_unit(batch, unit, {}):
                    total += loss * (rows[microbatch] if self._reduction == "mean" else 1)
        dist.all_reduce(total, group=self._world)
        return float(total) / (all_rows if self._reduction == "mean" else 1)

    def agree(self, batch: Microbatches) -> tuple[int, int]:
        """(the number of units that every rank runs, as gathers are collective; the rows of all
        ranks).

        Raises RowsError on every rank if ranks of one pipeline have different numbers of rows, or
        if no rank has any.
        """
        rows = sum(len(part) for part in batch.inputs)
        counts = self._barrier.exchange([rows, len(batch.inputs)])
        all_rows, all_microbatches = zip(*counts, strict=True)
        for pipeline in self._layout.pipelines():
            found = {rank: all_rows[rank] for rank in pipeline}
            if len(set(found.values())) > 1:
                raise RowsError(
                    f"eval_step: ranks of one pipeline were given different rows ({found}); ranks "
                    "with the same data_parallel_rank must have the same batch"
                )
        total = sum(all_rows[pipeline[0]] for pipeline in self._layout.pipelines())
        if not total:
            raise RowsError("eval_step: no rank was given any rows")
        return -(-max(all_microbatches) // self._schedule.unit), total

    def boundaries(self, batch: Microbatches) -> Passed:
        """The shapes of what passes into and out of this rank's stages, for microbatches like the
        first one of a batch, which all ranks run forward. What the loss function raises for it
        reaches all ranks. Persistent buffers are then as before."""
        passed: Passed = {}
        outputs: list[Value] = []
        with self._evaluating(), _same_buffers(self._chunks.values()):
            for _ in self._run_unit(batch, range(1), passed, outputs):
                pass
            together(lambda: [self._loss(output, batch, 0) for output in outputs])
        return passed

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside this context chunks can run forward; afterwards random generators and the modes of
        modules are as before."""
        device = self._channels.device
        roots = [module for chunk in self._chunks.values() for module in chunk.modules]
        training = [module for root in roots for module in root.modules() if module.training]
        seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with torch.no_grad(), seeds, shown(self._chunks.values()):
            for module in training:
                module.training = False
            try:
                yield
            finally:
                for module in training:
                    module.training = True

    def _run_unit(
        self, batch: Microbatches, unit: range, passed: Passed, outputs: list[Value] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The losses of a unit's microbatches that this rank's stages give. ``passed`` collects the
        shapes between stages, and ``outputs``, instead of their losses, what the model gives."""
        local: dict[Key, Tensors] = {}
        for stage, chunk in self._chunks.items():
            chunk.unshard()
            for microbatch in unit:
                if stage == 0:
                    inputs: Tensors = (batch.inputs[microbatch],)
                else:
                    inputs = local.pop((stage, microbatch), ()) or self._receive(stage)
                    passed[stage] = _shapes(inputs)
                output, loss = chunk.infer(inputs, batch.keywords_of(microbatch))
                if loss is not None:
                    yield microbatch, loss
                if stage < self._last:
                    passed[stage + 1] = _shapes(tensors_of(output))
                    self._pass_on((stage + 1, microbatch), tensors_of(output), local)
                elif outputs is None:
                    yield microbatch, self._loss(output, batch, microbatch)
                else:
                    outputs.append(output)
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
        shapes = self._chunks[stage].arriving or ()
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
