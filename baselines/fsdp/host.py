"""Offload of what blocks save for their backward, under FSDP2: by the engine's lanes to the host,
as the plan's program says. Torch's ``offload_wrapper`` also sends parameters, and lets compute wait
for every copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.layers.offload import HostMemory, Offload
from zeropp.schedule.program import COMPUTE, OFFLOAD, Action, Op, RankProgram


class HostLane:
    """Runs the stores, releases and loads of a microbatch beside its forwards and backwards, in
    which every piece is a stage; all microbatches have the same."""

    def __init__(self, device: torch.device, program: RankProgram) -> None:
        self._host = HostMemory(device, ExitStack())
        self._offloads: dict[int, Offload] = {}  # by stage
        self._keep: Callable[[Any], None] | None = None
        # What comes behind a stage's forward, and before its backward.
        self._actions: dict[tuple[int, bool], list[Action]] = defaultdict(list)
        is_backward, behind, before = False, list[Action](), list[Action]()
        for action in (action for action in program if action.microbatch == 0):
            if action.op in COMPUTE:
                if is_backward := action.op is not Op.FORWARD:
                    self._actions[action.stage, True], before = before, []
                behind = self._actions[action.stage, False]
            elif action.op in OFFLOAD:
                (before if is_backward or action.op is Op.LOAD else behind).append(action)

    def kept(self, context: Any) -> None:
        """Note where selective recomputation keeps tensors of the block that runs."""
        if self._keep is not None:
            self._keep(context)

    def wrap(self, stage: int, piece: nn.Module) -> None:
        """Let a piece's passes run what belongs to them, and send what it saves, except for its
        parameters, if the program stores it."""
        if any((stage, Op.STORE) == action[:2] for action in self._actions[stage, False]):
            self._offloads[stage] = Offload(self._host, [piece], lambda _: False)
        piece.forward = partial(self._forward, stage, piece, piece.forward)

    def _forward(
        self, stage: int, piece: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        if (offload := self._offloads.get(stage)) is None:
            self._keep, output = None, forward(*inputs)
        else:
            with offload.saving(piece, 0, piece.parameters()) as self._keep:
                output = forward(*inputs)
        self._run(stage, is_backward=False)
        output.register_hook(lambda _: self._begin_backward(stage))  # type: ignore[no-untyped-call]
        return output

    def _begin_backward(self, stage: int) -> None:
        self._run(stage, is_backward=True)
        if stage in self._offloads:
            self._offloads[stage].use(0)

    def _run(self, stage: int, *, is_backward: bool) -> None:
        for action in self._actions[stage, is_backward]:
            offload = self._offloads[action.stage]
            {Op.STORE: offload.store, Op.FREE: offload.free, Op.LOAD: offload.load}[action.op](0)
