"""The line of a step says what its event and its specification know, and nothing else."""

from __future__ import annotations

from benchmarks.records.metrics import step_line
from benchmarks.records.recorded_spec import read_spec
from tests.unit.synthetic_records import spec_values

STEP = {"event": "step", "index": 2, "seconds": 2.0, "loss": 5.54321, "grad_norm": 1.25}


def test_a_step_on_a_device_of_known_peak() -> None:
    values = spec_values(num_gpus=4)  # batch 16 of 64 tokens
    values["cluster"]["device"] |= {"peak_fp32_tflops": 0.001, "memory_gib": 8.0}
    line = step_line(read_spec(values), STEP | {"peak_bytes": 2 * 2**30})
    assert line.startswith("step    3  loss   5.5432  grad norm   1.2500  2.000 s  128 tokens/s  ")
    assert " GFLOP/s  MFU " in line
    assert line.endswith("memory 2.00 GiB (25.0%)")


def test_what_is_not_known_is_left_out() -> None:
    values = spec_values()
    values["cluster"]["device"] |= {"memory_gib": None}
    warmup = {"event": "warmup", "index": 0, "seconds": 2.0, "peak_bytes": 2**29}
    line = step_line(read_spec(values), warmup)
    assert line.startswith("step    1 (warm-up)  2.000 s  128 tokens/s  ")
    assert line.endswith("memory 512 MiB")
    assert not {"loss", "norm", "MFU"} & set(line.split())
