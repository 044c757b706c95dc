"""The vocabulary of a pipeline program: one frozen action, and its text form.

The names and the text form are those of ``torch.distributed.pipelining`` (``0F3``, ``0I3``,
``0W3``, ``0B3``, ``0UNSHARD``, ``0SEND_F3`` ...), so that a program written here can be run by
torch's own runtime and compared.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """What an action does to its stage. The value is the abbreviation that torch uses."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"  # gradient of the stage's input only
    BACKWARD_WEIGHT = "W"  # gradient of the stage's parameters, from tensors that "I" has kept
    FULL_BACKWARD = "B"  # both at once
    UNSHARD = "UNSHARD"  # gather the stage's parameters over its shard group
    RESHARD = "RESHARD"  # release the gathered parameters
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce-scatter the stage's accumulated gradients
    SEND_F = "SEND_F"  # activation to the next stage
    RECV_F = "RECV_F"  # activation from the previous stage
    SEND_B = "SEND_B"  # gradient to the previous stage
    RECV_B = "RECV_B"  # gradient from the next stage

    @property
    def is_compute(self) -> bool:
        """True for actions that occupy the compute stream."""
        return self in COMPUTE

    @property
    def is_transfer(self) -> bool:
        """True for point-to-point sends and receives."""
        return self in TRANSFER

    @property
    def has_microbatch(self) -> bool:
        """True for compute and transfers; the other actions concern all microbatches."""
        return self in COMPUTE or self in TRANSFER


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD})
TRANSFER = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
COLLECTIVE = frozenset({Op.UNSHARD, Op.REDUCE_GRAD})  # those that take time on the link

NEEDS_PARAMETERS = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.FULL_BACKWARD})
MAKES_GRADIENTS = frozenset({Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD})
COMPLETES = MAKES_GRADIENTS | {Op.REDUCE_GRAD}  # after the last of them a gradient is complete

_PATTERN = re.compile(rf"(\d+)({'|'.join(Op)})(\d*)")


class Action(NamedTuple):
    """One step of one rank's program.

    ``stage`` is the global index of the stage, from 0 to P*V-1. ``microbatch`` is None for the
    actions that concern a stage's parameters as a whole, and a number for all others. This is a
    tuple and not a dataclass because a training step of 64 ranks has a million actions.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the garbage collector off while very many actions are created.

    Actions hold no reference cycles, so there is nothing for it to find; but it would walk through
    all of them again and again, which takes most of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_action(text: str) -> Action:
    """Read one action in torch's text form. Raises ValueError if the text is no action."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an action: {text!r} (examples: 0F3, 2I1, 1UNSHARD, 0SEND_F3)")
    stage, op, microbatch = match.groups()
    if Op(op).has_microbatch != bool(microbatch):
        need = "needs a" if Op(op).has_microbatch else "takes no"
        raise ValueError(f"not an action: {text!r} ({op} {need} microbatch)")
    return Action(int(stage), Op(op), int(microbatch) if microbatch else None)
