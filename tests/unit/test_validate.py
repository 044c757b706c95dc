"""benchmarks.validation: every row is priced as what it says, or refused with its reason."""

from __future__ import annotations

import csv
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.specification.contenders import PRICED
from benchmarks.validation.__main__ import main
from benchmarks.validation.cases import case_of, even_cuts, module_cuts, plan_of
from benchmarks.validation.errors import errors_of, first_of_runs, predictions_of
from benchmarks.validation.predict import outcome_of
from benchmarks.validation.rows import UnpredictableError, read_rows, training_tables
from benchmarks.validation.stated import cluster_of, measured_s, preset_of, speed
from tests.unit.published_cells import CELLS, LARGE, line_of, predicted, row, write_table
from tests.unit.simulated_task import task
from zeropp.price import compute_limit, price_plan
from zeropp.price.pieces import attention_s
from zeropp.price.price import work_of
from zeropp.price.programs import Program, program_named
from zeropp.price.simulator import simulate


def value(**changes: str) -> float:
    return predicted(**changes).value


def test_metrics_and_units_of_one_step_agree() -> None:
    step = value()
    assert value(unit="ms", value="1500") == pytest.approx(step * 1e3)
    assert value(metric="steps_per_s", unit="1/s") == pytest.approx(1 / step)
    samples = value(metric="samples_per_s", unit="samples/s", value="43")
    assert samples == pytest.approx(64 / step)
    tokens = value(metric="tokens_per_s_per_gpu", unit="tok/s/GPU", value="11000")
    assert tokens == pytest.approx(samples * 2048 / 8)
    whole = value(metric="tokens_per_s", unit="tok/s", value="87000")
    assert whole == pytest.approx(tokens * 8)
    full = {"attention_flops": "full"}
    tflops = value(metric="model_tflops_per_gpu", unit="TFLOP/s/GPU", **full)
    assert value(metric="mfu", unit="%", **full) == pytest.approx(tflops / 312 * 100)
    share = value(metric="mfu", unit="fraction", value="0.5", **full)
    assert share == pytest.approx(tflops / 312)
    pflops = value(metric="model_pflops", unit="PFLOP/s", value="0.9", **full)
    assert pflops == pytest.approx(tflops * 8 / 1e3)
    gib = value(metric="peak_memory_allocated", unit="GiB")
    assert value(metric="peak_memory_allocated", unit="GB") == pytest.approx(gib * 2**30 / 1e9)


@pytest.mark.parametrize(
    "metric",
    [
        {"metric": "step_time", "unit": "ms", "value": "1500"},
        {"metric": "steps_per_s", "unit": "1/s", "value": "0.6"},
        {"metric": "tokens_per_s_per_gpu", "unit": "tok/s/GPU", "value": "11000"},
        {"metric": "model_pflops", "unit": "PFLOP/s", "value": "0.9", "attention_flops": "full"},
        {"metric": "hfu", "unit": "%", "value": "40", "attention_flops": "causal"},
    ],
)
def test_the_speed_of_the_seconds_that_a_number_says_is_that_number(metric: dict[str, str]) -> None:
    published = row(**metric)
    device = cluster_of(published).device
    step_s = measured_s(published, device)
    assert 0.1 < step_s < 10
    in_the_unit = speed(published, device, step_s) * published.measure.units[published.unit]
    assert in_the_unit == pytest.approx(published.measured)


def test_a_utilisation_is_a_share_of_the_stated_peak() -> None:
    mfu = {"metric": "mfu", "unit": "%", "attention_flops": "full"}
    assert value(**mfu, utilization_peak_tflops="624") == pytest.approx(value(**mfu) / 2)
    with pytest.raises(UnpredictableError, match="utilization_peak_tflops='': no peak of device"):
        predicted(**mfu, device="v100", memory_gib="32", dtype="fp16")


