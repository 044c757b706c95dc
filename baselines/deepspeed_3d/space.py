"""What the tuner tries for DeepSpeed's 3D parallelism. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from baselines.deepspeed_3d.knobs import DeepSpeedKnobs
from zeropp.literals import ReplicateZero
from zeropp.tune.space import Point, Space, choices, one_member, zero_choices

_RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")


def families(point: Point[DeepSpeedKnobs]) -> Iterator[DeepSpeedKnobs]:
    """All knobs to try at a point, none of them ``auto``. With bf16 DeepSpeed runs ZeRO-1 only."""
    asked, degrees = point.asked, point.degrees
    zeros: tuple[ReplicateZero, ...] = zero_choices(asked.replicate_zero, degrees)
    if point.task.precision == "bf16" and asked.replicate_zero == "auto":
        zeros = (1,)
    for zero, recompute in product(zeros, choices(asked.recompute, _RECOMPUTE)):
        yield replace(
            asked,
            tp=degrees.tp,
            pp=degrees.pp,
            replicate=degrees.replicate,
            replicate_zero=zero,
            recompute=recompute,
        )


SPACE = Space(families=families, members=one_member, tensor=True)
