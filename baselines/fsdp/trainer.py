"""FSDP2 on one rank: gradient accumulation, with gradients reduced per microbatch or per step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from baselines.blocks import prepare_block
from baselines.fsdp.host import HostLane
from baselines.fsdp2 import (
    count_collectives,
    data_mesh,
    finish_step,
    full,
    shard,
    take_scales,
    world_mesh,
)
from baselines.model import build_piece, sliced_cross_entropy
from zeropp.engine.action_recorder import ActionRecorder
from zeropp.engine.update.update_rules import build_optimizer
from zeropp.price.programs import program_named
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import Action, Op
from zeropp.types.training import OptimizerConfig, StepResult


class FsdpTrainer(ActionRecorder):
    """A ``zeropp.types.training.Trainer`` on FSDP2's ``fully_shard``.

    Two releases are left out, because the same parameters would be the next to be gathered: the
    head stays gathered between its forward and its backward, and the embedding between the
    backward of a microbatch and the forward of the next one.
    """

    def __init__(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> None:
        super().__init__(0, device)
        self._plan, self._clip_norm = plan, optimizer.clip_norm
        self._hooks: list[RemovableHandle] = []
        self._microbatch = 0
        self._model = self._build_model(seed)
        self._optimizer = build_optimizer(self._model.parameters(), optimizer)

    def step(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """See ``Trainer.step``."""
        plan, model = self._plan, self._model
        assert isinstance(model, FSDPModule)
        first, last = model[0], plan.num_microbatches - 1
        program = program_named(plan.program)
        size = plan.microbatch_size
        batches = zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        self._begin_step()
        for self._microbatch, (x, y) in enumerate(batches):
            is_last = self._microbatch == last
            model.set_requires_gradient_sync(is_last or plan.reduce_every == "unit")
            model.set_requires_all_reduce(is_last)
            model.set_reshard_after_backward(is_last or program.reshard_after_backward)
            if isinstance(first, FSDPModule):
                first.set_reshard_after_backward(is_last)
            loss = sliced_cross_entropy(model(x), y) / plan.num_microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        result = finish_step(
            model.parameters(),
            total / plan.layout.dp,
            layout=plan.layout,
            device=self._device,
            clip_norm=self._clip_norm,
        )
        self._optimizer.step()
        take_scales(model, plan)
        return result

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Trainer.full_parameters``."""
        for name, parameter in self._model.named_parameters():
            yield name, full(parameter.detach()).float().cpu()

    def record_spans(self, enabled: bool) -> None:
        """See ``Trainer.record_spans``."""
        super().record_spans(enabled)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if enabled:
            for stage, piece in enumerate(self._model):
                self._observe(stage, piece)

    def _build_model(self, seed: int) -> nn.Sequential:
        """Build piece by piece and shard each before the next is made, which bounds the memory."""
        plan, shape = self._plan, self._plan.shape
        mesh = data_mesh(world_mesh(plan.layout, self._device), plan.layout)
        head = shape.num_pieces - 1
        sends = bool(plan.offloaded_stages)
        host = HostLane(self._device, plan.schedule.programs[0]) if sends else None
        pieces = []
        for index in range(shape.num_pieces):
            piece = build_piece(shape, index, seed, self._device)
            if 0 < index < head:
                prepare_block(
                    piece,
                    plan,
                    self._device,
                    recomputed=plan.recomputes(index, index),
                    # A compiled block keeps nothing in such a place.
                    kept=host.kept if host and not plan.compile else None,
                )
            if host:
                host.wrap(index, piece)
            # Tied embedding and head share a parameter, so both belong to the root module's group.
            if not (shape.tied_embeddings and index in (0, head)):
                again = index != head and program_named(plan.program).reshard_after_forward
                count_collectives(
                    shard(piece, mesh, plan, reshard_after_forward=again), self._counts
                )
            pieces.append(piece)
        model = nn.Sequential(*pieces)
        if shape.tied_embeddings:
            model[-1].output.weight = model[0].tokens.weight  # type: ignore[union-attr]
        root = shard(model, mesh, plan, reshard_after_forward=False)
        if shape.tied_embeddings:
            count_collectives(root, self._counts)
        return model

    def _observe(self, stage: int, piece: nn.Module) -> None:
        """Record a span per forward and backward of a piece, without FSDP2's waiting for gathers.

        The embedding's backward gets no span: a module's backward hook needs the gradient of an
        input, and token indices have none.
        """
        starts: dict[Op, float] = {}

        def begin(op: Op, *_: Any) -> None:
            starts[op] = self._clock()

        def end(op: Op, *_: Any) -> None:
            self._add_span(op, str(Action(stage, op, self._microbatch)), starts[op])

        self._hooks += [
            piece.register_forward_pre_hook(partial(begin, Op.FORWARD)),
            piece.register_forward_hook(partial(end, Op.FORWARD)),
        ]
        if stage > 0:
            self._hooks += [
                piece.register_full_backward_pre_hook(partial(begin, Op.FULL_BACKWARD)),
                piece.register_full_backward_hook(partial(end, Op.FULL_BACKWARD)),
            ]