def test_flops_count_recomputation_and_attention_as_the_row_says() -> None:
    flops = {"unit": "TFLOP/s/GPU", "recompute": "full"}
    model = value(metric="model_tflops_per_gpu", attention_flops="full", **flops)
    hardware = value(metric="hardware_tflops_per_gpu", attention_flops="full", **flops)
    assert 1.2 < hardware / model < 4 / 3
    causal = value(metric="model_tflops_per_gpu", attention_flops="causal", **flops)
    assert 0.9 < causal / model < 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ep": "2"}, "ep=2"),
        ({"dtype": "fp8"}, "dtype=fp8"),
        ({"dtype": "nvfp4"}, "dtype=nvfp4"),
        ({"dtype": "tf32"}, "dtype=tf32"),
        ({"schedule": "dualpipe", "chunks": "2"}, "no generator"),
        ({"offload": "optimizer"}, "host's memory"),
        ({"offload": "activations", "offload_blocks": "3"}, "host's memory"),
        ({"recompute": "full", "recompute_blocks": "6"}, "recompute_blocks=6"),
        ({"zero": "3", "program": "megatron_deepspeed_2022"}, "its ZeRO-3 cannot be simulated"),
        ({"schedule": "interleaved_1f1b", "chunks": "2", "micro_batch": "16"}, "groups of pp=4"),
        ({"global_batch": "9999998", "micro_batch": "1"}, "too many"),
    ],
)
def test_what_has_no_price_is_refused(changes: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnpredictableError, match=reason):
        predicted(**changes)
    assert reason in outcome_of(line_of(tmp_path, **changes)).reason


LLAMA_8B = {
    "program": "torchtitan_compiled", "model": "Llama 3 8B", "params_b": "", "family": "llama",
    "gated_mlp": "yes", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256", "seq": "8192", "tied_embeddings": "no", "memory_gib": "",
    "num_gpus": "8", "pp": "1", "dp": "8", "zero": "3", "schedule": "none", "micro_batch": "1",
    "global_batch": "8", "recompute": "selective", "metric": "tokens_per_s", "unit": "tok/s",
    "value": "60000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "scaling", "gain"),
    [("h100", "tensorwise", 25), ("h100", "rowwise", 10), ("b200", "tensorwise", 25),
     ("b200", "rowwise", 4), ("b200", "mx", 20)],
)  # fmt: skip
def test_what_8_bits_gain_depends_on_device_and_scaling(
    device: str, scaling: str, gain: float
) -> None:
    """Runs of torchtitan, in workflows/training.md and the README of mx_formats of torchao."""
    dtype = "mxfp8" if scaling == "mx" else "fp8"
    wide = value(**LLAMA_8B, device=device)
    eight = value(**LLAMA_8B, device=device, dtype=dtype, scaling=scaling)
    assert 100 * (eight / wide - 1) == pytest.approx(gain, abs=5)
    by_default = value(**LLAMA_8B, device=device, dtype=dtype)
    assert (by_default == eight) is (scaling != "rowwise")


def test_offloaded_blocks_make_a_run_fit_and_cost_what_the_link_cannot_hide() -> None:
    """NVIDIA's recipe of Llama 70B on GB200: 40 of 80 blocks, without which it does not fit."""
    table = next(path for path in training_tables() if path.stem == "megatron_bridge_fp8")
    rows = (line.row for line in read_rows(table))
    of_recipe = next(
        row for row in rows if row and (row.offload_blocks, row.device) == (40, "gb200")
    )
    case = case_of(of_recipe)
    peaks, steps = [], []
    for blocks in (0, 40, 79):
        plan = plan_of(replace(case, offload_blocks=blocks))
        result = simulate(plan, case.cluster, price=price_plan(plan, case.cluster, case.program))
        peaks.append(result.peak_bytes / case.cluster.device.usable_bytes)
        steps.append(result.step_s)
        assert (result.memory[0].host > 0) is (blocks > 0)
    assert peaks[0] > 1.5
    assert peaks[1] == pytest.approx(1.0, abs=0.05)
    assert steps[0] <= steps[1] < 1.01 * steps[0] < steps[2]


def test_products_in_8_bits_are_faster_by_less_than_their_gain() -> None:
    h100 = {"device": "h100", "num_gpus": "8", "pp": "1", "dp": "8", "schedule": "none"}
    wide, eight = (value(**h100, dtype=dtype) for dtype in ("bf16", "fp8"))
    assert 1.1 < wide / eight < 1.85  # casts, attention, the head and all else stay as they were


