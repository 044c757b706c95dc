"""Prices of model code that nothing fuses, from the table of its kernels."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from tests.unit.shapes import gpt
from tests.unit.simulated_task import cluster
from zeropp.price.activations import block_deferred, block_kept, block_saved
from zeropp.price.eager import TABLE, eager_pass
from zeropp.price.flops import linear_weights
from zeropp.price.pieces import (
    Work,
    block_traffic,
    block_traffic_backward,
    linears,
    piece_times,
)
from zeropp.price.programs import program_as_run
from zeropp.types.literals import Recompute
from zeropp.types.shape import ModelShape

H100 = cluster("h100").device
GPT = gpt(2, 1024, 16, seq=1024)
LLAMA = replace(GPT, name="llama", family="llama", kv_heads=4, ffn=2816, seq=16384)


def work(shape: ModelShape, **traits: object) -> Work:
    program = replace(program_as_run("zeropp", compiled=True), **traits)  # type: ignore[arg-type]
    return Work(
        shape=shape, device=H100, program=program, precision="bf16", recompute="none",
        microbatch=1, tp=1, sequence_parallel=False, accumulated=0.0,
    )  # fmt: skip


def test_kernels_written_by_hand_are_those_that_a_trace_sees() -> None:
    by_hand, traced = work(GPT), work(GPT, eager="suite gpt")
    assert block_traffic(traced) == block_traffic(by_hand)
    assert block_traffic_backward(traced) == block_traffic_backward(by_hand)
    counts = [
        eager_pass("suite gpt", GPT, "bf16", name).kernels for name in ("forward", "backward")
    ]
    assert counts == [5, 13]
    # the trace sees no number per row, which by hand are the sums of attention's scores
    assert block_saved(traced) == pytest.approx(block_saved(by_hand), rel=0.01)


def test_models_of_transformers_move_what_their_operators_do() -> None:
    both = [piece_times(work(LLAMA, eager=code), 0.0, 0.0, 0.0) for code in ("", "huggingface")]
    tokens, keys = LLAMA.seq, LLAMA.kv_heads * LLAMA.head_dim
    moved = tokens * (104 * LLAMA.hidden + 20 * keys + 10 * LLAMA.ffn)
    assert block_traffic(work(LLAMA, eager="huggingface")) == moved
    for by_hand, eager in zip(*((t.block, t.head) for t in both), strict=True):
        assert eager.forward > 1.01 * by_hand.forward
        assert eager.backward_input > 1.02 * by_hand.backward_input
        assert eager.backward_weight == by_hand.backward_weight


def test_what_is_compiled_runs_no_operator_alone() -> None:
    assert program_as_run("huggingface_fsdp", compiled=False).eager == "huggingface"
    compiled = program_as_run("huggingface_fsdp", compiled=True)
    assert (compiled.eager, compiled.traffic_factor) == ("", 1.0)


def test_operators_of_model_code_are_slower_by_the_factor_of_their_program() -> None:
    plain, slower = (work(LLAMA, eager="huggingface", traffic_factor=f) for f in (1.0, 1.5))
    assert block_traffic(slower) == 1.5 * block_traffic(plain)
    assert block_traffic_backward(slower) == 1.5 * block_traffic_backward(plain)


@pytest.mark.parametrize("recompute", ["none", "selective", "mlp", "full"])
@pytest.mark.parametrize(("shape", "code"), [(GPT, ""), (LLAMA, ""), (LLAMA, "huggingface")])
def test_heads_of_another_width_cost_their_products_attention_and_tensors(
    shape: ModelShape, code: str, recompute: Recompute
) -> None:
    """The width that heads have anyway changes nothing, to the last digit. With twice the width,
    attention and the products around it are those of twice as many heads as wide as before."""
    said, wide = (replace(shape, head_width=n * shape.head_dim) for n in (1, 2))
    plain, as_said, wider = (
        replace(work(one, eager=code, separate_projections=bool(code)), recompute=recompute)
        for one in (shape, said, wide)
    )
    for price in (block_kept, block_saved, block_deferred, block_traffic, block_traffic_backward):
        assert price(plain) == price(as_said)
        is_input = price is block_kept and recompute == "full"  # of the block, and no more
        assert (price(plain) == price(wider)) is is_input
    assert piece_times(plain, 0.0, 0.0, 0.0) == piece_times(as_said, 0.0, 0.0, 0.0)
    added = sum(k * n for k, n in linears(wider)) - sum(k * n for k, n in linears(plain))
    assert added == 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    assert added == linear_weights(wide) - linear_weights(shape)
    if not code:  # bytes of queries, keys, values and attention's output, and of what is rotated
        kept = 4 * (shape.heads + shape.kv_heads) * shape.head_dim
        kept += (2 * shape.hidden + 8 * shape.head_dim) * (shape.family == "llama")
        assert block_saved(wider) - block_saved(plain) == shape.seq * kept


def test_every_code_has_all_passes() -> None:
    with TABLE.open(encoding="utf-8") as file:
        rows = [tuple(row.values())[:4] for row in csv.DictReader(file)]
    codes = {code for code, *_ in rows}
    assert {"llama", "qwen2", "qwen3", "gpt_neox", "gpt2"} < codes
    assert len(set(rows)) == len(rows) == len(codes) * 2 * 2 * 3
