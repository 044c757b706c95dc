"""The rows of vTrain whose role is ``computed`` were not measured.

vTrain's repository (github:VIA-Research/vTrain@f8dda84) calls data/ground_truth_single.csv
measured. These tests hold what shows that its own predictor computed it, by the table alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from benchmarks.studies.validation.rows import PUBLISHED, PublishedRow, read_rows

Key = tuple[int, ...]


def key_of(row: PublishedRow) -> Key:
    """(hidden, tp, dp, microbatch size, layers, pp, number of microbatches)."""
    count = row.global_batch // (row.micro_batch * row.dp)
    return row.hidden, row.tp, row.dp, row.micro_batch, row.layers, row.pp, count


def nanoseconds() -> dict[Key, Fraction]:
    """The step times of these rows, as they are printed."""
    lines = read_rows(PUBLISHED / "vtrain_a100.csv")
    rows = [line.row for line in lines if line.row and line.row.role == "computed"]
    return {key_of(row): Fraction(row.value) * 10**6 for row in rows}


def test_all_times_are_whole_nanoseconds() -> None:
    times = nanoseconds()
    assert len(times) == 1440
    assert all(time.denominator == 1 for time in times.values())


def test_times_are_affine_in_the_microbatches_to_the_nanosecond() -> None:
    times = nanoseconds()
    bends = [
        (times[(*sizes, 4 * count)] - times[(*sizes, 2 * count)])
        - 2 * (times[(*sizes, 2 * count)] - times[(*sizes, count)])
        for *sizes, count in times
        if {(*sizes, 2 * count), (*sizes, 4 * count)} <= times.keys()
    ]
    assert len(bends) == 432
    assert not any(bends)


def test_pipelines_differ_by_the_predictors_formula_for_messages() -> None:
    """src/predictor.py, _compute_p2p_latency: a message has twice the bytes of its 16-bit
    activations and is sent at a quarter of 800 * 2^30 / 8 bytes per second. Pipelines of four and
    of two ranks differ by four such messages, once the time that grows with the layers is taken
    out."""
    excess = list(_excess(nanoseconds()))
    assert len(excess) == 40
    assert all(time == expected for time, expected in excess)


def _excess(times: dict[Key, Fraction]) -> Iterator[tuple[Fraction, Fraction]]:
    """(what four pipeline ranks take longer than two, four messages) at no layers, in
    nanoseconds."""
    for hidden, tp, dp, size, layers, pp, count in times:
        if (layers, pp, dp) == (12, 4, 1):
            thin, thick = ((hidden, tp, dp, size, depth) for depth in (12, 24))
            flat = [
                2 * times[(*thin, ranks, count)] - times[(*thick, ranks, count)] for ranks in (4, 2)
            ]
            sent = Fraction(2 * size * 1024 * hidden * 2, 25 * 2**30)
            yield flat[0] - flat[1], 4 * sent * 10**9