def test_no_measured_run_is_faster_than_the_compute_limit() -> None:
    """Those of every generation: the limit has the newest kernels of a device. It assumes 16 bytes
    of states per parameter, where llm.q keeps 10, so that larger microbatches fit, and what is
    between the products of a Llama; nanochat has less of it (norms without weights, ReLU)."""
    over = {}
    for line in (line for table in training_tables() for line in read_rows(table)):
        one = line.row
        if one is None or one.dtype not in ("bf16", "fp16") or one.cp > 1 or one.program == "llmq":
            continue
        if one.source == "nanochat pull 147":
            continue
        if one.measure.kind in ("layer", "memory", "limit"):
            continue
        cluster = cluster_of(one)
        limit = compute_limit(one.shape, cluster, one.num_gpus, "bf16").tokens_per_s_per_gpu
        seconds = measured_s(one, cluster.device)
        reached = one.global_batch * one.seq / one.num_gpus / seconds
        if reached > limit:
            over[line.place] = reached / limit
    assert over == {}


def test_slices_of_a_sequence_wait_for_the_keys_and_values_of_the_others() -> None:
    """Two ranks with half a sequence each take about as long as two with a sequence each and half
    as many sequences: attention is the same, and the exchange comes on top."""
    long = {
        "seq": "32768", "pp": "1", "schedule": "none", "micro_batch": "1",
        "params_b": "", "global_batch": "64", "value": "25",
    }  # fmt: skip
    whole = value(**long, dp="8")
    sliced = value(**long, dp="4", cp="2")
    assert 1.0 < sliced / whole < 1.1
    memory = {"metric": "activation_memory", "unit": "GiB"}
    parts = [
        value(**long | memory | {"value": "99"}, **d) for d in ({"dp": "8"}, {"dp": "4", "cp": "2"})
    ]
    assert parts[1] < 0.51 * parts[0]


@pytest.mark.parametrize("ran_out", [True, False])
def test_a_row_of_memorys_limit_is_held_against_the_device(ran_out: bool) -> None:
    limit = {
        "metric": "ran_out_of_memory", "unit": "yes/no", "value": "yes" if ran_out else "no"
    }  # fmt: skip
    for changes, text in ((LARGE, "OOM"), ({}, "fits")):
        one = predicted(**changes, **limit)
        assert one.text == text
        assert one.relative_error == float((text == "OOM") != ran_out)


def test_zero_bubble_with_twice_the_memory_is_faster_and_holds_twice_the_activations() -> None:
    deep = {
        "program": "zero_bubble", "pp": "8", "dp": "1", "layers": "30", "params_b": "",
    }  # fmt: skip
    memory = {"metric": "activation_memory", "unit": "GiB"}
    plain, more = (value(**deep, **memory, schedule=s) for s in ("1f1b", "zb_h2"))
    assert 1.7 < more / plain < 2.3
    assert value(**deep, schedule="zb_h2") < value(**deep, schedule="zb_h1")
    assert value(**deep, schedule="zb_h1") < value(**deep, schedule="1f1b")


@pytest.mark.parametrize("whole", [False, True])
def test_recomputing_a_part_of_the_blocks_costs_a_part(whole: bool) -> None:
    fsdp = {"program": "fsdp", "pp": "1", "dp": "8", "zero": "3", "schedule": "none"}
    more = fsdp if whole else {}
    none, all_ = value(**more), value(**more, recompute="full")
    half = value(**more, recompute="full", recompute_blocks="12")
    assert half == pytest.approx((none + all_) / 2, rel=0.02)
    assert value(**more, recompute="full", recompute_blocks="24") == pytest.approx(all_)
    flops = {"metric": "hardware_tflops_per_gpu", "unit": "TFLOP/s/GPU", "attention_flops": "full"}
    counted = [
        value(**flops, **more) * none,
        value(**flops, **more, recompute="full") * all_,
        value(**flops, **more, recompute="full", recompute_blocks="12") * half,
    ]
    assert counted[2] == pytest.approx((counted[0] + counted[1]) / 2)


