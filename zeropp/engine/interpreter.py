"""The interpreter: runs one rank's program, with one method per kind of action. It knows nothing of
schedules: the program alone says what comes next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from zeropp.engine.channels import Channels
from zeropp.engine.chunk import Chunk
from zeropp.engine.sharding import shown
from zeropp.engine.uses import Uses
from zeropp.engine.values import chosen, keywords_of, tensors_of
from zeropp.literals import ReduceEvery
from zeropp.schedule.action import Action, Op
from zeropp.schedule.event_result import LANES
from zeropp.schedule.program import Schedule
from zeropp.timeline import Span

LossFunction = Callable[..., Tensor]  # output of the last layer, targets, keyword inputs it names
Key = tuple[int, int]  # stage, microbatch
Tensors = Sequence[Tensor]
_Message = list[tuple[Tensor, dist.Work]]


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


class Loss:
    """The user's loss function, which is called with the keyword inputs that it names."""

    def __init__(self, function: LossFunction) -> None:
        self._function, self.keywords = function, keywords_of(function)

    def __call__(self, output: object, batch: Microbatches, microbatch: int) -> Tensor:
        """The loss of one microbatch; raises TypeError if it is not one number."""
        keywords = chosen(batch.keywords_of(microbatch), self.keywords)
        loss = self._function(output, batch.targets[microbatch], **keywords)
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

    ``chunks`` are by stage. ``replicate_every``: gradients are reduced over the replicas with every
    reduction over the shards, or with the last one of a step. The loss of every microbatch is
    divided by ``loss_count``, so that the sum over microbatches and ranks is the loss of the global
    batch. ``uses`` notes what every backward used.
    """

    def __init__(
        self,
        schedule: Schedule,
        chunks: dict[int, Chunk],
        *,
        channels: Channels,
        loss: Loss,
        replicate_every: ReduceEvery,
        loss_count: int,
        uses: Uses,
    ) -> None:
        self._chunks = chunks
        self._stage_rank = schedule.stage_rank
        self._rank = next(schedule.stage_rank[stage] for stage in chunks)
        self._program = schedule.programs[self._rank]
        self._on_cuda = channels.device.type == "cuda"
        self._last = schedule.num_stages - 1
        self._channels = channels
        self._loss = loss
        self._replicate_every = replicate_every
        self._loss_count, self._uses = loss_count, uses
        self._unreduced = Counter(a.stage for a in self._program if a.op is Op.REDUCE_GRAD)
        self.counters: Counter[str] = Counter()
        self.spans: list[Span] | None = None
        self.on_action: Callable[[Action], None] | None = None  # called before every action
        self._handlers: dict[Op, Callable[[Action, _Step], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.FULL_BACKWARD: self._full_backward,
            Op.UNSHARD: self._unshard,
            Op.RESHARD: self._reshard,
            Op.REDUCE_GRAD: self._reduce,
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
        }

    def run(self, batch: Microbatches) -> list[Tensor]:
        """Run the program over one step's microbatches. Returns the losses, each divided by
        ``loss_count``, on the rank with the last stage, and nothing on others."""
        step = _Step(batch)
        with shown(chunk.shards for chunk in self._chunks.values()):
            self._run_program(step)
        for chunk in self._chunks.values():
            chunk.shards.finish()
        return step.losses

    def reads(self, keywords: Iterable[str]) -> set[str]:
        """What this rank reads of a batch with these keyword inputs: ``inputs`` in the first stage,
        ``targets`` in the last, and the keyword inputs that its layers or, in the last stage, the
        loss function name."""
        ends = {"inputs": 0, "targets": self._last}
        named = [chunk.keywords for chunk in self._chunks.values()]
        if self._last in self._chunks:
            named.append(self._loss.keywords)
        known = frozenset[str]().union(*named)
        return {name for name, stage in ends.items() if stage in self._chunks} | {
            name for name in keywords if name in known
        }

    def _run_program(self, step: _Step) -> None:
        self._reductions_left = self._unreduced.copy()
        begin = time.perf_counter()
        for action in self._program:
            if self.on_action is not None:
                self.on_action(action)
            start = self._clock(begin)
            with record_function(str(action)):
                self._handlers[action.op](action, step)
            self.counters[action.op.name.lower()] += 1
            if self.spans is not None:
                lane = LANES[action.op]
                self.spans.append(Span(self._rank, lane, str(action), start, self._clock(begin)))
        self._channels.drain()

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
        output = chunk.forward(inputs, microbatch, step.batch.keywords_of(microbatch))
        if stage == self._last:
            loss = self._loss(output, step.batch, microbatch) / self._loss_count
            if not loss.requires_grad:
                raise RuntimeError(
                    "train_step: the loss depends on nothing that is trained (is it detached, or "
                    "computed under no_grad?)"
                )
            chunk.set_output(microbatch, loss)
            step.losses.append(loss.detach())
        else:
            step.activations[stage + 1, microbatch] = [x.detach() for x in tensors_of(output)]

    def _backward_input(self, action: Action, step: _Step) -> None:
        self._backward(action, step, split=True)

    def _full_backward(self, action: Action, step: _Step) -> None:
        self._backward(action, step, split=False)

    def _backward(self, action: Action, step: _Step, *, split: bool) -> None:
        stage, microbatch = _key(action)
        gradients = None
        if stage != self._last:
            gradients = self._arrived(Op.RECV_B, (stage, microbatch), step.gradients, step)
        self._uses.begin_backward(stage, microbatch)
        chunk = self._chunks[stage]
        found = chunk.backward(microbatch, gradients, split=split)
        if stage > 0:
            if all(gradient is None for gradient in found):
                self._uses.cuts.add((stage, microbatch))
            step.gradients[stage - 1, microbatch] = chunk.or_zeros(found)

    def _backward_weight(self, action: Action, step: _Step) -> None:
        del step
        stage, microbatch = _key(action)
        self._chunks[stage].backward_weight(microbatch)

    def _unshard(self, action: Action, step: _Step) -> None:
        del step
        self._chunks[action.stage].shards.unshard()

    def _reshard(self, action: Action, step: _Step) -> None:
        del step
        self._chunks[action.stage].shards.reshard()

    def _reduce(self, action: Action, step: _Step) -> None:
        del step
        self._reductions_left[action.stage] -= 1
        last = self._reductions_left[action.stage] == 0
        every = self._replicate_every == "unit"
        self._chunks[action.stage].shards.reduce(cross=last or every, bound=every)

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
