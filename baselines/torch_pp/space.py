"""What the tuner tries for torch's pipelines. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from baselines.torch_pp.knobs import TorchPPKnobs, TorchSchedule
from baselines.torch_pp.plan import SCHEDULES, SPLIT_BACKWARD, UNSPLIT
from zeropp.literals import Recompute, if_auto
from zeropp.tune.space import (
    Point,
    Space,
    choices,
    chunk_choices,
    one_member,
    placement_choices,
    sequence_choices,
)

_CHUNKS: dict[TorchSchedule, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 4, 6, 8, 12),
    "looped_bfs": (2, 3, 4, 6, 8, 12),
    "interleaved_zb": (2, 3, 4, 6, 8, 12),
    "zbv": (2,),
    "dualpipev": (2,),
}
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def families(point: Point[TorchPPKnobs]) -> Iterator[TorchPPKnobs]:
    """All knobs to try at a point, none of them ``auto``."""
    asked, degrees = point.asked, point.degrees
    for sequence, placement, schedule in product(
        sequence_choices(asked.sequence_parallel, degrees),
        placement_choices(asked.placement, point),
        choices(asked.schedule, _schedules(asked, degrees.pp)),
    ):
        recomputes = _RECOMPUTE[:1] if schedule in SPLIT_BACKWARD else _RECOMPUTE
        for chunks, recompute, blocks in chunk_choices(point, _CHUNKS[schedule], recomputes):
            yield replace(
                asked,
                tp=degrees.tp,
                pp=degrees.pp,
                shard=degrees.shard,
                replicate=degrees.replicate,
                chunks=chunks,
                schedule=schedule,
                sequence_parallel=sequence,
                recompute=recompute,
                recompute_blocks=blocks,
                placement=placement,
                split_blocks=if_auto(asked.split_blocks, not point.task.shape.dropout),
            )


def _schedules(asked: TorchPPKnobs, pp: int) -> tuple[TorchSchedule, ...]:
    """The schedules to try. Torch refuses to split the backward of compiled blocks
    (``pipelining/schedules.py``: ``_check_torch_compile_compatibility``)."""
    if pp == 1:
        return ("1f1b",)
    return UNSPLIT if asked.compile else SCHEDULES


SPACE = Space(families=families, members=one_member, tensor=True, shards=(1, 0))
