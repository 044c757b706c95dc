"""Numbers in another unit, and cuts that are none: refused with column and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.validation.plausible import check_plausible
from benchmarks.validation.predict import outcome_of
from benchmarks.validation.rows import read_rows, training_tables
from tests.unit.published_cells import LARGE, line_of, predicted, row

MFU = {"metric": "mfu", "attention_flops": "full"}
MEMORY = {"metric": "peak_memory_allocated"}
PER_GPU = {"metric": "model_tflops_per_gpu", "unit": "TFLOP/s/GPU", "attention_flops": "full"}


def reason(folder: Path, **changes: str) -> str:
    """Why the good row with these cells has no prediction; empty if it has one."""
    return outcome_of(line_of(folder, **changes)).reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unit": "ms"}, "value=1.5: step_time in ms would be"),
        ({"unit": "min", "value": "90"}, "of the peak of a100"),
        ({"value": "1500"}, "of the peak of a100"),
        ({"metric": "tokens_per_s", "unit": "tok/s", "value": "9000000"}, "times the peak"),
        ({"metric": "tokens_per_s_per_gpu", "unit": "tok/s/GPU", "value": "93859"}, "times the"),
        ({"metric": "samples_per_s", "unit": "samples/s", "value": "93859"}, "times the peak"),
        ({"metric": "steps_per_s", "unit": "1/s", "value": "1500"}, "times the peak"),
        (PER_GPU | {"value": "852"}, "value=852: model_tflops_per_gpu in TFLOP/s/GPU would be 2."),
        (PER_GPU | {"value": "0.1066"}, "0.03% of the peak of a100"),
        (PER_GPU | {"metric": "model_pflops", "unit": "PFLOP/s", "value": "106"}, "times the peak"),
        (MFU | {"unit": "%", "value": "0.34"}, "value=0.34: mfu is 0.340%, not 1 to 100 %"),
        (MFU | {"unit": "%", "value": "34", "utilization_peak_tflops": "0.312"}, "of the peak"),
        (MFU | {"unit": "%", "value": "34", "utilization_peak_tflops": "312000"}, "times the"),
        (MEMORY | {"unit": "GiB", "value": "28000"}, "2.8e+04 GiB, and a100 has 80 GiB"),
        (MEMORY | {"unit": "MiB", "value": "28"}, "less than the 0.307 GiB of 16-bit parameters"),
        (MEMORY | {"unit": "GB", "value": "240"}, "and a100 has 80 GiB"),
        ({"metric": "layer_forward_time", "value": "0.001", "unit": "ms"}, "times the peak"),
        ({"metric": "activation_memory", "value": "1", "unit": "MB"}, "the input of one block"),
        ({"global_batch": "8192"}, "times the peak of a100"),
        ({"global_batch": "131072"}, "24 x 32768 microbatches: too many"),  # in tokens
    ],
)
def test_a_number_that_the_devices_cannot_reach_is_refused(
    changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    assert words in reason(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"unit": "ms", "value": "1500"},
        {"unit": "us", "value": "1500000"},
        {"metric": "tokens_per_s", "unit": "tok/s", "value": "93859"},
        {"metric": "tokens_per_s_per_gpu", "unit": "tok/s/GPU", "value": "11732"},
        PER_GPU | {"value": "107"},
        MFU | {"unit": "fraction", "value": "0.34"},
        MEMORY | {"unit": "GiB", "value": "28.4"},
        MEMORY | {"unit": "MB", "value": "30453"},
    ],
)
def test_the_same_numbers_in_their_own_units_are_priced(
    changes: dict[str, str], tmp_path: Path
) -> None:
    assert reason(tmp_path, **changes) == ""


V100 = {"device": "v100", "memory_gib": "32", "dtype": "fp16"}
H100 = {"device": "h100", "num_gpus": "8", "tp": "8", "pp": "1", "dp": "1", "schedule": "none"}
# Rows that were once priced without a word, as something else than what they say.
WRONG = {
    "tokens of one GPU called total": (
        {
            "metric": "tokens_per_s", "unit": "tok/s", "value": "11732", "num_gpus": "32",
            "dp": "8", "global_batch": "256",
        },
        "set apart: value=11732: the price is",
    ),
    "a sixth of the step": ({"value": "0.25"}, "times the peak of a100"),
    "a run of four steps": ({"value": "6"}, "set apart: value=6: the price is"),
    "memory a tenth": (MEMORY | {"unit": "GiB", "value": "1.6"}, "set apart: value=1.6"),
    "memory of half a stage's tensors": (
        MEMORY | {"unit": "GiB", "value": "3.4"}, "set apart: value=3.4"
    ),
    "70 W": ({"power_w": "70"}, "power_w=70: a a100 has 400 (from 160 to 500)"),
    "7 kW": ({"power_w": "4000"}, "power_w=4000: a a100 has 400"),
    "an H100's 175B that nothing shards": (
        H100 | LARGE | {"value": "45"}, "set apart: num_gpus=8: a GPU of 80 GiB would need"
    ),
    "a V100 with 80 GiB": (V100 | {"memory_gib": "80"}, "memory_gib=80: a v100 has 32"),
    "a V100 with bf16": (V100 | {"dtype": "bf16"}, "dtype='bf16': device=v100 has no products"),
    "an A100 with an H200's memory": ({"memory_bandwidth_gb_s": "4800"}, "a a100 has 2039"),
    "head size 1": ({"heads": "2048", "kv_heads": "2048"}, "heads of 1 are not from 16 to 1024"),
    "vocabulary 25": ({"vocab": "25", "params_b": ""}, "vocab=25: must be at least 256"),
    "3 GPUs per node with TP 4": (
        {"gpus_per_node": "3", "tp": "4", "pp": "1", "schedule": "none"}, "gpus_per_node=3: neither"
    ),
    "an FSDP program with TP": (
        {"program": "fsdp", "tp": "2", "pp": "2"}, "program=fsdp: shards parameters alone, not tp=2"
    ),
    "an FSDP program with a pipeline": ({"program": "llm_foundry"}, "not tp=1 or pp=4"),
    "5 chunks of 8 layers": (
        {
            "schedule": "interleaved_1f1b", "chunks": "5", "layers": "32", "pp": "4",
            "params_b": "", "model": "GPT",
        },
        "chunks=5: pp=4 x chunks do not divide layers=32",
    ),
    "half the layers and no parameters": (
        {"layers": "12", "params_b": ""}, "model='GPT 1.3B': the shape has 0.7134 billion"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_row_of_something_else_is_refused_or_set_apart(what: str, tmp_path: Path) -> None:
    changes, words = WRONG[what]
    assert words in reason(tmp_path, **changes)


def test_a_model_of_fewer_layers_is_priced_if_its_name_says_so(tmp_path: Path) -> None:
    half = {"layers": "12", "params_b": "", "value": "0.8"}
    assert reason(tmp_path, **half, model="GPT 1.3B, 12 layers") == ""


def test_types_narrower_than_16_bits_may_be_faster_than_its_peak(tmp_path: Path) -> None:
    above_bf16 = PER_GPU | {"device": "h100", "memory_gib": "", "value": "1000"}
    assert reason(tmp_path, **above_bf16, dtype="nvfp4") == (
        "dtype=nvfp4: no rate for products of this type"
    )
    assert "set apart" in reason(tmp_path, **above_bf16, dtype="fp8")
    assert "times the peak of h100" in reason(tmp_path, **above_bf16 | {"value": "1200"})


def test_a_device_whose_peak_is_not_known_is_held_to_its_products() -> None:
    v100 = {"device": "v100", "memory_gib": "", "dtype": "fp16"}
    check_plausible(row(**v100))
    with pytest.raises(ValueError, match=r"value=0\.1: .* times the peak of v100"):
        check_plausible(row(**v100, value="0.1"))


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ("0,7,13,19,26", "cuts='0,7,13,19,26': must be numbers of pieces with one space"),
        ("0 7 13 26", "cuts='0 7 13 26': needs pp > 1"),
        ("0 7 13 19 25", "from 0 to layers + 2 = 26"),
        ("1 7 13 19 26", "where pp=4 x chunks=1 stages begin and end"),
        ("0 13 7 19 26", "cuts='0 13 7 19 26'"),
        ("0 7.5 13 19 26", "cuts='0 7.5 13 19 26': must be"),
        ("even", "cuts='even': must be"),
    ],
)
def test_cuts_that_are_none_are_refused(cuts: str, words: str, tmp_path: Path) -> None:
    line = line_of(tmp_path, cuts=cuts)
    assert line.row is None
    assert words in line.refusal


def test_cuts_change_the_price_and_those_of_the_rule_do_not() -> None:
    even, uneven = (predicted(cuts=cuts).value for cuts in ("0 7 13 19 26", "0 2 4 9 26"))
    assert even == predicted().value
    assert uneven > 1.3 * even


def test_no_committed_number_is_refused() -> None:
    rows = [line.row for table in training_tables() for line in read_rows(table)]
    understood = [row for row in rows if row is not None]
    assert len(understood) > 2200
    for one in understood:
        check_plausible(one)
