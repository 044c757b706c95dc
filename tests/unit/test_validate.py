"""benchmarks.validate: every row is predicted or named with its reason, whatever a file holds."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.studies.validation.cases import case_of, even_cuts
from benchmarks.studies.validation.clusters import cluster_of
from benchmarks.studies.validation.pairs import pairs_of
from benchmarks.studies.validation.predict import predict
from benchmarks.studies.validation.rows import UnpredictableError
from benchmarks.validate import main, outcome_of

ROW = {
    "source": "a test", "model": "GPT 1.3B", "hidden": "2048", "layers": "24", "heads": "16",
    "ffn": "8192", "vocab": "51200", "seq": "2048", "gpu": "A100-80GB SXM", "n_gpus": "8",
    "tp": "1", "pp": "4", "dp": "2", "schedule": "1F1B", "micro_batch": "2", "global_batch": "64",
    "recompute": "none", "dtype": "bf16", "metric": "iteration_time", "value": "1.5", "unit": "s",
}  # fmt: skip


def value(**changes: str) -> float:
    return predict({**ROW, **changes}).value


def test_units_of_one_step_agree() -> None:
    step = value()
    assert value(unit="ms") == pytest.approx(step * 1e3)
    samples = value(metric="throughput", unit="samples/s")
    assert samples == pytest.approx(64 / step)
    tokens = value(metric="tokens_per_s_per_gpu", unit="tok/s/GPU")
    assert tokens == pytest.approx(samples * 2048 / 8)
    tflops = value(metric="model_tflops_per_gpu", unit="TFLOP/s/GPU")
    assert value(metric="mfu", unit="%") == pytest.approx(tflops / 312 * 100)
    assert value(metric="aggregate", unit="PFLOP/s") == pytest.approx(tflops * 8 / 1e3)
    assert value(metric="peak_memory", unit="GB") == pytest.approx(
        value(metric="peak_memory", unit="GiB") * 2**30 / 1e9
    )


@pytest.mark.parametrize(
    ("metric", "text", "unit", "same_as"),
    [
        ("iteration_time", "1,500", "ms/it", {"value": "1.5"}),
        ("sec_per_iteration", "1.5", "sec/iteration", {"value": "1.5"}),
        ("time_per_iteration_ms", "1500", "", {"value": "1.5"}),
        ("tps", "900", "", {"metric": "tokens_per_s_per_gpu", "unit": "tok/s/GPU"}),
        ("rate", "0.9k", "tokens/gpu/sec", {"metric": "tgs", "unit": ""}),
        ("rate", "9", "samples per second per GPU", {"metric": "samples", "unit": "samples/s/GPU"}),
        ("MFU", "45%", "", {"metric": "mfu", "unit": "%"}),
        ("mfu", "45", "", {"metric": "mfu", "unit": "%"}),
        ("mfu", "0.45", "", {"metric": "mfu", "unit": "fraction"}),
        ("memory", "40 GiB", "", {"metric": "peak_memory", "unit": "GiB"}),
        ("peak_memory", "40", "GiB/GPU", {"metric": "peak_memory", "unit": "GiB"}),
    ],
)  # fmt: skip
def test_a_quantity_has_many_spellings(
    metric: str, text: str, unit: str, same_as: dict[str, str]
) -> None:
    first = predict({**ROW, "metric": metric, "value": text, "unit": unit})
    second = predict({**ROW, "value": "1", **same_as})
    scale = 1e3 if "ms" in f"{unit} {metric}" else 1.0
    assert first.kind == second.kind
    assert first.value == pytest.approx(second.value * scale)


def test_thousands_are_read_from_the_value() -> None:
    row = {**ROW, "metric": "tps", "unit": ""}
    few, many = predict({**row, "value": "900"}), predict({**row, "value": "0.9k"})
    assert few.relative_error == pytest.approx(many.relative_error)


def test_sizes_are_read_as_papers_write_them() -> None:
    plain = value(seq="8192", global_batch="512", n_gpus="16", dp="4")
    assert value(seq="8k", global_batch="4.2M tokens", n_gpus="2 x 8", dp="4") == plain


def test_plain_flops_count_recomputation_where_the_program_does() -> None:
    row = {"metric": "tflops", "unit": "TFLOPS", "recompute": "full"}
    plain, model = value(**row), value(**{**row, "metric": "model_tflops"})
    assert plain > 1.2 * model
    new = {**row, "source": "Megatron-Core"}
    assert value(**new) == pytest.approx(value(**{**new, "metric": "model_tflops"}))


def test_recomputation_counts_in_hardware_flops_alone() -> None:
    model = value(metric="model_tflops_per_gpu", unit="TFLOP/s/GPU", recompute="full")
    hardware = value(metric="hw_tflops_per_gpu", unit="TFLOP/s/GPU", recompute="full")
    assert 1.2 < hardware / model < 4 / 3


@pytest.mark.parametrize(
    "schedule", ["1F1B", "GPipe", "ZB-H1", "ZB-1p", "ZB-2p", "ZBV", "1F1B-I", "zero bubble", "none"]
)
def test_schedules_are_understood(schedule: str) -> None:
    assert value(schedule=schedule) > 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "TPU v4"}, "no device preset"),
        ({"hidden": "", "model": "secret"}, "hidden size"),
        ({"cp": "2"}, "cp=2"),
        ({"dtype": "fp8"}, "8-bit"),
        ({"dp": "3"}, "is not n_gpus"),
        ({"schedule": "DualPipe"}, "no generator"),
        ({"schedule": "V-Half"}, "no generator"),
        ({"schedule": "FSDP + Float8"}, "8-bit"),
        ({"zero_stage": "3 + CPU offload"}, "offloading to the host"),
        ({"value": ""}, "nothing was measured"),
        ({"value": "1.2-1.5"}, "not a number"),
        ({"value": "fast"}, "not a number"),
        ({"unit": "furlongs", "metric": "speed"}, "not understood"),
        ({"hidden": "a lot"}, "not a number"),
        ({"global_batch": "1"}, "less than"),
        ({"global_batch": "9" * 20}, "microbatches: too many"),
    ],
)
def test_what_cannot_be_predicted_is_named(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnpredictableError, match=reason):
        predict({**ROW, **changes})
    assert reason in outcome_of({**ROW, **changes}, None).reason


@pytest.mark.parametrize(
    ("changes", "ran_out"),
    [
        ({"value": "OOM"}, True),
        ({"value": "CUDA out of memory"}, True),
        ({"value": "", "notes": "OOM at step 1"}, True),
        ({"metric": "oom", "value": "1", "unit": ""}, True),
        ({"metric": "oom", "value": "false", "unit": ""}, False),
        ({"metric": "status", "value": "ok", "unit": ""}, False),
        ({"metric": "fits", "value": "no", "unit": ""}, True),
    ],
)
def test_a_row_of_memorys_limit_is_held_against_the_device(
    changes: dict[str, str], ran_out: bool
) -> None:
    large = {**ROW, "hidden": "12288", "layers": "96", "heads": "96", "ffn": "49152"}
    for row, text in ((large, "OOM"), (ROW, "fits")):
        predicted = predict({**row, **changes})
        assert predicted.text == text
        assert predicted.relative_error == float((text == "OOM") != ran_out)


def test_agreement_on_memory_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    large = {**ROW, "hidden": "12288", "layers": "96", "heads": "96", "ffn": "49152"}
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows([ROW, large, {**ROW, "value": "OOM"}, {**large, "value": "OOM"}])
    assert main([str(table)]) == 0
    counted = "1 of 2 such rows predicted; 1 of 2 rows that ran predicted not to fit"
    assert counted in capsys.readouterr().out


def test_zero_bubble_with_twice_the_memory_is_faster_and_holds_twice_the_activations() -> None:
    row = {"source": "Zero Bubble", "pp": "8", "dp": "1", "layers": "30", "global_batch": "64"}
    memory = {"metric": "activation_memory", "unit": "GiB"}
    plain, more = (value(**row, **memory, schedule=s) for s in ("1F1B", "ZB-2p"))
    assert 1.7 < more / plain < 2.3
    assert value(**row, schedule="ZB-2p") < value(**row, schedule="ZB-1p")
    assert value(**row, schedule="ZB-1p") < value(**row, schedule="1F1B")


def test_layers_that_do_not_divide_are_cut_as_programs_cut_them() -> None:
    shape = case_of({**ROW, "layers": "30"}).shape
    assert even_cuts(shape, 2) == (0, 16, 32)  # they divide
    assert even_cuts(shape, 8) == (0, 4, 8, 12, 16, 20, 24, 28, 32)  # with both ends they do
    assert even_cuts(shape, 4) == (0, 8, 16, 24, 32)
    assert even_cuts(shape, 7) == (0, 4, 8, 12, 17, 22, 27, 32)  # the last have one more
    assert even_cuts(shape, 7, blocks=True) == (0, 5, 9, 13, 17, 21, 26, 32)


def test_what_an_allocator_reserves_is_more_than_tensors_take() -> None:
    allocated = value(metric="peak_memory_allocated", unit="GiB")
    assert value(metric="peak_memory", unit="GiB") == pytest.approx(allocated)
    assert value(metric="peak_memory_reserved", unit="GiB") == pytest.approx(allocated / 0.85)


@pytest.mark.parametrize(
    ("text", "nics", "gigabytes", "memory"),
    [
        ("A100-80GB SXM, 4x100Gb RoCE/node", 4, 12.5, 80),
        ("A100-80GB SXM (Selene, 8x HDR200/node)", 8, 25.0, 80),
        ("A100 (4x HDR200 = 800Gb/s per node in their config)", 4, 25.0, 80),
        ("A100-40GB SXM, 1600Gb/s RoCE/node", 8, 25.0, 40),
        ("H100-80GB SXM", 8, 50.0, 80),
        ("8 x 80GB A100", 8, 25.0, 80),
        ("A100-80GB (Jean Zay, 4 Omni-Path links (100 Gb/s) per node)", 4, 12.5, 80),
        ("A100-80GB, 400 Gb/s per node", 8, 6.25, 80),
        ("H100 96GB HBM2e 500W (Grand Teton), 400 Gb/s RoCE per GPU", 8, 50.0, 96),
        ("8x A100 40GB PCIe", 8, 25.0, 40),
        ("B200 180GB, 8x 400Gb/s per node", 8, 50.0, 180),
        ("V100-32GB, 4 GPUs per node, Omni-Path 4x 100", 4, 12.5, 32),
        ("a card of 181 TFLOP/s bf16, 64 GB at 1.6 TB/s, 4x HDR200", 4, 25.0, 64),
    ],
)
def test_clusters_are_read_from_text(text: str, nics: int, gigabytes: float, memory: int) -> None:
    made = cluster_of(text)
    assert (made.nics_per_node, made.inter.bandwidth_gb_s) == (nics, gigabytes)
    assert made.device.memory_gib == memory


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xH100", "h100"),
        ("H100-80GB", "h100"),
        ("DGX-A100", "a100"),
        ("A100", "a100"),
        ("72x GB200", "gb200"),
        ("GH200 96GB, 990 TFLOP/s, 4 TB/s", "stated"),
    ],
)
def test_a_device_is_named_by_a_word(text: str, name: str) -> None:
    assert cluster_of(text).device.name == name


def test_a_gh200_is_not_a_h200() -> None:
    with pytest.raises(UnpredictableError, match="no device preset"):
        cluster_of("GH200 96GB")


def test_devices_are_what_the_text_states() -> None:
    plain, small = cluster_of("H100-80GB SXM"), cluster_of("H100 96GB HBM2e 500W")
    assert small.device.memory_bandwidth_gb_s == 2400
    assert small.device.matmul_bf16_tflops < 0.9 * plain.device.matmul_bf16_tflops
    assert cluster_of("A100 80GB PCIe").intra.bandwidth_gb_s == 31
    new = cluster_of("B200").device
    assert (new.peak_bf16_tflops, new.memory_bandwidth_gb_s) == (2250, 8000)
    assert new.matmul_bf16_tflops / 2250 == pytest.approx(plain.device.matmul_bf16_tflops / 989)
    assert value(gpu="B200") < value(gpu="H100-80GB SXM") < value(gpu="A100-80GB SXM")


def test_pairs_differ_in_schedule_or_parallelism_alone() -> None:
    rows = [ROW, {**ROW, "tp": "2", "pp": "2"}, {**ROW, "micro_batch": "4"}, ROW]
    pairs = pairs_of(rows, [predict(row) for row in rows])
    assert [(pair.first, pair.second) for pair in pairs] == [(0, 1), (1, 3)]
    assert pairs[0].measured == pytest.approx(1.0)
    assert pairs[0].relative_error == pytest.approx(pairs[0].predicted - 1.0)


def test_a_row_in_a_row_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROW, {**ROW, "gpu": "?"}, {**ROW, "value": "OOM"}]
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows(rows)
    assert main([str(table), "--out", str(tmp_path / "out")]) == 0
    written = list(csv.DictReader((tmp_path / "out" / "validation.csv").open()))
    assert [row["predicted"] != "" for row in written] == [True, False, True]
    assert all((row["predicted"] == "") == (row["reason"] != "") for row in written)
    assert (tmp_path / "out" / "validation.png").stat().st_size > 0
    assert "2 of 3 rows predicted" in capsys.readouterr().out
    other = tmp_path / "hardware.csv"
    other.write_text("device,value\na100,312\n")
    assert main([str(other), str(table)]) == 0  # one without training rows is named and skipped
    assert "hardware.csv: no training rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, [], "no such file or directory"),
        (b"", [], "no training rows"),
        (b"metric,value,n_gpus\n", [], "no training rows"),
        (b"model,value\nGPT,1\n", [], "no training rows (columns metric, value, n_gpus"),
        ("metric,value,n_gpus\nmémoire,1,8\n".encode("latin-1"), [], "not a CSV file in UTF-8"),
        ("metric,value,n_gpus\n".encode("utf-16"), [], "not a CSV file in UTF-8"),
        (b"metric,value,n_gpus\n" + b"a" * 200_000, [], "not a CSV file in UTF-8"),
        (b"metric,value,n_gpus\na,1,8\n", ["--cluster", "nope"], "cluster='nope': no such preset"),
        (b"metric,value,n_gpus\na,1,8\n", ["--out", "/dev/null/x"], "--out=/dev/null/x: cannot"),
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
