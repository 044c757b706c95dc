"""The keys of a record's spec that reports read, for records of any version of the suite.

A record holds its spec as the plain mapping that was run. A report reads the keys below and no
others, so that records stay readable when other keys are renamed, added or dropped. A key without a
default must be there; see ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.records.record import RecordError, RunRecord
from benchmarks.specification.run_spec import SpecError, validated
from zeropp.shape import ModelShape

# Tables do not name knobs with these values, because nobody has set them. Records of the first
# versions have all of these keys for every contender; later ones have those of their contender.
PLAIN_KNOBS: dict[str, Any] = {
    "pp": "auto",
    "tp": 1,
    "shard": 1,
    "replicate": "auto",
    "replicate_zero": 0,
    "chunks": 1,
    "unit": "auto",
    "activation_cap": "auto",
    "activation_cap_gib": "auto",
    "schedule": "auto",
    "stage_style": "loop",
    "split_backward": True,
    "recompute": "none",
    "reduce_every": "unit",
    "replicate_every": "step",
    "reduce_dtype": "fp32",
    "prefetch": 1,
    "keep": 0,
    "placement": "dp_inner",
    "sequence_parallel": False,
    "compile": False,
}
# The defaults of each contender in the versions before every default was ``auto``.
_FIRST_DEFAULTS: dict[str, dict[str, Any]] = {
    "zeropp": {"shard": "auto", "chunks": 2},
    "deepspeed_3d": {"tp": 2, "replicate_zero": 1, "schedule": "1f1b"},
    "torch_pp": {"shard": "auto", "chunks": 2, "schedule": "interleaved_1f1b"},
    "fsdp": {"pp": 1, "shard": "auto"},
}


def default_knobs(contender: str) -> dict[str, Any] | None:
    """The value of every knob that nobody has set, as records have it; None for an unknown
    contender. In later records each of them may be ``auto`` instead."""
    known = _FIRST_DEFAULTS.get(contender)
    return None if known is None else PLAIN_KNOBS | known


@dataclass(frozen=True)
class RecordedModel:
    """What is read of a spec's ``model``; ``sizes`` is the whole mapping."""

    name: str
    seq: int
    sizes: dict[str, Any]

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape; None if the record lacks a size that ``ModelShape`` needs."""
        known = {f.name for f in fields(ModelShape)}
        try:
            return ModelShape(**{k: v for k, v in self.sizes.items() if k in known})
        except TypeError:
            return None


@dataclass(frozen=True)
class RecordedDevice:
    """What is read of ``cluster.device``."""

    name: str = ""
    memory_gib: float | None = None
    peak_bf16_tflops: float | None = None  # dense
    peak_fp32_tflops: float | None = None  # dense, without TF32


@dataclass(frozen=True)
class RecordedCluster:
    """What is read of ``cluster``."""

    name: str
    device: RecordedDevice = RecordedDevice()


@dataclass(frozen=True)
class RecordedContender:
    """What is read of ``contender``; ``knobs`` is the whole mapping."""

    name: str
    knobs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecordedSpec:
    """What is read of a whole spec; ``data`` is the whole mapping of that key."""

    model: RecordedModel
    cluster: RecordedCluster
    num_gpus: int
    contender: RecordedContender
    global_batch: int
    precision: str
    microbatch_size: int = 1
    data: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def recorded_spec(record: RunRecord) -> RecordedSpec:
    """What reports read of a record's spec. Raises RecordError, in one line, if a key that they
    need is missing or wrong."""
    return read_spec(record.spec)


def read_spec(spec: Mapping[str, Any]) -> RecordedSpec:
    """What reports read of a spec that is a mapping, as ``RunSpec.to_dict`` gives it. Raises
    RecordError as ``recorded_spec`` does."""
    values = dict(spec)
    for key, whole in (("model", "sizes"), ("contender", "knobs")):
        if isinstance(values.get(key), dict):
            values[key] = values[key] | {whole: values[key]}
    try:
        return validated(RecordedSpec, values, "spec")
    except SpecError as error:
        raise RecordError(str(error)) from None
