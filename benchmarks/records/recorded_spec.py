"""What is read of a record's spec, whichever version of the suite wrote it.

A record keeps its spec as the plain mapping that was run. Of it a report needs the keys below and
no others, so a key that has been renamed, added or dropped since hides nothing that was measured.
Those without a default are what a row of a table cannot do without: see ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.records.record import RecordError, RunRecord
from benchmarks.specification.run_spec import SpecError, validated
from zeropp.shape import ModelShape

# Knobs at these values are not named in tables: nothing was set. Records of the first versions hold
# all of these keys for every contender; later ones only those that the contender has.
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
# What a command line got that set none, by contender, in the versions before ``auto`` was all.
_FIRST_DEFAULTS: dict[str, dict[str, Any]] = {
    "zeropp": {"shard": "auto", "chunks": 2},
    "deepspeed_3d": {"tp": 2, "replicate_zero": 1, "schedule": "1f1b"},
    "torch_pp": {"shard": "auto", "chunks": 2, "schedule": "interleaved_1f1b"},
    "fsdp": {"pp": 1, "shard": "auto"},
}


def default_knobs(contender: str) -> dict[str, Any] | None:
    """Every knob where nobody has set it, as records hold it; None for an unknown contender.
    Later records may hold ``auto`` in place of any."""
    known = _FIRST_DEFAULTS.get(contender)
    return None if known is None else PLAIN_KNOBS | known


@dataclass(frozen=True)
class RecordedModel:
    """Of ``model``; ``sizes`` is the whole mapping."""

    name: str
    seq: int
    sizes: dict[str, Any]

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape; None where today's needs a size that the record lacks."""
        known = {f.name for f in fields(ModelShape)}
        try:
            return ModelShape(**{k: v for k, v in self.sizes.items() if k in known})
        except TypeError:
            return None


@dataclass(frozen=True)
class RecordedDevice:
    """Of ``cluster.device``."""

    name: str = ""
    memory_gib: float | None = None
    peak_bf16_tflops: float | None = None  # dense
    peak_fp32_tflops: float | None = None  # dense, without TF32


@dataclass(frozen=True)
class RecordedCluster:
    """Of ``cluster``."""

    name: str
    device: RecordedDevice = RecordedDevice()


@dataclass(frozen=True)
class RecordedContender:
    """Of ``contender``; ``knobs`` is the whole mapping."""

    name: str
    knobs: dict[str, Any]


@dataclass(frozen=True)
class RecordedSpec:
    """Of the whole spec; ``data`` is the mapping as it was run."""

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
    """Of a record; raises RecordError in one line where a needed key is missing or wrong."""
    return read_spec(record.spec)


def read_spec(spec: Mapping[str, Any]) -> RecordedSpec:
    """Of a spec as a mapping (``RunSpec.to_dict``); raises RecordError as ``recorded_spec``."""
    values = dict(spec)
    for key, whole in (("model", "sizes"), ("contender", "knobs")):
        if isinstance(values.get(key), dict):
            values[key] = values[key] | {whole: values[key]}
    try:
        return validated(RecordedSpec, values, "spec")
    except SpecError as error:
        raise RecordError(str(error)) from None
