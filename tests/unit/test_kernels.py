"""Sums over a GPU's kernels, from profiler traces written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.worker.kernels import Kernel, kernels_of, read_trace, summarise_kernels
from zeropp.schedule.program import parse_action

COMPUTE, GATHER = 7, 20  # streams
MICRO = 1e-6


def span(category: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": more}


def launched(number: int, at: float, stream: int, start: float, end: float) -> list[dict[str, Any]]:
    """A launch of two microseconds and its kernel."""
    return [
        span("cuda_runtime", "cudaLaunchKernel", at, at + 2, correlation=number),
        span("kernel", "gemm", start, end, correlation=number, stream=stream),
    ]


STEP = [
    span("user_annotation", "Optimizer.zero_grad#AdamW", 0, 3),
    *launched(1, 1, COMPUTE, 2, 3),  # outside of any action
    span("user_annotation", "4UNSHARD", 10, 20),
    *launched(2, 12, GATHER, 100, 160),
    span("user_annotation", "PP:0F0", 30, 50),
    *launched(3, 31, COMPUTE, 100, 140),
    *launched(4, 40, COMPUTE, 142, 150),
    span("user_annotation", "0I0", 60, 200),
    *launched(5, 188, COMPUTE, 195, 205),  # the host was late: 150 to 190
    span("cuda_runtime", "cudaDeviceSynchronize", 300, 400, correlation=99),
    {"ph": "M", "name": "process_name"},
]


def test_kernels_belong_to_the_action_that_launched_them(tmp_path: Path) -> None:
    path = tmp_path / "step.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": STEP}, file)
    kernels = kernels_of(read_trace(path))
    assert [str(kernel.action) for kernel in kernels] == ["4UNSHARD", "0F0", "0F0", "0I0"]
    assert kernels[-1].launched_s == pytest.approx(190 * MICRO)


def test_sums_over_a_step() -> None:
    sums = summarise_kernels(kernels_of(STEP))
    assert sums is not None
    assert sums.step_s == pytest.approx(105 * MICRO)
    assert sums.kernels_s == pytest.approx((40 + 8 + 10) * MICRO)
    assert sums.compute_s == pytest.approx((50 + 10) * MICRO)
    assert sums.compute_over_kernels == pytest.approx(60 / 58)
    assert sums.host_bound_s == pytest.approx(40 * MICRO)
    assert sums.gather_s == pytest.approx(60 * MICRO)
    assert sums.gather_beside_compute_s == pytest.approx(48 * MICRO)


def test_the_update_is_no_part_of_the_sums() -> None:
    update = [span("user_annotation", "0UPDATE", 400, 500), *launched(6, 410, COMPUTE, 420, 490)]
    assert len(kernels_of([*STEP, *update])) == len(kernels_of(STEP)) + 1
    assert summarise_kernels(kernels_of([*STEP, *update])) == summarise_kernels(kernels_of(STEP))


def test_a_step_on_a_cpu_has_no_kernels() -> None:
    assert (
        summarise_kernels(
            kernels_of([event for event in STEP if "kernel" not in event.get("cat", "")])
        )
        is None
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans(), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    )
)
def test_bounds_hold_for_any_kernels(raw: list[tuple[int, int, bool, int]]) -> None:
    """Kernels of a stream follow each other; everything else is free."""
    ends, kernels = {COMPUTE: 0, GATHER: 0}, []
    for number, (gap, length, gathers, lead) in enumerate(raw):
        stream = GATHER if gathers else COMPUTE
        start = ends[stream] + gap
        ends[stream] = start + length
        action = parse_action("0UNSHARD" if gathers else f"0F{number // 2}")
        kernels.append(
            Kernel(
                stream=stream,
                launched_s=max(0, start - lead),
                start_s=start,
                end_s=ends[stream],
                action=action,
            )
        )
    sums = summarise_kernels(sorted(kernels, key=lambda kernel: kernel.start_s))
    if sums is None:
        assert all(kernel.stream == GATHER for kernel in kernels)
        return
    assert sums.kernels_s <= sums.compute_s <= sums.step_s
    assert 0 <= sums.host_bound_s <= sums.step_s - sums.kernels_s
    assert 0 <= sums.gather_beside_compute_s <= min(sums.gather_s, sums.kernels_s)
