"""What chunks run outside of a step: evaluation, the shapes between stages, and a warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.layers.chunk import Chunk, forked_generators, shown
from zeropp.engine.layers.values import Key, Tensors, TensorShape, Value, alike, tensors_of
from zeropp.engine.loss import Loss, Microbatches
from zeropp.engine.ranks.collectives import Channels
from zeropp.engine.ranks.errors import gathered, refusal, together
from zeropp.engine.sliced_head import SlicedHead
from zeropp.schedule.program import Op, Schedule
from zeropp.types.layout import Layout

if TYPE_CHECKING:
    from zeropp.engine.layers.context import Context

Outputs = Callable[[Any], Value]  # of what the model gives for a microbatch
Passed = dict[int, Sequence[TensorShape]]  # by stage, what one microbatch sends into it


class Evaluator:
    """Runs batches forward through this rank's chunks. All ranks must call its methods together.

    Modules run in evaluation mode and without gradients; afterwards their modes, buffers, numbers
    and the random generators are as before. Units of microbatches run through one chunk after
    another, so that a chunk is gathered once per unit. Ranks may have different numbers of rows,
    and the last microbatch may have fewer rows than the others.
    """

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        *,
        chunks: Mapping[int, Chunk],
        channels: Channels,
        loss: Loss,
        head: SlicedHead | None,
        world: dist.ProcessGroup | None,
        context: Context | None = None,
    ) -> None:
        self._schedule, self._layout = schedule, layout
        self.chunks, self._channels = dict(sorted(chunks.items())), channels
        self._loss, self._head, self._context = loss, head, context
        self._roots = [module for chunk in chunks.values() for module in chunk.modules]
        self._roots += head.modules if head else ()
        again = [root for chunk in chunks.values() for root in chunk.recomputed]
        self._caching = {module for root in again for module in root.modules()}
        self._rank = layout.coordinates(dist.get_rank())["pp"]
        self._last, self._world = schedule.num_stages - 1, world

    def run(
        self,
        batch: Microbatches,
        all_rows: Sequence[int],
        microbatches: Sequence[int],
        outputs: Outputs | None,
    ) -> tuple[float, Value]:
        """The loss over the batches of all ranks: the mean over their rows, the sum, or the sum
        over the count; it is 0 without targets. ``all_rows`` and ``microbatches`` are how many
        every rank has. With ``outputs`` also what that makes of what the model gives for this
        rank's rows."""
        rows = [len(part) for part in batch.inputs]
        rounds = -(-max(microbatches) // self._schedule.unit)  # of all, as gathers are collective
        is_mean = self._loss.reduction == "mean"
        sums = torch.zeros(2, dtype=torch.float64, device=self._channels.device)
        given: list[Value] = []
        whole = self._context.whole if self._context else (lambda x: x)  # all tokens
        with self._evaluating():
            for first in range(0, rounds * self._schedule.unit, self._schedule.unit):
                unit = range(first, min(first + self._schedule.unit, len(rows)))
                for microbatch, output, loss in self._run_unit(batch, unit, {}):
                    count = None
                    if output is not None and batch.targets:
                        if self._head is None:
                            loss, count = self._loss(output, batch, microbatch)
                        else:
                            loss, count, _ = self._head.run(output, batch, microbatch)
                    if output is not None and outputs is not None:
                        if self._head is not None:
                            output = self._head.output(output, batch.keywords_of(microbatch))
                        given.append(outputs(alike(output, [*map(whole, tensors_of(output))])))
                    if loss is not None:
                        sums[0] += loss * (rows[microbatch] if is_mean else 1)
                    sums[1] += 0 if count is None else count
        value: Value = () if outputs is None else self._on_pipeline(given)
        dist.all_reduce(sums, group=self._world)
        total, count = sums.tolist()
        total_rows = sum(all_rows[pipeline[0]] for pipeline in self._layout.pipelines())
        divisor = {"tokens": count, "mean": total_rows, "sum": 1}[self._loss.reduction]
        return total / divisor if divisor else math.nan, value

    def boundaries(self, batch: Microbatches) -> Passed:
        """The shapes of what passes into and out of this rank's stages, for microbatches like the
        first one of a batch, which all ranks run forward. The loss function is not called, as it
        may count its calls. What is recomputed may fill caches, which it would otherwise fill in a
        step's forward and not when it is recomputed."""
        passed: Passed = {}
        if self._last or self._caching:
            with self._evaluating(self._caching):
                [*self._run_unit(batch.first(), range(1), passed)]
        return passed

    def warm_up(self, batch: Microbatches) -> None:
        """Run every chunk of this rank forward and backward once, with zeros for messages; the last
        step's gradients are dropped.

        The first use of a kernel, and of a library's workspace, may make the host wait for the
        whole device. In a step on CUDA that could be for ever, because receives are posted that
        depend on what this rank is yet to send.
        """
        device, chunks = self._channels.device, self.chunks
        splits = any(a.op is Op.BACKWARD_INPUT for a in self._schedule.programs[self._rank])
        batch = batch.first()
        with unchanged(self._roots, device, self._caching), shown(chunks.values()):
            for stage, chunk in chunks.items():
                for flat in chunk.flats:
                    flat.unshard()
                shapes = chunk.arriving or ()
                inputs = [torch.zeros_like(shape.empty(device)) for shape in shapes]
                inputs = [batch.inputs[0]] if stage == 0 else inputs
                output, loss = chunk.forward(inputs, 0, batch.keywords_of(0))
                is_end = stage == self._last and self._head is None
                if is_end:
                    loss, _ = self._loss(output, batch, 0)
                if loss is not None:
                    chunk.set_loss(0, loss, alone=is_end)
                shapes = [shape for shape in chunk.leaving or () if shape.has_gradient]
                gradients = [torch.zeros_like(shape.empty(device)) for shape in shapes]
                if stage == self._last and self._head is not None:
                    _, _, gradients = self._head.run(output, batch, 0)
                chunk.backward(0, gradients, split=splits)
                if splits:
                    chunk.backward_weight((0,))
                for flat in chunk.flats:
                    flat.reshard()
                    flat.clear_gradients()  # else the sums of all chunks would be held at once

    @contextmanager
    def _evaluating(self, apart: Collection[nn.Module] = ()) -> Iterator[None]:
        """Inside, chunks can run forward; afterwards all is as ``unchanged`` says."""
        everything = unchanged(self._roots, self._channels.device, apart)
        with everything, torch.no_grad(), shown(self.chunks.values()):
            for root in self._roots:
                for module in root.modules():
                    module.training = False
            yield

    def _run_unit(
        self,
        batch: Microbatches,
        unit: range,
        passed: Passed,
    ) -> Iterator[tuple[int, Value | None, Tensor | None]]:
        """(microbatch, the model's output, a stage's own loss) of a unit; fills ``passed``."""
        local: dict[Key, Tensors] = {}
        for stage, chunk in self.chunks.items():
            for flat in chunk.flats:
                flat.unshard()
            for microbatch in unit:
                if stage == 0:
                    inputs: Tensors = (batch.inputs[microbatch],)
                else:
                    inputs = local.pop((stage, microbatch), ()) or self._receive(stage)
                    passed[stage] = _shapes(inputs)
                output, loss = chunk.forward(inputs, microbatch, batch.keywords_of(microbatch))
                if loss is not None:
                    yield microbatch, None, loss
                if stage < self._last:
                    passed[stage + 1] = _shapes(tensors_of(output))
                    self._pass_on((stage + 1, microbatch), tensors_of(output), local)
                else:
                    yield microbatch, output, None
            for flat in chunk.flats:
                flat.reshard()
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
        """Receive tensors of as many dimensions as in training, after their sizes."""
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

    def _on_pipeline(self, parts: Sequence[Value]) -> Value:
        """The rows that the last stage gives, on all ranks of the pipeline; there may be none."""
        device, world = self._channels.device, self._world

        def joined() -> list[Tensor]:
            with refusal("outputs: must give tensors [rows, ...] of a microbatch"):
                return [torch.cat(same) for same in zip(*map(tensors_of, parts), strict=True)]

        whole = together(joined)
        is_tuple = bool(parts) and isinstance(parts[0], tuple)
        offers = gathered((_shapes(whole), is_tuple), world)
        pipeline, rank = self._layout.pipeline(dist.get_rank()), dist.get_rank()
        source = pipeline[self._schedule.stage_rank[self._last]]
        shapes, is_tuple = next(offer for offer in (offers[source], *offers) if offer[0])
        if not offers[source][0]:
            empty = [TensorShape(torch.Size((0, *x.size[1:])), x.dtype) for x in shapes]
            whole = [shape.empty(device) for shape in empty]
        elif rank == source:
            whole = [x.contiguous() for x in whole]
            for x, other in product(whole, set(pipeline) - {source}):
                dist.send(x, other, group=world)
        else:
            whole = [shape.empty(device) for shape in shapes]
            for x in whole:
                dist.recv(x, source, group=world)
        return tuple(whole) if is_tuple else whole[0]


@contextmanager
def unchanged(
    roots: Iterable[nn.Module], device: torch.device, apart: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Afterwards modules have the modes of before and, except for those ``apart``, the buffers and
    numbers, also those in tensors; torch, Python and numpy draw as before."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes or buffers, and as before
    for part in {part: None for root in roots for part in root.modules()}:
        own, numbers = vars(part), {"training": part.training}
        if part not in apart:
            numbers |= {name: value for name, value in own.items() if _is_number(value)}
            kept.append((own["_buffers"], dict(own["_buffers"])))
        kept.append((own, numbers))
    tensors = [x for _, before in kept for x in before.values() if isinstance(x, Tensor)]
    values = [(x, x.clone()) for x in tensors]
    with forked_generators(device):
        try:
            yield
        finally:
            for held, before in kept:
                held.update(before)
            with torch.no_grad():
                for value, number in values:
                    if 0 not in value.stride():  # else nothing can write to it
                        value.copy_(number)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):  # not a part of a parameter, which may have no memory now
        return not value.dim() and not value.requires_grad
    return isinstance(value, int | float | complex)


def _shapes(tensors: Tensors) -> list[TensorShape]:
    return [TensorShape(x.shape, x.dtype) for x in tensors]