def test_zero_2_with_a_pipeline_is_priced_as_zero_1() -> None:
    zero, one, two = (value(zero=zero) for zero in "012")
    assert zero != one == two


@pytest.mark.parametrize("program", ["deepspeed_zero2", "llm_foundry"])
def test_zero_2_is_neither_zero_1_nor_zero_3(program: str) -> None:
    """DeepSpeed's shards sums of gradients; FSDP's keeps parameters from forward to backward."""
    alone = {"pp": "1", "dp": "8", "schedule": "none", "program": program}
    memory = {"metric": "peak_memory_allocated", "unit": "GiB"}
    if program == "deepspeed_zero2":
        one, two = (value(**alone, **memory, zero=zero) for zero in "12")
        state = 1.3e9 * 4 * 7 / 8 / 2**30  # fp32 sums; an eighth stays
        assert two == pytest.approx(one - state, rel=0.05)
        assert value(**alone, zero="2") > value(**alone, zero="1")  # it reduces every microbatch
        return
    two, three = (value(**alone, **memory, zero=zero) for zero in "23")
    assert two > three + 1.3e9 * 2 * 0.7 / 2**30
    slow = {"num_gpus": "64", "dp": "64", "nic_gbit_s": "10", "micro_batch": "1"}
    # Per parameter 2 + 4 bytes are sent, not 2 + 2 + 4.
    assert value(**alone | slow, zero="2") < 0.8 * value(**alone | slow, zero="3")


def test_attention_ends_at_documents() -> None:
    """Causal attention over 8 documents has an eighth of the scores, and of the time except whole
    tiles on the diagonal."""
    plain = value(**LLAMA_8B, device="h100")
    assert value(**LLAMA_8B, device="h100", document="8192") == plain
    case = case_of(row(**LLAMA_8B, device="h100"))
    work = work_of(plan_of(case), case.cluster, case.program)
    inside = replace(work, shape=replace(work.shape, document=1024))
    share = 1 / 8 * (1 + 128 / 1024) / (1 + 128 / 8192)
    assert attention_s(inside) / attention_s(work) == pytest.approx(share, rel=0.02)
    packed = value(**LLAMA_8B, device="h100", document="1024")
    assert 1.05 * plain < packed < 1.4 * plain  # tokens per second


def test_layers_that_do_not_divide_are_cut_as_programs_cut_them() -> None:
    shape = case_of(row(layers="30", params_b="")).shape
    assert even_cuts(shape, 2) == (0, 16, 32)  # they divide
    assert even_cuts(shape, 8) == (0, 4, 8, 12, 16, 20, 24, 28, 32)  # with both ends they do
    assert even_cuts(shape, 4) == (0, 8, 16, 24, 32)
    assert even_cuts(shape, 7) == (0, 4, 8, 12, 17, 22, 27, 32)  # the last have one more
    assert even_cuts(shape, 7, blocks=True) == (0, 5, 9, 13, 17, 21, 26, 32)


def test_what_an_allocator_reserves_is_more_than_tensors_take() -> None:
    allocated = value(metric="peak_memory_allocated", unit="GiB")
    reserved = {"metric": "peak_memory_reserved", "unit": "GiB"}
    assert value(**reserved) == pytest.approx(allocated / 0.85)
    whole = {"pp": "1", "schedule": "none", "dp": "8", "zero": "3", "program": "torchtitan"}
    expandable = value(**whole, metric="peak_memory_allocated", unit="GiB")
    assert value(**whole, **reserved) == pytest.approx(expandable / 0.93)


def test_a_program_is_its_entry_but_for_what_the_row_states() -> None:
    base = case_of(row()).program
    assert base.name == "megatron_lm_2022"
    assert case_of(row(attention="flash")).program.flash
    assert case_of(row(overlap_gradients="yes")).program.overlap_reduction
    assert case_of(row(gradient_dtype="bf16")).program.bf16.gradients == 2
    assert case_of(row(reduce_dtype="bf16")).program.bf16.reduced == 2
    assert case_of(row(compiled="yes", program="torchtitan")).program.traffic_factor == 1.0
    assert case_of(row(gradient_dtype="fp32")).program == base  # as it is


