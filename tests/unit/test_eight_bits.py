"""Products of blocks in 8 bits (``precision=fp8``): who has them, and what their price is."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.records.own_cache import write
from benchmarks.records.simulated import TABLE, line_of, plan_record, read_table
from benchmarks.specification.contenders import CONTENDERS, PRICED
from benchmarks.verdict.study import key_of
from tests.unit.simulated_task import llama_task
from zeropp.choose.task import Candidate
from zeropp.price import price_plan, time_plan
from zeropp.price.flops import linear_weights, piece_parameters
from zeropp.price.pieces import cast_bytes, linears
from zeropp.price.price import work_of
from zeropp.types.layout import InfeasibleError

TASK = llama_task(64, 256, "fp8")
WITHOUT = ("deepspeed", "deepspeed_3d", "deepspeed_zero3", "megatron_core_local")


@pytest.mark.parametrize("name", PRICED)
def test_a_contender_gains_by_8_bits_or_says_why_it_has_none(name: str) -> None:
    contender = PRICED[name]
    knobs = contender.knobs()
    if name in WITHOUT:
        with pytest.raises(InfeasibleError, match=r"precision=fp8: .* 8 bits"):
            contender.plan(TASK, Candidate(knobs, 1))
        return
    eight, half = (
        contender.simulated(replace(TASK, precision=precision), Candidate(knobs, 1)).step_s
        for precision in ("fp8", "bf16")
    )
    assert 1.05 < half / eight < 1.85


@pytest.mark.parametrize(("name", "share"), [("fsdp", 1.0), ("torchtitan", 1.0), ("zeropp", 0.0)])
def test_gathers_bring_8_bits_where_weights_are_cast_before(name: str, share: float) -> None:
    """``share``: of the weights of blocks' products."""
    contender, shape = PRICED[name], TASK.shape
    knobs = replace(contender.knobs(), pp=1) if name != "fsdp" else contender.knobs()
    half, eight = (
        contender.size(replace(TASK, precision=precision), knobs, 1)
        for precision in ("bf16", "fp8")
    )
    stage = half.stage_of(5)
    blocks = half.blocks[stage]
    saved = share * blocks * linear_weights(shape)
    whole = sum(piece_parameters(shape, piece) for piece in half.pieces_of(stage))
    before, after = (price_plan(plan, TASK.cluster) for plan in (half, eight))
    freed = before.memory[stage].unsharded / after.memory[stage].unsharded
    assert freed == pytest.approx(2 * whole / (2 * whole - saved))
    gathers = [price.stages[stage].unshard for price in (before, after)]
    assert (gathers[1] < 0.7 * gathers[0]) is (share > 0)


def test_megatron_core_gathers_updated_blocks_in_8_bits() -> None:
    contender = PRICED["megatron_core"]
    knobs = replace(contender.knobs(), tp=2, pp=1, replicate=32, replicate_zero=1)
    plan = contender.size(TASK, knobs, 1)
    in_16 = replace(plan, program=plan.program + "+gathers_casts=false")
    eight_s, half_s = (
        time_plan(each, TASK.cluster).stages[0].gather_updated for each in (plan, in_16)
    )
    assert 0.4 < eight_s / half_s < 0.8


@pytest.mark.parametrize(("pp", "parts"), [(1, 1), (1, 4), (2, 1)])
def test_zeropps_casts_are_kernels_of_their_own_where_the_engine_adds_weight_gradients(
    pp: int, parts: int
) -> None:
    contender = PRICED["zeropp"]
    knobs = replace(contender.knobs(), pp=pp, gradient_parts=parts)
    added = pp > 1 or parts > 1
    assert contender.size(TASK, knobs, 1).program == "zeropp_fp8" + "_delayed" * added


def test_each_product_casts_for_itself_where_weight_gradients_wait() -> None:
    """Three products read six factors: each is read for its maximum and cast (5 bytes), and the
    second cast of each tensor copies its transpose (2)."""
    contender = PRICED["zeropp"]
    plan = contender.size(TASK, replace(contender.knobs(), pp=2), 1)
    work = work_of(plan, TASK.cluster)
    tensors = sum(work.tokens * (k + n) + k * n for k, n in linears(work))
    forward, backward = cast_bytes(work)
    assert forward + backward == (2 * 5 + 2) * tensors
    assert forward < backward


def test_a_table_says_the_precision_of_its_lines_and_older_ones_are_of_bf16(
    tmp_path: Path,
) -> None:
    eight, half = (
        line_of(plan_record(replace(TASK, precision=p), "zeropp", "best plans", words="none"))
        for p in ("fp8", "bf16")
    )
    older = {name: value for name, value in half.items() if name != "precision"}
    assert key_of(eight) != key_of(half) == key_of(older)
    write(tmp_path / TABLE, [eight, older])
    assert [r.spec["precision"] for r in read_table(tmp_path / TABLE)] == ["fp8", "bf16"]


def test_without_torchao_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    hidden = {"torchao", "torchao.float8"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in hidden else found(name)
    )
    for name in ("zeropp", "fsdp", "torch_pp"):
        assert CONTENDERS[name].missing("bf16") == ""
        assert CONTENDERS[name].missing("fp8") == (
            "precision=fp8: torchao is not installed here (run pip install -e '.[fp8]')"
        )
