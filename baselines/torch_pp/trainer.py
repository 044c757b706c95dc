"""torch.distributed.pipelining on one rank: torch's runtime runs the step; this file builds the
stages for it, feeds it batches and reads its gradients, counters and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from baselines.blocks import prepare_block
from baselines.fsdp2 import (
    count_collectives,
    data_mesh,
    finish_step,
    full,
    local,
    shard,
    take_scales,
    world_mesh,
)
from baselines.model import Block, Embedding, build_piece, cross_entropy
from baselines.torch_pp.private_names import (
    ObservedStage,
    OneForwardOneBackward,
    Runtime,
    load_programs,
)
from zeropp.engine.action_recorder import ActionRecorder
from zeropp.engine.ranks.collectives import new_group_in_each_pipeline
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Action, Op
from zeropp.types.training import OptimizerConfig, StepResult


class TiedEnds:
    """The tied weights that this rank holds: the embedding's, the head's, both or none.

    Torch's pipelining has no tied embeddings, so the head's stage holds a copy of the embedding's
    weight, sharded in the same way. After every step's backward both get the sum of their
    gradients, so that they stay equal. All ranks of the world must construct it.
    """

    def __init__(self, plan: Plan, chunks: dict[int, nn.Module]) -> None:
        schedule, layout = plan.schedule, plan.layout
        last = schedule.num_stages - 1
        ends = {schedule.stage_rank[0], schedule.stage_rank[last]}
        self._group = new_group_in_each_pipeline(layout, ends) if len(ends) == 2 else None
        self._weights: list[nn.Parameter] = []
        self.copy: nn.Parameter | None = None
        if 0 in chunks:
            self._weights.append(chunks[0].get_parameter("pieces.0.tokens.weight"))
        if last in chunks:
            name = f"pieces.{plan.shape.num_pieces - 1}.output.weight"
            self.copy = chunks[last].get_parameter(name)
            self._weights.append(self.copy)
        with torch.no_grad():  # the copy has the embedding's initial values
            if self._group is not None:
                source = layout.pipeline(dist.get_rank())[schedule.stage_rank[0]]
                dist.broadcast(local(self._weights[0].data), source, group=self._group)
            elif len(self._weights) == 2:
                original, copy = self._weights
                local(copy.data).copy_(local(original.data))

    def sum_gradients(self) -> None:
        """Replace the gradients of both weights by their sum. All ranks must call it."""
        gradients: list[Tensor] = [local(w.grad) for w in self._weights if w.grad is not None]
        if self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)
        elif len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])


def cut_piece(piece: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a piece of ``baselines.model`` (embedding, block or head) by DTensor, in place, over a
    1-D mesh of tensor-parallel ranks.

    As in Megatron-LM (arXiv 1909.08053), projections into attention heads and into the MLP are
    column-parallel, those out of them are row-parallel, and embedding and logits are cut by the
    vocabulary. With sequence parallelism (arXiv 2205.05198) the activations between these regions
    are sharded over the sequence, and so are the activations that pipeline stages send each other.
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {}
    if isinstance(piece, Block):
        for region in ("attention", "mlp"):  # its input is gathered once for all its projections
            styles[region] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
        for name in ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate"):
            styles[name] = ColwiseParallel()
        for name in ("attention.output", "mlp.down"):
            styles[name] = RowwiseParallel(output_layouts=between)
    elif isinstance(piece, Embedding):
        styles["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if sequence_parallel:
            styles["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    else:
        # Logits stay cut by the vocabulary: ``loss_parallel`` computes the loss on the parts.
        styles["output"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    if sequence_parallel:
        names = [name for name, _ in piece.named_children() if name.endswith("norm")]
        styles |= {name: SequenceParallel() for name in names}
    present = dict(piece.named_modules())
    parallelize_module(piece, mesh, {name: styles[name] for name in styles if name in present})


CLASSES: dict[str, Callable[..., Runtime]] = {
    "1f1b": OneForwardOneBackward,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class _StageModule(nn.Module):
    """The pieces of one stage, called one after another; their names are indices in the model."""

    def __init__(self, pieces: dict[int, nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleDict({str(index): piece for index, piece in pieces.items()})

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces.values():
            x = piece(x)
        return x


class TorchPipelineTrainer(ActionRecorder):
    """A ``zeropp.types.training.Trainer`` that runs torch's pipeline runtime."""

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        self._mesh = world_mesh(plan.layout, device)
        super().__init__(self._mesh.get_local_rank("pp"), device)
        self._plan, self._clip_norm = plan, optimizer.clip_norm
        self._chunks = {
            stage: self._build_chunk(stage, seed) for stage in plan.schedule.stages_of(self._rank)
        }
        self._schedule = CLASSES.get(plan.schedule.name, Runtime)(
            [self._build_stage(stage, chunk) for stage, chunk in self._chunks.items()],
            n_microbatches=plan.num_microbatches,
            loss_fn=lambda logits, y: cross_entropy(logits, y) / plan.num_microbatches,
            scale_grads=False,
        )
        if plan.schedule.name not in CLASSES:  # it is given as a user's file would be
            with TemporaryDirectory() as folder:
                file = Path(folder, "schedule.csv")
                file.write_text(plan.schedule.to_csv(), encoding="utf-8")
                load_programs(self._schedule, file, "compute_comms")
        self._tied = TiedEnds(plan, dict(self._chunks)) if plan.shape.tied_embeddings else None
        # The head's copy of tied embeddings, if this rank holds it.
        self._copy = self._tied.copy if self._tied else None
        self._parameters = [p for chunk in self._chunks.values() for p in chunk.parameters()]
        self._optimizer = build_optimizer(self._parameters, optimizer)

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        plan = self._plan
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        first = (inputs.contiguous(),) if 0 in self._chunks else ()  # torch 2.11 compares strides
        last = plan.schedule.num_stages - 1 in self._chunks
        self._begin_step()
        with loss_parallel() if plan.layout.tp > 1 else nullcontext():
            self._schedule.step(
                *first, target=targets if last else None, losses=losses, return_outputs=False
            )
        if self._tied is not None:
            self._tied.sum_gradients()
        loss = torch.zeros((), device=self._device)
        for part in losses:  # the same on every rank of a tensor-parallel group
            loss += local(part.detach()) / (plan.layout.dp * plan.layout.tp)
        result = finish_step(
            self._parameters,
            loss,
            layout=plan.layout,
            device=self._device,
            clip_norm=self._clip_norm,
            copy=self._copy,
        )
        self._optimizer.step()
        for chunk in self._chunks.values():
            take_scales(chunk.pieces, self._plan)
        return result

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        for chunk in self._chunks.values():
            for name, parameter in chunk.pieces.named_parameters():
                whole = full(parameter.detach())
                if parameter is not self._copy:
                    yield name, whole.float().cpu()

    def _build_chunk(self, stage: int, seed: int) -> _StageModule:
        """Build the pieces of a stage, each cut and sharded before the next one is made."""
        plan = self._plan
        shape, layout = plan.shape, plan.layout
        mesh = data_mesh(self._mesh, layout)
        pieces: dict[int, nn.Module] = {}
        for index in plan.pieces_of(stage):
            piece = build_piece(shape, index, seed, self._device)
            if layout.tp > 1:
                cut_piece(piece, self._mesh["tp"], sequence_parallel=layout.sequence_parallel)
            if 0 < index < shape.num_pieces - 1:
                prepare_block(piece, plan, self._device, recomputed=plan.recomputes(stage, index))
            sharded = shard(piece, mesh, plan, reshard_after_forward=False)
            if not pieces:  # a chunk is gathered as a whole, so its first piece alone is counted
                count_collectives(sharded, self._counts)
            pieces[index] = piece
        chunk = _StageModule(pieces)
        shard(chunk, mesh, plan, reshard_after_forward=False)
        return chunk

    def _build_stage(self, index: int, chunk: _StageModule) -> ObservedStage:
        stage = ObservedStage(
            chunk,
            index,
            self._plan.schedule.num_stages,
            self._device,
            input_args=self._boundary(index),
            output_args=self._boundary(index + 1),
            group=self._mesh.get_group("pp"),
        )
        stage.observer, stage.clock = self._observe, self._clock
        return stage

    def _boundary(self, stage: int) -> Tensor:
        """A meta tensor with shape and type of a stage's input; ``stage`` = the number of stages
        gives those of the logits."""
        plan, shape = self._plan, self._plan.shape
        if stage == 0:
            return torch.empty(plan.microbatch_size, shape.seq, dtype=torch.int64, device="meta")
        split = plan.layout.tp if plan.layout.sequence_parallel else 1
        seq, width = shape.seq // split, shape.hidden
        if stage == plan.schedule.num_stages:
            seq, width = shape.seq, shape.vocab
        dtype = torch.bfloat16 if plan.precision != "fp32" else torch.float32
        return torch.empty(
            (plan.microbatch_size, seq, width), dtype=dtype, device="meta", requires_grad=True
        )

    def _observe(self, op: Op, stage: int, microbatch: int | None, start: float) -> None:
        if op.is_compute:
            self._counts[op.name.lower()] += 1
        self._add_span(op, str(Action(stage, op, microbatch)), start)
