"""The schema of published rows: what a row says wrongly is refused, never priced as another."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.validation.__main__ import main
from benchmarks.validation.cases import Case, case_of, plan_of
from benchmarks.validation.predict import outcome_of, predict
from benchmarks.validation.rows import (
    COLUMNS,
    METRICS,
    OPTIONAL,
    OTHER_TABLES,
    PublishedRow,
    UnpredictableError,
    read_rows,
    training_tables,
)
from tests.unit.published_cells import CELLS, LARGE, line_of, predicted, row, write_table

REQUIRED = tuple(name for name, field in PublishedRow.model_fields.items() if field.is_required())
FREE = ("source", "url", "table", "model", "remark")  # for people
LISTS = (
    "verified", "role", "program", "family", "gated_mlp", "tied_embeddings", "device",
    "sequence_parallel", "schedule", "recompute", "dtype", "offload", "metric", "unit",
)  # fmt: skip
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "micro_batch",
         "global_batch", "num_gpus", "tp", "pp", "dp", "chunks", "cp", "ep", "zero")  # fmt: skip
NUMBERS = (*SIZES, "memory_gib", "params_b", "value")
PROSE = (
    "{} (not stated)",
    "about {}",
    "{}?",
    " {}",
    "{} ",
    "{}, {}",
    "-{}",
    "{}k",
    "{} x 8",
    "{}M",
)


def good_rows() -> list[dict[str, str]]:
    """Cells of rows of the committed tables, and of one more, that all have a price."""
    lines = [line for table in training_tables() for line in read_rows(table)]
    understood = [line.cells for line in lines if line.row is not None]
    drawn = random.Random(0).sample(understood, 80)
    blank = dict.fromkeys(OPTIONAL, "")
    return [CELLS, *(blank | cells for cells in drawn if not isinstance(outcome(cells), str))]


def outcome(cells: dict[str, str]) -> tuple[PublishedRow, Case] | str:
    """The row and its case, or why it is refused."""
    try:
        made = PublishedRow.model_validate({k: v for k, v in cells.items() if v})
        return made, case_of(made)
    except (ValidationError, UnpredictableError) as error:
        return str(error)


GOOD = good_rows()


PRECISION_OF = {"fp32": "fp32", "fp8": "fp8", "mxfp8": "fp8"}


def assert_says(cells: dict[str, str], case: Case) -> None:
    """The case is what the cells say, read once more by other means."""
    shape, layout, dp = case.shape, case.layout, int(cells["dp"])
    # ZeRO-2 of FSDP is its SHARD_GRAD_OP.
    gathers = cells["zero"] == "3" or (cells["zero"], cells["program"]) == ("2", "llm_foundry")
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    both: dict[str, tuple[object, object]] = {
        **{name: (getattr(shape, name), int(cells[name])) for name in sizes},
        **{
            name: (getattr(layout, name), int(cells[name])) for name in ("tp", "pp", "dp", "chunks")
        },
        "gated_mlp": (shape.gates, {"yes": 2, "no": 1}[cells["gated_mlp"]]),
        "family": (shape.family, cells["family"]),
        "tied_embeddings": (shape.tied_embeddings, cells["tied_embeddings"] == "yes"),
        "cp": (layout.context, int(cells["cp"])),
        "copies of cp": (layout.context_copies, not gathers),
        "sequence_parallel": (layout.sequence_parallel, cells["sequence_parallel"] == "yes"),
        "zero": (case.gathers, gathers),
        "zero3_group": (layout.shard, int(cells["zero3_group"] or dp) if gathers else 1),
        "micro_batch": (case.microbatch, int(cells["micro_batch"])),
        "global_batch": (
            case.microbatch * case.num_microbatches * dp,
            int(cells["global_batch"]),
        ),
        "recompute": (case.recompute, cells["recompute"]),
        "ep": ("1", cells["ep"]),
        "offload": ("activations" if case.offload_blocks else "none", cells["offload"]),
        "offload_blocks": (str(case.offload_blocks or ""), cells.get("offload_blocks", "")),
        "dtype": (case.precision, PRECISION_OF.get(cells["dtype"], "bf16")),
        "schedule": (case.schedule, cells["schedule"] if layout.pp > 1 else "1f1b"),
        "program": (case.program.name, cells["program"]),
    }
    if cells["device"] != "stated":
        both["device"] = (case.cluster.device.name, cells["device"])
    assert {name: pair for name, pair in both.items() if pair[0] != pair[1]} == {}


def test_good_rows_are_priced_as_what_they_say() -> None:
    assert len(GOOD) > 50
    for cells in GOOD:
        found = outcome(cells)
        assert not isinstance(found, str), found
        assert_says(cells, found[1])


def test_600_mutated_rows_are_refused_or_priced_as_what_they_say() -> None:
    """Cells that are blank, those of another row, prose, other numbers, or in upper case."""
    draw = random.Random(1)
    refused = 0
    for _ in range(600):
        cells = dict(draw.choice(GOOD))
        name = draw.choice([column for column in COLUMNS if column not in FREE])
        other, prose = draw.choice(GOOD)[name], draw.choice(PROSE).replace("{}", cells[name])
        choices = ["", other, prose, str(draw.randint(0, 300)), cells[name].upper()]
        cells[name] = draw.choice(choices)
        found = outcome(cells)
        refused += isinstance(found, str)
        if not isinstance(found, str):
            assert_says(cells, found[1])
            assert set(cells["assumed"].split()) <= set(COLUMNS)
            assert cells["unit"] in METRICS[cells["metric"]].units
    assert 200 < refused < 500


@pytest.mark.parametrize("name", [*LISTS, *NUMBERS])
def test_what_is_no_value_of_a_typed_column_is_refused_by_name(name: str, tmp_path: Path) -> None:
    prose = [pattern.replace("{}", CELLS[name]) for pattern in PROSE]
    odd = ["nan", "inf", "1e999", "1,024", "8.5.1", "\u0668", "1_000", "0x8", "-1", "0"]
    odd = [cell for cell in odd if name in NUMBERS and (name, cell) != ("zero", "0")]
    cells = [*prose, *odd]
    lines = read_rows(write_table(tmp_path, *(CELLS | {name: cell} for cell in cells)))
    for cell, line in zip(cells, lines, strict=True):
        assert line.row is None
        assert (name if cell in odd else f"{name}={cell!r}") in line.refusal


@pytest.mark.parametrize("name", REQUIRED)
def test_a_blank_cell_that_must_be_given_is_refused(name: str, tmp_path: Path) -> None:
    line = line_of(tmp_path, **{name: ""})
    assert line.row is None
    assert line.refusal == f"blank, but must be given: {name}"


@pytest.mark.parametrize("name", [name for name in COLUMNS if name not in OPTIONAL])
def test_a_missing_column_is_refused(name: str, tmp_path: Path) -> None:
    cells = {column: cell for column, cell in CELLS.items() if column != name}
    with pytest.raises(SpecError, match=f"column '{name}' is missing"):
        read_rows(write_table(tmp_path, cells))


ZEROPP_ROW = {
    "program": "zeropp", "schedule": "zeropp", "zero": "3", "chunks": "2", "pp": "2", "dp": "4",
    "zero3_group": "2", "knobs": "unit=4 replicate_zero=1",
}  # fmt: skip


def test_a_row_of_zeropp_is_priced_by_its_own_planner() -> None:
    case = case_of(row(**ZEROPP_ROW))
    plan = plan_of(case)
    assert (plan.schedule.name, plan.schedule.unit, plan.program) == ("zeropp", 4, "zeropp")
    assert (plan.layout.shard, plan.layout.replicate, plan.layout.replicate_zero) == (2, 2, 1)
    larger = predicted(**ZEROPP_ROW | {"knobs": "unit=8"})
    assert predicted(**ZEROPP_ROW).value != larger.value


def test_other_schedules_have_no_knobs(tmp_path: Path) -> None:
    assert line_of(tmp_path, knobs="unit=4").refusal == "knobs: schedule=1f1b has none"
    with pytest.raises(UnpredictableError, match="schedule=zeropp: cannot be simulated with tp=2"):
        case_of(row(**ZEROPP_ROW | {"tp": "2", "dp": "2"}))


def test_a_line_with_another_number_of_cells_is_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path, CELLS)
    with table.open("a") as file:
        file.write("a,b\n\n")
    first, second = read_rows(table)
    assert first.row is not None
    assert second.refusal == f"2 cells, but {len(COLUMNS)} columns"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bf16 (fp32 grad accumulation)"}, "dtype='bf16 (fp32 grad accumulation)': must"),
        ({"dtype": "NVFP4"}, "dtype='NVFP4': must be one of 'fp32'"),
        ({"metric": "training_time", "unit": "days"}, "unit='days': must be one of"),
        ({"unit": "days"}, "unit='days': must be one of"),
        ({"unit": "tok/s"}, "unit='tok/s': step_time must be in us or ms or s or min"),
        ({"metric": "training_days"}, "metric='training_days': must be one of step_time"),
        ({"gated_mlp": "yes"}, "params_b=1.3: the shape has 1.72"),
        ({"hidden": "4096", "heads": "32", "kv_heads": "32"}, "params_b=1.3: the shape has"),
        ({"params_b": "1300"}, "params_b=1300: the shape has 1.318 billion parameters"),
        ({"params_b": "1.36"}, "params_b=1.36: the shape has 1.318 billion parameters"),
        ({"heads": "7"}, "heads=7: must divide hidden=2048"),
        ({"kv_heads": "5"}, "kv_heads=5: must divide heads=16"),
        ({"dp": "3"}, "num_gpus=8: tp=1 x pp=4 x dp=3 x cp=1 is 12"),
        ({"global_batch": "63"}, "global_batch=63: must be a multiple of micro_batch=2 x dp=2"),
        ({"schedule": "none"}, "schedule=none: pp=4"),
        ({"chunks": "2"}, "chunks=2: schedule=1f1b has 1"),
        ({"schedule": "interleaved_1f1b"}, "chunks=1: schedule=interleaved_1f1b has 2 or more"),
        ({"zero": "4"}, "zero=4"),
        ({"zero3_group": "2"}, "zero3_group=2: needs zero=3"),
        ({"sequence_parallel": "yes"}, "needs tp above 1"),
        ({"tp": "3", "num_gpus": "24"}, "tp=3: must divide heads=16"),
        ({"device": "stated"}, "device=stated: needs memory_gib, memory_bandwidth_gb_s"),
        ({"device": "stated", "memory_bandwidth_gb_s": "900", "peak_bf16_tflops": "90"},
         "products_tflops what large 16-bit products were measured to reach"),
        ({"memory_bandwidth_gb_s": "2.039"}, "memory_bandwidth_gb_s=2.039: must be from 50 to"),
        ({"memory_gib": "40960"}, "memory_gib=40960: must be from 1 to 2000"),
        ({"peak_bf16_tflops": "312000000000000"}, "peak_bf16_tflops=3.12e+14: must be from 5 to"),
        ({"seq": "2047", "tp": "2", "num_gpus": "16", "sequence_parallel": "yes"}, "of tp=2"),
        ({"intra_link": "pcie", "intra_gb_s": "31"}, "intra_gb_s=31: leave intra_link=pcie or it"),
        ({"program": "megatron"}, "program='megatron': not registered"),
        ({"assumed": "layers colour"}, "assumed='colour'"),
        ({"recompute_blocks": "3"}, "recompute_blocks=3: recompute=none"),
        ({"metric": "mfu", "unit": "fraction", "value": "45", "attention_flops": "full"}, "100 %"),
        ({"metric": "mfu", "unit": "%"}, "attention_flops='': must be full or causal for mfu"),
        ({"attention_flops": "full"}, "attention_flops='full': must be blank for step_time"),
        (ZEROPP_ROW | {"knobs": "hue=blue"}, "knobs='hue=blue': 'hue' must be one of unit, activ"),
        (ZEROPP_ROW | {"knobs": "pp=2"}, "knobs='pp=2': 'pp' must be one of unit"),
        (ZEROPP_ROW | {"knobs": "unit"}, "knobs='unit': 'unit' must be one of unit"),
        (ZEROPP_ROW | {"knobs": "unit=two"}, "knobs='unit=two': unit='two'"),
        (ZEROPP_ROW | {"knobs": "unit=0"}, "knobs='unit=0': unit=0: must be at least 1"),
        (ZEROPP_ROW | {"knobs": "about unit=4"}, "knobs='about unit=4': 'about' must be one of"),
        ({"value": "OOM"}, "value='OOM': must be a number above 0"),
        ({"metric": "ran_out_of_memory", "unit": "yes/no"}, "value='1.5': ran_out_of_memory must"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name_with_both_numbers(
    changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    line = line_of(tmp_path, **changes)
    assert line.row is None
    assert words in line.refusal


def test_grouped_attention_with_an_ungated_mlp_is_priced_as_such() -> None:
    grouped = {"family": "llama", "kv_heads": "4", "params_b": ""}
    gated, plain = (predicted(**grouped, gated_mlp=word).value for word in ("yes", "no"))
    assert 1.15 < gated / plain < 1.5  # three matrices for two in the MLP


def test_heads_are_as_wide_as_a_row_says() -> None:
    """Also where they are no divisor of the hidden size."""
    free, seven = {"params_b": "", "model": "GPT"}, {"heads": "7", "kv_heads": "7"}
    assert row(**free, head_width="128").shape.attended == row(**free).shape.attended
    narrow, wide = (predicted(**free, **seven, head_width=w).value for w in ("128", "256"))
    # Products of attention take 4 x 2048 x 7 x width, those of the MLP 8 x 2048 x 2048 parameters.
    assert 1.1 < wide / narrow < 1.3


def test_types_of_gradients_do_not_change_the_type_of_products() -> None:
    assert predicted(gradient_dtype="fp32").value == predicted().value
    assert predicted(dtype="fp32").value > 5 * predicted().value


def test_every_row_of_the_committed_tables_is_understood_or_says_why_not() -> None:
    lines = [line for table in training_tables() for line in read_rows(table)]
    refused = [line for line in lines if line.row is None]
    assert len(lines) == 2669
    # Sources that print no microbatch, no recomputation or, in fragments, not even the model.
    assert Counter(line.place.split(":")[0] for line in refused) == {
        "nanotron_ultrascale.csv": 16, "megascale.csv": 48, "nemo_2024_h100_fp8.csv": 24,
        "primus_schedules_mi300.csv": 18, "torchtitan_fp8.csv": 12, "deepspeed_pipelines.csv": 8,
        "megatron_bridge_sft_memory.csv": 6, "mlperf_llm.csv": 2, "colossalai.csv": 2,
        "megatron_llama_a100.csv": 1,
    }  # fmt: skip
    assert all("must be given" in line.refusal for line in refused)
    assert set(OTHER_TABLES) < {path.name for path in training_tables()[0].parent.glob("*.csv")}


def _page() -> str:
    return (CHECKOUT / "docs" / "published_rows.md").read_text(encoding="utf-8")


def test_the_page_describes_every_column_and_every_metric() -> None:
    named = re.findall(r"`([a-z0-9_]+)`", "\n".join(re.findall(r"^\| (`[^|]*)\|", _page(), re.M)))
    assert set(COLUMNS) | set(METRICS) == set(named)


def test_the_page_s_worked_row_is_read_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"<!-- template -->\n```csv\n(.*?)```", _page(), re.DOTALL)
    table = tmp_path / "mine.csv"
    table.write_text(block)
    (line,) = read_rows(table)
    assert tuple(line.cells) == COLUMNS
    assert line.row is not None
    assert abs(predict(line.row).relative_error) < 0.1
    assert main(["-v", str(table)]) == 0
    assert "1 of 1 rows predicted" in capsys.readouterr().out


MFU = {"metric": "mfu", "attention_flops": "full"}
MEMORY = {"metric": "peak_memory_allocated"}
PER_GPU = {"metric": "model_tflops_per_gpu", "unit": "TFLOP/s/GPU", "attention_flops": "full"}
H100 = {"device": "h100", "num_gpus": "8", "tp": "8", "pp": "1", "dp": "1", "schedule": "none"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unit": "ms"}, "set apart: value=1.5: simulated as"),
        ({"unit": "min", "value": "90"}, "set apart: value=90"),
        ({"value": "0.25"}, "set apart: value=0.25"),  # a sixth of the step
        ({"value": "6"}, "set apart: value=6"),  # four steps
        ({"metric": "tokens_per_s", "unit": "tok/s", "value": "9000000"}, "set apart"),
        ({"metric": "tokens_per_s_per_gpu", "unit": "tok/s/GPU", "value": "93859"}, "set apart"),
        ({"metric": "samples_per_s", "unit": "samples/s", "value": "93859"}, "set apart"),
        ({"metric": "steps_per_s", "unit": "1/s", "value": "1500"}, "set apart"),
        (PER_GPU | {"value": "852"}, "set apart: value=852"),
        (PER_GPU | {"value": "0.1066"}, "set apart: value=0.1066"),
        (PER_GPU | {"metric": "model_pflops", "unit": "PFLOP/s", "value": "106"}, "set apart"),
        (MFU | {"unit": "%", "value": "0.34"}, "value=0.34: mfu is 0.340%, not 1 to 100 %"),
        (MFU | {"unit": "%", "value": "34", "utilization_peak_tflops": "0.312"}, "set apart"),
        (MFU | {"unit": "%", "value": "34", "utilization_peak_tflops": "312000"}, "set apart"),
        (MEMORY | {"unit": "GiB", "value": "28000"}, "set apart: value=28000"),
        (MEMORY | {"unit": "MiB", "value": "28"}, "set apart: value=28"),
        (MEMORY | {"unit": "GB", "value": "240"}, "set apart: value=240"),
        (MEMORY | {"unit": "GiB", "value": "1.6"}, "set apart: value=1.6"),
        (MEMORY | {"unit": "GiB", "value": "3.4"}, "set apart: value=3.4"),  # of half a stage
        ({"metric": "layer_forward_time", "value": "0.001", "unit": "ms"}, "set apart"),
        ({"metric": "activation_memory", "value": "1", "unit": "MB"}, "set apart"),
        ({"global_batch": "8192"}, "set apart"),
        ({"global_batch": "131072"}, "24 x 32768 microbatches: too many"),  # in tokens
        (H100 | LARGE | {"value": "45"}, "set apart: num_gpus=8: a GPU of 80 GiB would need"),
        ({"heads": "2048", "kv_heads": "2048"}, "heads of 1 are not from 16 to 1024"),
        ({"head_width": "8"}, "heads of 8 are not from 16 to 1024"),
        ({"vocab": "25", "params_b": ""}, "vocab=25: must be at least 256"),
        ({"program": "fsdp", "tp": "2", "pp": "2"}, "program=fsdp: shards parameters alone"),
        ({"program": "llm_foundry"}, "not tp=1 or pp=4"),
        (
            {"schedule": "interleaved_1f1b", "chunks": "5", "layers": "32", "params_b": "",
             "model": "GPT"},
            "chunks=5: pp=4 x chunks do not divide layers=32",
        ),
        ({"layers": "12", "params_b": ""}, "model='GPT 1.3B': the shape has 0.7134 billion"),
        ({"layers": "12", "params_b": "", "value": "0.8", "model": "GPT 1.3B, 12 layers"}, ""),
    ],
)  # fmt: skip
def test_a_number_of_something_else_is_refused_or_set_apart(
    changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    reason = outcome_of(line_of(tmp_path, **changes)).reason
    assert words in reason
    assert bool(words) == bool(reason)


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
    assert outcome_of(line_of(tmp_path, **changes)).reason == ""


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
