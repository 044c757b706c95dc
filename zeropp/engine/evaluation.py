"""The loss of a batch without training: a pipeline of forwards only.

There are no gradients and no dropout (modules run in evaluation mode). Afterwards parameters are
released, and the modules' modes and torch's random generators are as before. Units of microbatches
run through one chunk after another, so that a chunk is gathered once per unit. Ranks may have
different numbers of rows, and the last microbatch may have fewer rows than the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.channels import Channels
from zeropp.engine.chunk import Chunk
from zeropp.engine.interpreter import Loss, Microbatches
from zeropp.engine.sharding import shown
from zeropp.engine.together import Meeting
from zeropp.engine.values import TensorShape, tensors_of
from zeropp.layout import Layout
from zeropp.literals import LossReduction
from zeropp.schedule.program import Schedule


class RowsError(ValueError):
    """Ranks were given rows that do not go together; every rank raises it before anything runs."""


class Evaluator:
    """Runs batches forward through this rank's chunks. All ranks must call its methods together."""

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        *,
        chunks: Mapping[int, Chunk],
        channels: Channels,
        loss: Loss,
        reduction: LossReduction,
        meeting: Meeting,
    ) -> None:
        self._schedule, self._layout = schedule, layout
        self._chunks, self._channels = dict(sorted(chunks.items())), channels
        self._loss, self._reduction, self._meeting = loss, reduction, meeting
        self._rank = layout.coordinates(dist.get_rank())["pp"]
        self._last = schedule.num_stages - 1

    def run(self, batch: Microbatches) -> float:
        """The loss over the batches of all ranks: the mean over their rows, or the sum.

        Raises RowsError on every rank if ranks of one pipeline have different numbers of rows, or
        if no rank has any.
        """
        rows = [len(part) for part in batch.inputs]
        rounds, all_rows = self._meeting.agree(lambda: self._agree(sum(rows), len(rows)))
        total = self._meeting.sum(lambda: self._run_units(batch, rows, rounds), 1)
        return float(total) / (all_rows if self._reduction == "mean" else 1)

    def _run_units(self, batch: Microbatches, rows: Sequence[int], rounds: int) -> Tensor:
        """The sum of the losses of this rank's rows, as one number."""
        total = torch.zeros(1, dtype=torch.float64, device=self._channels.device)
        modules = [piece for chunk in self._chunks.values() for piece in chunk.shards.pieces]
        devices = [total.device] if total.device.type == "cuda" else []
        shards = [chunk.shards for chunk in self._chunks.values()]
        seeds = torch.random.fork_rng(devices)
        with torch.no_grad(), seeds, _evaluating(modules), shown(shards):
            for first in range(0, rounds * self._schedule.unit, self._schedule.unit):
                unit = range(first, min(first + self._schedule.unit, len(rows)))
                for microbatch, loss in self._run_unit(batch, unit):
                    total += loss * (rows[microbatch] if self._reduction == "mean" else 1)
        return total

    def _agree(self, rows: int, microbatches: int) -> tuple[int, int]:
        """(the number of units that every rank runs, as gathers are collective; the rows of all
        ranks)."""
        counts = torch.zeros(2, dist.get_world_size(), dtype=torch.long)
        counts[:, dist.get_rank()] = torch.tensor([rows, microbatches])
        counts = counts.to(self._channels.device)
        dist.all_reduce(counts, group=self._meeting.before)
        all_rows, all_microbatches = counts.tolist()
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

    def _run_unit(self, batch: Microbatches, unit: range) -> Iterator[tuple[int, Tensor]]:
        """The losses of a unit's microbatches, on the rank with the last stage."""
        local: dict[tuple[int, int], Sequence[Tensor]] = {}
        for stage, chunk in self._chunks.items():
            chunk.shards.unshard()
            for microbatch in unit:
                inputs = self._inputs(stage, microbatch, batch, local)
                output = chunk.infer(inputs, batch.keywords_of(microbatch))
                if stage == self._last:
                    yield microbatch, self._loss(output, batch, microbatch)
                else:
                    self._pass_on(stage + 1, microbatch, tensors_of(output), local)
            chunk.shards.reshard()
        self._channels.drain()

    def _inputs(
        self,
        stage: int,
        microbatch: int,
        batch: Microbatches,
        local: dict[tuple[int, int], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        if stage == 0:
            return (batch.inputs[microbatch],)
        source = self._schedule.stage_rank[stage - 1]
        if source == self._rank:
            return local.pop((stage, microbatch))
        shapes = self._chunks[stage].arriving
        assert shapes is not None
        return self._receive(shapes, source)

    def _pass_on(
        self,
        stage: int,
        microbatch: int,
        outputs: Sequence[Tensor],
        local: dict[tuple[int, int], Sequence[Tensor]],
    ) -> None:
        target = self._schedule.stage_rank[stage]
        if target == self._rank:
            local[stage, microbatch] = outputs
            return
        sizes = [size for output in outputs for size in output.shape]
        self._channels.send(torch.tensor(sizes, device=self._channels.device), target)
        for output in outputs:
            self._channels.send(output, target)

    def _receive(self, shapes: Sequence[TensorShape], source: int) -> list[Tensor]:
        """Receive tensors with as many dimensions as in training, after a message with their
        sizes."""
        device = self._channels.device
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


@contextmanager
def _evaluating(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Inside this context all modules are in evaluation mode; afterwards each is as before."""
    training = [module for root in roots for module in root.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