def test_modules_are_spread_evenly_and_the_first_stages_get_the_remainder() -> None:
    shape = replace(row().shape, layers=40)  # 43 modules in 42 pieces: norm and head are one piece
    assert module_cuts(shape, 2) == (0, 22, 42)
    assert module_cuts(shape, 4) == (0, 11, 22, 33, 42)
    with pytest.raises(ValueError, match="22 stages for 43 modules"):
        module_cuts(shape, 22)


def test_clusters_are_their_preset_with_the_numbers_of_the_row() -> None:
    plain = cluster_of(row())
    assert (plain.nics_per_node, plain.device.memory_gib) == (8, 80)
    made = cluster_of(row(nics_per_node="4", nic_gbit_s="100", gpus_per_node="4"))
    assert (made.gpus_per_node, made.nics_per_node, made.inter.bandwidth_gb_s) == (4, 4, 12.5)
    h100 = cluster_of(row(device="h100"))
    small = cluster_of(row(device="h100", memory_bandwidth_gb_s="2400", power_w="500"))
    assert small.device.memory_bandwidth_gb_s == 2400
    assert small.device.matmul_bf16_tflops < 0.9 * h100.device.matmul_bf16_tflops
    assert cluster_of(row(intra_link="pcie")).intra.bandwidth_gb_s == 31
    with pytest.raises(UnpredictableError, match="no nominal power of device=leonardo is known"):
        cluster_of(row(device="leonardo", power_w="300"))
    assert cluster_of(row(intra_gb_s="100")).intra.bandwidth_gb_s == 100
    new = cluster_of(row(device="gb300", memory_gib=""))
    assert (new.gpus_per_node, new.device.peak_bf16_tflops) == (72, 2500)
    stated = {"memory_bandwidth_gb_s": "1600", "peak_bf16_tflops": "181", "products_tflops": "140"}
    other = cluster_of(row(device="stated", **stated)).device
    assert (other.peak_bf16_tflops, round(other.matmul_bf16_tflops, 6)) == (181, 140)
    with pytest.raises(UnpredictableError, match="peak_bf16_tflops=130: v100's own is not known"):
        cluster_of(row(device="v100", dtype="fp16", peak_bf16_tflops="130"))


BOARDS = {"a100": ("a100_40gb", "a100_pcie"), "h100": ("h100_pcie", "h20"), "b200": ("b300",)}


@pytest.mark.parametrize("chip", BOARDS)
def test_a_board_is_its_chip_but_for_what_was_measured_of_it(chip: str) -> None:
    """A chip's constants that are fitted anew are so on its boards, too."""
    like = preset_of(chip)
    for name in BOARDS[chip]:
        board = preset_of(name)
        for same in ("memory_efficiency", "kernel_us", "overlap_slowdown", "exposed_output"):
            assert getattr(board.device, same) == getattr(like.device, same)
        pcie = name.endswith("pcie")
        assert board.intra.rate < 0.2 * like.intra.rate if pcie else board.intra == like.intra
        faster, slower = board.device.matmul_bf16_tflops, like.device.matmul_bf16_tflops
        assert faster < slower if pcie or name == "h20" else faster >= slower


def test_a_run_printed_in_several_units_counts_once(tmp_path: Path) -> None:
    tokens = {"metric": "tokens_per_s", "unit": "tok/s", "value": "90000"}
    memory = {"metric": "peak_memory_allocated", "unit": "GiB", "value": "20"}
    again, other = {"value": "1.6"}, {"seq": "1024", "params_b": ""}
    cells = [CELLS, *(CELLS | changes for changes in (tokens, memory, again, other))]
    table = write_table(tmp_path, *cells)
    predictions = predictions_of(outcome_of(line) for line in read_rows(table))
    first = first_of_runs(predictions)
    assert [predictions.index(prediction) for prediction in first] == [0, 2, 3, 4]


