"""Bytes of one stage on one rank: parameters, gradients, optimizer, activations, temporaries.

Parameters, gradients and optimizer state come from ``zeropp.cost.state_memory``, and the sizes of
activations from ``zeropp.cost.activations``. A test compares the sums with traces
(``zeropp.engine.traced_ranks``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zeropp.cost.activations import (
    block_backward,
    block_deferred,
    block_forward,
    block_kept,
    boundary_bytes,
    half_backward,
    half_deferred,
    half_saved,
    head_backward,
    head_deferred,
    head_forward,
    head_kept,
    logits_bytes,
)
from zeropp.cost.blocks import Work
from zeropp.cost.kernels import element_bytes
from zeropp.cost.plan_price import StageMemory
from zeropp.cost.state_memory import state_memory
from zeropp.literals import BlockHalf

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


def stage_memory(plan: SizedPlan, work: Work, stage: int) -> StageMemory:
    """Bytes of one stage on one of its ranks."""
    head = plan.shape.num_pieces - 1 in plan.pieces_of(stage)
    message, buffers = _messages(plan, work, stage)
    halves = tuple(half for _, half in plan.halves_of(stage))
    repeated = plan.recomputed_blocks(stage)
    plain = plan.blocks_of(stage) - repeated
    return StageMemory(
        buffers=int(buffers),
        **_of_microbatch(
            work, plain=plain, repeated=repeated, halves=halves, head=head, message=message
        ),
        **state_memory(plan, work, stage),
    )


@lru_cache(maxsize=16384)
def _of_microbatch(
    work: Work,
    *,
    plain: int,
    repeated: int,
    halves: tuple[BlockHalf, ...],
    head: bool,
    message: float,
) -> dict[str, int]:
    """The bytes of one microbatch in a stage of ``plain`` blocks, ``repeated`` blocks that are
    recomputed and ``halves`` of blocks, by the fields of StageMemory; ``message`` is what it holds
    for messages. Many plans have such stages."""
    blocks = _blocks(work, plain, repeated, halves)
    activations, later = _kept(work, blocks, head=head)
    activations += message
    return {
        "activations": int(activations),
        "deferred": int(later),
        "boundary": int(boundary_bytes(work)),
        **_moments(
            work, blocks, repeated=repeated, head=head, activations=activations, later=later
        ),
    }


class _Block(NamedTuple):
    """Bytes of one block, or of half a block, for one microbatch."""

    kept: float  # from its forward to its backward
    deferred: float  # from its input gradient to its weight gradient
    split: float  # at the fullest moment of its input gradient
    full: float  # at the fullest moment of its full backward


def _blocks(work: Work, whole: int, repeated: int, halves: tuple[BlockHalf, ...]) -> list[_Block]:
    """The blocks and halves of blocks of a stage, in their order; the first ones are recomputed,
    and ``whole`` ones follow that are not."""
    plain = replace(work, recompute="none")
    held = repeated * [_block(work)] if repeated else []
    held += whole * [_block(plain)]
    for half in halves:
        held.insert(0 if half == "mlp" else len(held), _half(plain, half))
    return held


def _block(work: Work) -> _Block:
    return _Block(
        block_kept(work),
        block_deferred(work),
        block_backward(work, split=True),
        block_backward(work, split=False),
    )


def _half(work: Work, half: BlockHalf) -> _Block:
    return _Block(
        half_saved(work, half),
        half_deferred(work, half),
        half_backward(work, half, split=True),
        half_backward(work, half, split=False),
    )


def _kept(work: Work, blocks: list[_Block], *, head: bool) -> tuple[float, float]:
    """(bytes kept from a forward to its input gradient, bytes kept from there to its weight
    gradient). Torch's pipeline stages also keep their outputs and, with delayed weight gradients,
    the gradient of their input."""
    runtime = work.program.torch_stages
    output = 0.0 if head or not runtime else boundary_bytes(work)
    activations = sum(block.kept for block in blocks) + head * head_kept(work) + output
    later = sum(block.deferred for block in blocks) + head * head_deferred(work)
    return activations, later + (boundary_bytes(work) if runtime else 0.0)


def _messages(plan: SizedPlan, work: Work, stage: int) -> tuple[float, float]:
    """(bytes per microbatch from its forward to its backward, bytes that are always held) for
    messages, in addition to a message itself.

    DeepSpeed's pipeline engine receives into two permanent buffers, copies inputs out of them
    twice, and keeps outputs, of which each TP rank has a part; the last stage keeps the logits of
    two microbatches (``runtime/pipe/engine.py``: ``pipe_buffers``).
    """
    if not work.program.pipe_buffers:
        return 0.0, 0.0
    part = boundary_bytes(work) / work.tp
    held = buffers = 0.0
    if stage > 0:
        buffers += part
        held += part * (work.tp == 1)
    if stage < plan.schedule.num_stages - 1:
        held, buffers = held + part, buffers + part
    else:
        outputs = min(2, plan.num_microbatches)
        buffers += outputs * logits_bytes(work, element_bytes(work.precision))
    return held, buffers


def _moments(
    work: Work, blocks: list[_Block], *, repeated: int, head: bool, activations: float, later: float
) -> dict[str, int]:
    """The stage's bytes of a microbatch at the fullest moment of its forward and of each backward.

    ``repeated`` is the number of blocks that are recomputed. A backward goes through the blocks
    from the last one to the first: blocks that it has not reached still keep their tensors, and
    those that it has passed keep what their weight gradients need.
    """
    plain = work if repeated == len(blocks) else replace(work, recompute="none")
    last = block_forward(plain) - block_kept(plain) if blocks else 0.0
    again = block_forward(work) - block_kept(work) if repeated else 0.0
    in_head = head_forward(work) if head else 0.0
    split = full = activations + head * head_backward(work)
    before, behind = sum(block.kept for block in blocks), 0.0
    for block in reversed(blocks):
        before -= block.kept
        split = max(split, behind + before + block.split)
        full = max(full, before + block.full)
        behind += block.deferred
    if blocks:  # when the first block is reached, the head waits for its weight gradient, too
        split = max(split, later - blocks[0].deferred + blocks[0].split)
    return {
        "forward": int(activations + max(last, again, in_head)),
        "backward_input": int(max(split, later)),
        "full_backward": int(full),
    }
