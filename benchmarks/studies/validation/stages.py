"""What a published row may say of its pipeline: schedules by name, and where stages begin."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

ScheduleName = Literal[
    "none", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zbv",
    "interleaved_zb", "zeropp", "dualpipe", "dualpipev", "chimera", "hanayo", "v_half", "v_min",
    "seq1f1b",
]  # fmt: skip
CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zeropp", "hanayo", "seq1f1b")
TWO_CHUNKS = ("zbv", "dualpipe", "dualpipev", "v_half", "v_min")


def are_cuts(cuts: tuple[float, ...], stages: int, layers: int) -> bool:
    """Whether the numbers are where ``stages`` stages begin and the last one ends. The pieces are
    the embedding, ``layers`` blocks, and the head; a half is inside a block."""
    rising = all(begin < end for begin, end in pairwise(cuts))
    inside = all(1 <= cut < layers + 1 for cut in cuts if cut % 1)
    return rising and inside and (len(cuts) - 1, cuts[0], cuts[-1]) == (stages, 0, layers + 2)