def test_a_run_counts_for_its_source_its_role_its_device_and_all_sources(tmp_path: Path) -> None:
    other = CELLS | {"role": "fitted", "source": "another test", "seq": "1024"}
    lines = read_rows(write_table(tmp_path, CELLS, other))
    errors = errors_of(predictions_of(map(outcome_of, lines)))
    assert dict(
        zip(zip(errors["source"], errors["role"], strict=True), errors["runs"], strict=True)
    ) == {
        ("a test", "held out"): 1,
        ("another test", "fitted"): 1,
        ("all held out sources", "held out"): 1,
        ("all fitted sources", "fitted"): 1,
        ("all on a100", "both"): 2,
        ("all sources", "both"): 2,
    }


def test_the_command_prints_a_summary_and_writes_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran_out = {"metric": "ran_out_of_memory", "unit": "yes/no", "value": "yes"}
    large = LARGE | {"value": "120"}
    rows = [CELLS, CELLS | large, CELLS | ran_out, CELLS | LARGE | ran_out]
    table = write_table(tmp_path, *rows, CELLS | {"device": "?"}, CELLS | {"dtype": "fp8"})
    assert main([str(table), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r" rows +runs +median +p90 +bias\n", printed)
    assert "3 of 6 rows predicted" in printed
    assert "table.csv:3: set apart: num_gpus=8: a GPU of 80 GiB would need" in printed
    assert "refused:    1 of table.csv: device='?': must be one of a100, a100_40gb" in printed
    assert "of table.csv: dtype=fp8: no rate for products of this type" in printed
    assert "1 of 2 such rows predicted; 0 of 1 rows that ran predicted not to fit" in printed
    assert "table.csv:2 " not in printed
    written = list(csv.DictReader((tmp_path / "out" / "validation.csv").open()))
    assert [line["predicted"] != "" for line in written] == [True, False, True, True, False, False]
    assert all((line["predicted"] == "") == (line["reason"] != "") for line in written)
    assert (tmp_path / "out" / "validation.png").stat().st_size > 0
    assert main([str(table), "-v"]) == 0
    assert "table.csv:2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, [], "no such file or directory"),
        (b"", [], "column 'source' is missing"),
        (b"model,value\nGPT,1\n", [], "column 'source' is missing"),
        (b"device,quantity,value\na100,hbm,1\n", [], "column 'quantity' is not known"),
        (",".join(CELLS).replace("num_gpus", "n_gpus").encode(), [], "is 'num_gpus' meant?"),
        (",".join([*CELLS, "tp"]).encode(), [], "column 'tp' appears twice"),
        (",".join(CELLS).encode(), [], "no rows"),
        ("sourcé,url\n".encode("latin-1"), [], "not a CSV file in UTF-8"),
        ("source,url\n".encode("utf-16"), [], "not a CSV file in UTF-8"),
        (b"source\n" + b"a" * 200_000, [], "not a CSV file in UTF-8"),
        (b"source\n", ["--cluster", "nope"], "cluster='nope': no such preset"),
        (b"source\n", ["--out", "/dev/null/x"], "--out=/dev/null/x: cannot"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    content: bytes | None,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = tmp_path / "table.csv"
    if content is not None:
        table.write_bytes(content)
    assert main([str(table), *arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert printed.out == ""


def test_a_judged_contender_is_validated_or_the_page_says_what_differs() -> None:
    """docs/simulator.md has one line per contender whose entry no published row has: the nearest
    entry that has, and every trait in which the two differ."""
    rows = [line.row for table in training_tables() for line in read_rows(table)]
    validated = {
        row.program for row in rows if row is not None and "program" not in row.assumed.split()
    }
    page = (CHECKOUT / "docs" / "simulator.md").read_text("utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (`.*)$", page, re.MULTILINE))
    plans = [contender.size(task(), contender.knobs(), 1) for contender in PRICED.values()]
    judged = {plan.program.partition("+")[0] for plan in plans}
    assert len(judged) >= 5
    assert judged - validated == set(listed)
    for name in judged - validated:
        nearest, differs, _ = listed[name].split(" | ", 2)
        assert nearest.strip("`") in validated
        mine, other = program_named(name), program_named(nearest.strip("`"))
        traits = [f.name for f in fields(Program) if f.name != "name"]
        found = [t for t in traits if getattr(mine, t) != getattr(other, t)]
        assert [word.strip("` ") for word in differs.split(",")] == found
