"""The committed table of eager kernels is what a trace of the code says."""

from __future__ import annotations

import pytest

from benchmarks.evidence.eager_kernels import rows_of
from zeropp.price.eager import passes


@pytest.mark.parametrize("code", ["llama", "gpt_neox", "suite llama"])
def test_the_table_is_what_a_trace_says(code: str) -> None:
    for row in rows_of(code, "bf16"):
        assert row == passes()[code, "bf16", row.part, row.name]
