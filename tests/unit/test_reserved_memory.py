"""The model of torch's caching allocator, by moves (number of an allocation, bytes in MiB)."""

from __future__ import annotations

import pytest

from benchmarks.studies.reserved_memory import replay


@pytest.mark.parametrize(
    ("moves", "default", "expandable"),
    [
        ([(0, 30), (0, -30), (1, 20), (2, 8)], 30, 40),  # the second and third in the first's place
        ([(0, 30), (1, 30), (0, -30), (2, 40)], 100, 100),  # the third does not fit into the hole
        ([(0, 30), (0, -30), (1, 60)], 90, 60),  # a segment that grows
        ([(0, 20), (1, 20), (2, 20), (0, -20), (1, -20), (3, 40)], 100, 60),  # two holes are one
        ([(0, 3), (1, 3), (2, 0.5), (3, 0.25)], 22, 22),  # small ones have segments of their own
    ],
)
def test_what_is_reserved(moves: list[tuple[int, float]], default: int, expandable: int) -> None:
    sizes = [(number, int(size * 2**20)) for number, size in moves]
    found = [replay(sizes, expandable=how) / 2**20 for how in (False, True)]
    assert found == [default, expandable]
