"""Measured runs: times out of logs, beside their prices and published runs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.explain.answer import answer
from benchmarks.explain.logs import Step, measurement
from benchmarks.explain.measured import explanations, measured_run, nearest, show_measured
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import show_training
from benchmarks.specification import SpecError

STEP = Step(global_batch=64, seq=4096, num_gpus=16)
# Lines as they stand in logs, shortened; a first one, which is slow, and two that count.
TITAN = "[rank0]:[titan] 2025-03-12 - root - INFO - step: {} loss: 6.2 memory: 1.4GiB(2%)  tps: {}"
MEGATRON = (
    " [2024-04-06 02:59:36] iteration {}/ 100 | consumed samples: 5504 | elapsed time per "
    "iteration (ms): {} | throughput per GPU (TFLOP/s/GPU): 239.8 | lm loss: 1.8"
)
BRIDGE = "Step Time : {}s GPU utilization: 58.2MODEL_TFLOP/s/GPU"
NEMO = "Epoch 0: 3%| 9000/301500 [1:42:42, global_step={}, train_step_timing in s={}, val_loss=7.0]"
NANOTRON = (
    "10/18/2025 [INFO|DP=0|PP=0|TP=0]: iteration: {} / 378 | consumed_tokens: 85.8G | "
    "elapsed_time_per_iteration_ms: {} | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K"
)
PIPELINE = "steps: {} loss: 2.5000 iter time (s): {} samples/sec: 5.000"
BATCH = "iteration {} | elapsed time per iteration (ms):  {} | global batch size:    64 | lm loss |"
AUTOMODEL = (
    "INFO | root | step {} | epoch 0 | mem 24.90 GiB | tps {}(1409.82/gpu) | num_label_tokens 5"
)
DEEPSPEED = (
    "[2023-07-25] [timer.py:215:stop] epoch=0/micro_step={}/global_step=34, "
    "RunningAvgSamplesPerSec=7.8, CurrSamplesPerSec={}, MemAllocated=59.65GB"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


@pytest.mark.parametrize(
    ("line", "numbers", "seconds"),
    [
        (TITAN, ("1,093", "8,000", "8,192"), 64 * 4096 / 16 / 8096),
        (MEGATRON, ("99999.9", "5444.9", "5533.8"), 5.48935),
        (BRIDGE, ("140.1", "14.2", "14.3"), 14.25),
        (NEMO, ("9.9", "0.615", "0.617"), 0.616),
        (NANOTRON, ("99.9K", "11.5K", "11.5K"), 11.5),
        (NANOTRON, ("145", "45", "41.2"), 0.0431),
        (PIPELINE, ("32.1", "3.2", "3.4"), 3.3),
        (DEEPSPEED, ("1.5", "8.0", "8.0"), 8.0),
        (NANOTRON, ("20K", "999", "1.01K"), 1.0045),
        (TITAN.replace("tps", "wps"), ("1,093", "8,000", "8,192"), 64 * 4096 / 16 / 8096),
        (TITAN.replace("tps", "[34mtps"), ("1,093", "8,000", "8,192"), 64 * 4096 / 16 / 8096),
        (TITAN.replace("tps", "^[[34mtps"), ("1,093", "8,000", "8,192"), 64 * 4096 / 16 / 8096),
        (BATCH, ("99999.9", "5444.9", "5533.8"), 5.48935),
        (BATCH.replace("per i", "per\ni"), ("99999.9", "5444.9", "5533.8"), 5.48935),
        (BATCH.replace("iteration (", "itera\r\ntion ("), ("9999", "5444.9", "5533.8"), 5.48935),
        ('{{"step": {}, "data": {{"train_step_timing in s": {}}}}}', ("9", "3.1", "3.3"), 3.2),
        (AUTOMODEL, ("1.5", "1e5", "1e5"), 64 * 4096 / 1e5),
        ("current step time: {}\noverall step time: 7.0", ("99.1", "3.2", "3.4"), 3.3),
        ("step={} loss=0.005 tgs (tokens/gpu/second)={} lr=1e-05", ("1", "8000", "8192"), 2.0237),
        ("  throughput/device/TPS={}\n  throughput/device/MFU=4", ("1", "8,000", "8,192"), 2.0237),
        ("Train throughput/device/tokens_per_sec: {}", ("1", "8000.5", "8191.5"), 2.0237),
        ("iter {}: loss 4.0064, time {}ms, mfu 31.20%", ("9999", "562.1", "561.9"), 0.562),
        ("step {}/9 | loss: 2.5 | dt: {}ms | tok/sec: 1,234", ("9999", "562.1", "561.9"), 0.562),
        ("completed step: {}, seconds: {}, TFLOP/s/device: 9", ("99", "3.2", "3.4"), 3.3),
        ("Step {} | loss:3.1 tokens_per_second_per_gpu:{} x", ("1", "8000", "8192"), 2.0237),
        ("{{'iteration': '{}/9', 'train_speed(iter/s)': {}}}", ("0.1", "0.5", "0.5"), 2.0),
        ("{{'iteration': '{}/9', 'train_speed(s/it)': {}}}", ("9", "2.1", "1.9"), 2.0),
        ("{{'iteration': '{}/9', 'elapsed_time_per_iteration': {}}}", ("9", "2.1", "1.9"), 2.0),
        ("{{'iteration': '{}/9', 'train_speed(s/it)': '{}'}}", ("9", "2.1", "1.9"), 2.0),
    ],
)
def test_step_times_of_logs(log: Path, line: str, numbers: tuple[str, ...], seconds: float) -> None:
    both = line.count("{}") == 2
    lines = [line.format(*((i, n) if both else (n,))) for i, n in enumerate(numbers, 1)]
    log.write_text("something else: 5 s\n" + "\x1b[32m\n".join(lines))
    measured = measurement(str(log), STEP)
    assert measured.step_s == pytest.approx(seconds, rel=1e-3)
    assert measured.lines == 2


def test_validation_is_no_step(log: Path) -> None:
    validated = TITAN.replace("step:", "validate step:").format(2, "24,000")
    log.write_text(f"{TITAN.format(1, '8,000')}\n{validated}\n{validated}\n")
    assert measurement(str(log), STEP).step_s == pytest.approx(64 * 4096 / 16 / 8000)


def test_steps_of_another_batch_do_not_count(log: Path) -> None:
    """While a batch grows, those before the last are shorter; a log of another run is refused."""
    small = BATCH.replace("64", "32")
    lines = [small.format(i, "1000") for i in range(9)]
    log.write_text("\n".join([*lines, BATCH.format(9, "5000"), BATCH.format(10, "5000")]))
    assert measurement(str(log), STEP).step_s == pytest.approx(5.0)
    titan = "local batch size 2, global batch size 32, sequence length 4096\n"
    totals = "  Total train batch size (w. parallel, distributed & accumulation) = 32\n"
    mean = "{'train_runtime': 9.0, 'train_samples_per_second': 32.0, 'epoch': 3.0}\n"
    for text in ("\n".join(lines), titan + TITAN.format(1, "8,000"), totals + mean):
        log.write_text(text)
        with pytest.raises(SpecError, match=r'32 .* 64 \(give --measured ".*log global_batch=32"'):
            measurement(str(log), STEP)
    assert measurement(str(log), Step(32, 4096, 16)).step_s == 1.0
    log.write_text(
        "  train_runtime            = 0:00:09.00\n  train_samples_per_second =     64.0\n"
    )
    assert measurement(str(log), STEP).step_s == 1.0
    olmo = "DataLoaderConfig(global_batch_size=262144)\nthroughput/device/TPS=8,192\n"
    log.write_text(olmo)  # 64 sequences of 4096 tokens
    assert measurement(str(log), STEP).step_s == pytest.approx(2.0)
    log.write_text(f"using world size: 32, data-parallel size: 2\n{BATCH.format(1, '5000')}")
    with pytest.raises(SpecError, match=r'32 GPUs .* has 16 \(give --measured ".*num_gpus=32"'):
        measurement(str(log), STEP)
    assert measurement(str(log), Step(64, 4096, 32)).step_s == 5.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("843ms", 0.843),
        ("1.5 s", 1.5),
        ("10,456tokens/s/GPU", 64 * 4096 / 16 / 10456),
        ("2e5tokens/s", 64 * 4096 / 2e5),
        ("32samples/s", 2.0),
        ("10.456K tokens/sec/gpu", 64 * 4096 / 16 / 10456),
    ],
)
def test_numbers_with_units(text: str, seconds: float) -> None:
    assert measurement(text, STEP).step_s == pytest.approx(seconds)


def test_what_says_no_time_is_refused(log: Path) -> None:
    for text in ("843", "0ms", "843 mins", str(log.parent)):
        with pytest.raises(SpecError, match="with its unit, such as 843ms"):
            measurement(text, STEP)
    for text in ("1e400s", "1e400tokens/s", "1e-320samples/s"):
        with pytest.raises(SpecError, match=f"--measured {text}: .* must be finite and above 0"):
            measurement(text, STEP)
    log.write_text(f"{TITAN.format(1, '1e400')}\n{TITAN.format(2, '8,000')}\n")
    assert measurement(str(log), STEP).lines == 1
    log.write_text(f"{TITAN.format(1, '8,000')}\n{TITAN.format(2, '1e400')}\n")
    with pytest.raises(SpecError, match="no line of a known form says how long a step took"):
        measurement(str(log), STEP)
    log.write_text('{"current_steps": 5, "elapsed_time": "0:03:29"}\n')  # LLaMA-Factory's
    with pytest.raises(SpecError, match=r"a known form .* its train_results\.json"):
        measurement(str(log), STEP)


def arguments_of(tp: int, num_gpus: int, layers: int) -> list[str]:
    words = f"--num-layers {layers} --hidden-size 4096 --num-attention-heads 32 --seq-length 2048"
    words += f" --micro-batch-size 2 --global-batch-size {2 * num_gpus} --bf16 --vocab-size 51200"
    words += f" --tensor-model-parallel-size {tp} --tokenizer-type NullTokenizer"
    return words.split()


@cache
def question(tp: int = 8, num_gpus: int = 64, layers: int = 24) -> Question:
    arguments = arguments_of(tp, num_gpus, layers)
    return ask([], ["cluster=h100", f"num_gpus={num_gpus}"], arguments)


def shown(*texts: str) -> str:
    """What the screen says of runs on eight GPUs."""
    arguments = arguments_of(tp=8, num_gpus=8, layers=24)
    words = ["cluster=h100", "num_gpus=8"]
    console = Console(width=200, file=StringIO())
    show_measured([measured_run(text, [], words, arguments) for text in texts], console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_step_that_grows_is_said_first(log: Path) -> None:
    log.write_text("\n".join(MEGATRON.format(i, 1000 + 10 * i) for i in range(48)))
    assert measurement(str(log), STEP).grown == pytest.approx((1.175, 1.415), abs=0.01)
    said = shown(f"{log} global_batch=64 num_gpus=8")
    assert said.startswith("train.log of Megatron-LM: its steps grow from 1.17 to 1.42 s.")
    log.write_text("\n".join(MEGATRON.format(i, 9000 if i < 9 else 1000) for i in range(48)))
    assert measurement(str(log), STEP).grown is None  # warm-up


def test_nearest_published_runs_are_of_the_device() -> None:
    near = nearest(question(layers=32))
    assert near
    assert {found.row.device for found in near} == {"h100"}
    assert all(found.tokens_per_s_per_gpu > 0 and found.priced > 0 for found in near)


def test_length_and_energy_of_a_training() -> None:
    asked = question()  # 128 sequences of 2,048 tokens per step on 64 boards of 700 W
    answered = answer(asked)
    tokens = 128 * 2048 * 86400 / answered.asked.step_s  # of a day
    console = Console(width=200, file=StringIO())
    show_training(tokens, answered, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert ": 1.0 days, 1,536 GPU-hours, 1.1 MWh at the boards' nominal power" in said


def test_the_screen_says_what_was_measured() -> None:
    """Beside the price, what the simulated step is lost to, and published runs."""
    said = shown("8s", "3 s num_gpus=16")
    parts = ["8s", "8.000", "3 s num_gpus=16", "3.000"]
    parts += ["the machine is the preset's, 8 boards h100 of 700 W", "is lost to:\n  small kern"]
    places = [said.index(part) for part in [*parts, "Published runs that are nearest"]]
    assert places == sorted(places)


def test_a_slow_network_is_named_before_another_device() -> None:
    """With the rate at which it would do; where nodes send little or nothing, others are first."""
    slow = measured_run("9s", [], ["cluster=h100", "num_gpus=64"], arguments_of(8, 64, 24))
    network, links, kernels, wait = explanations(slow)
    found = re.fullmatch(r"the network between nodes, at (\S+) of its 50 GB/s per card.*", network)
    assert found is not None
    assert float(found[1]) < 1
    cluster = slow.question.task.cluster
    link = replace(cluster.inter, bandwidth_gb_s=float(found[1]))
    task = replace(slow.question.task, cluster=replace(cluster, inter=link))
    again = slow.question.contender.simulated(task, slow.candidate)
    assert again.step_s == pytest.approx(9.0, rel=0.05)
    assert (links[:5], kernels[:5], wait[:10]) == ("links", "every", "a wait of ")
    on_one = measured_run("8s", [], ["cluster=h100", "num_gpus=8"], arguments_of(8, 8, 24))
    assert [line[:5] for line in explanations(on_one)] == ["links", "every", "a wai"]
    as_priced = f"{1.1 * slow.priced.step_s}s"
    words = ["cluster=h100", "num_gpus=64"]
    assert explanations(measured_run(as_priced, [], words, arguments_of(8, 64, 24))) == []
    fast = (["cluster=gb200", "num_gpus=8"], arguments_of(4, 8, 24))
    slower_s = 1.2 * measured_run("1s", [], *fast).priced.step_s
    links = explanations(measured_run(f"{slower_s}s", [], *fast))[0]
    assert re.match(r"links inside nodes, at 1\d\d of their 900 GB/s", links)  # not at 1.2e+02


@pytest.mark.parametrize(
    ("line", "peak"),
    [
        (TITAN.replace("1.4", "41.4").format(2, "8,000"), (41.4, "reserved")),
        (f"{MEGATRON.format(1, 9)}\nmemory (MB) | max reserved: 20480.0", (20.0, "reserved")),
        (f"{NANOTRON.format(1, 9)}\nPeak reserved: 4096.00MiB.", (4.0, "reserved")),
        (AUTOMODEL.format(2, 8000), (24.9, "allocated")),
        ("GPU reserved mem (GiB)=30.5\nthroughput/device/TPS=8,000", (30.5, "reserved")),
        ("{'memory(GiB)': '39.34', 'train_speed(iter/s)': '0.5'}", (39.34, "reserved")),
        ("CurrSamplesPerSec=61.3, MemAllocated=6.0GB, MaxMemAllocated=19.5GB", (19.5, "allocated")),
        (f"max_memory_reserved: {30 * 2**30} | train_step_timing in s: 6.08", (30.0, "reserved")),
        (BRIDGE.format(9), None),
    ],
)
def test_peaks_of_memory_in_logs(log: Path, line: str, peak: tuple[float, str] | None) -> None:
    log.write_text(f"{line.replace('20480', '10240')}\n{line}\n{line.replace('41.4', '40.2')}\n")
    assert measurement(str(log), STEP).peak == peak


def test_a_log_s_gib_stand_beside_their_price(log: Path) -> None:
    line = f"{MEGATRON.format(1, 900)}\nmemory (MB) | max allocated: 1.0 | max reserved: 20480.0"
    log.write_text(line)
    said = shown(str(log))
    allocated = measured_run("1s", [], ["cluster=h100", "num_gpus=8"], arguments_of(8, 8, 24))
    assert f"20.0 reserved   {allocated.priced.peak_bytes / 2**30 / 0.85:>13.1f}" in said
    assert "GiB" not in shown("1s")


def test_what_is_not_of_the_run_is_refused_in_a_line() -> None:
    with pytest.raises(SpecError, match='--measured a"b: No closing quotation'):
        shown('a"b')
    for text in ("1e12s", "0.5tokens/s", "1ms"):
        with pytest.raises(SpecError, match="probably not of this run or in this unit") as refused:
            shown(text)
        assert "\n" not in str(refused.value)
