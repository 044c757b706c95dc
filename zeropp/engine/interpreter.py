"""The interpreter: runs one rank's program, with one method per kind of action. It knows nothing of
schedules: the program alone says what comes next, up to the update and what follows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from zeropp.engine.action_recorder import ActionRecorder
from zeropp.engine.layers.chunk import Chunk, shown
from zeropp.engine.layers.values import Key, Tensors, tensors_of
from zeropp.engine.loss import Loss, Microbatches
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.ranks.collectives import Channels
from zeropp.engine.sliced_head import SlicedHead
from zeropp.engine.update.optimizer import ParameterUpdate
from zeropp.schedule.program import Action, Op, Schedule, before_reductions, merged_weights
from zeropp.types.training import StepResult

if TYPE_CHECKING:
    from zeropp.engine.layers.offload import Offload

_Message = list[tuple[Tensor, dist.Work]]


@dataclass
class _Step:
    """The tensors of a running step, by (stage, microbatch); ``passes`` ends with its backwards."""

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

    ``update`` is that of all of them. ``merged``: microbatches whose weight gradients are computed
    together, at most. ``head``: what runs the last layer and the loss in slices, if anything does.
    The loss of every microbatch is divided by ``divisor``, so that the sum over microbatches and
    ranks is the loss of the global batch, or, where the loss gives counts, becomes it by the
    update. Raises ValueError if the rank's program is not that of a
    whole step.
    """

    def __init__(
        self,
        schedule: Schedule,
        chunks: dict[int, Chunk],
        *,
        channels: Channels,
        loss: Loss,
        head: SlicedHead | None,
        divisor: int,
        update: ParameterUpdate,
        merged: int = 1,
    ) -> None:
        self._chunks = chunks
        self._stage_rank = schedule.stage_rank
        super().__init__(next(schedule.stage_rank[stage] for stage in chunks), channels.device)
        self._program = schedule.programs[self._rank]
        self._last = schedule.num_stages - 1
        self._channels = channels
        self._loss, self._head = loss, head
        self._divisor = divisor
        self._parameters = update
        self._handlers: dict[Op, Callable[[Action, _Step], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: lambda action, _: chunks[action.stage].backward_weight(
                self._merged[action], is_last=action in self._before_reductions
            ),
            Op.FULL_BACKWARD: self._backward,
            Op.UNSHARD: lambda action, _: self._each(action, lambda flat: flat.unshard()),
            Op.RESHARD: lambda action, _: self._each(action, lambda flat: flat.reshard()),
            Op.REDUCE_GRAD: lambda action, _: chunks[action.stage].reduce(),
            Op.REDUCE_REPLICAS: lambda action, _: self._each(
                action, lambda flat: flat.reduce_over_replicas()
            ),
            Op.REDUCE_TIED: lambda *_: update.sum_tied(),
            Op.GATHER_WHOLE: self._gather_whole,
            Op.UPDATE: self._update,
            Op.GATHER_UPDATED: lambda *_: update.gather_updated(),
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.STORE: lambda action, _: self._offload(action, lambda it, j: it.store(j)),
            Op.FREE: lambda action, _: self._offload(action, lambda it, j: it.free(j)),
            Op.LOAD: lambda action, _: self._offload(action, lambda it, j: it.load(j)),
        }
        self._before_reductions = before_reductions(self._program)
        self._merged = merged_weights(self._program, merged)
        self._actions = [(action, str(action)) for action in self._program]

    def run(self, batch: Microbatches, drawing: AbstractContextManager[None]) -> StepResult:
        """Run the program over one step's microbatches; inside ``drawing`` forwards and backwards
        draw their random numbers."""
        step = _Step(batch)
        with step.passes:
            step.passes.enter_context(shown(self._chunks.values()))
            step.passes.enter_context(drawing)
            self._begin_step()
            for action, name in self._actions:
                with self._running(action.op, name):
                    self._handlers[action.op](action, step)
        assert step.result is not None
        return step.result

    def _forward(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        chunk = self._chunks[stage]
        if stage == 0:
            inputs: Tensors = (step.batch.inputs[microbatch],)
        else:
            inputs = self._arrived(Op.RECV_F, (stage, microbatch), step.activations, step)
        output, loss = chunk.forward(inputs, microbatch, step.batch.keywords_of(microbatch))
        is_end = stage == self._last and self._head is None
        if is_end:
            main, count = self._loss(output, step.batch, microbatch)
            loss = main if loss is None else main + loss
            step.counts += [] if count is None else [count]
        else:
            step.activations[stage + 1, microbatch] = [x.detach() for x in tensors_of(output)]
        if loss is not None:
            loss = loss / self._divisor
            chunk.set_loss(microbatch, loss, alone=is_end)
            step.losses.append(loss.detach())

    def _backward(self, action: Action, step: _Step) -> None:
        stage, microbatch = _key(action)
        gradients: Tensors = ()
        if stage != self._last:
            gradients = self._arrived(Op.RECV_B, (stage, microbatch), step.gradients, step)
        elif self._head is not None:
            gradients = self._run_head(self._head, (stage + 1, microbatch), step)
        split = action.op is Op.BACKWARD_INPUT
        input_gradients = self._chunks[stage].backward(
            microbatch, gradients, split=split, is_last=action in self._before_reductions
        )
        if stage > 0:
            step.gradients[stage - 1, microbatch] = input_gradients

    def _run_head(self, head: SlicedHead, key: Key, step: _Step) -> Tensors:
        """Run the last layer and the loss of a microbatch, from what the last stage has given to
        its gradients."""
        inputs = tuple(step.activations.pop(key))
        loss, count, gradients = head.run(inputs, step.batch, key[1], self._divisor)
        step.losses.append(loss)
        step.counts += [] if count is None else [count]
        return gradients

    def _offload(self, action: Action, do: Callable[[Offload, int], None]) -> None:
        """Do something with what an action's microbatch has saved in its stage."""
        stage, microbatch = _key(action)
        offload = self._chunks[stage].offload
        assert offload is not None
        do(offload, microbatch)

    def _each(self, action: Action, do: Callable[[FlatParameters], None]) -> None:
        """Do something with every flat buffer of an action's stage."""
        for flat in self._chunks[action.stage].flats:
            do(flat)

    def _gather_whole(self, *_: object) -> None:
        self._channels.drain()  # so that what was sent is freed
        self._parameters.gather_whole()

    def _update(self, _: Action, step: _Step) -> None:
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
