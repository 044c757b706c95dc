"""What reports read of a record's spec, which is the plain mapping that was run.

It is not a ``RunSpec``, although it was written from one: a RunSpec is what today's suite can run,
and refuses a knob, a field or a contender that it does not have, but records outlive all of these,
and some are of contenders that can only be priced. A key without a default must be there; others
may come and go without a new schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from benchmarks.records.record import RecordError, RunRecord, find_records, read_record
from benchmarks.specification import GATE_TOLERANCE, SpecError
from benchmarks.specification.reading import validated
from zeropp.types.literals import Auto
from zeropp.types.shape import ModelShape


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
    microbatch_size: int | Auto = 1  # "auto" where no size was feasible
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def read_spec(spec: Mapping[str, Any]) -> RecordedSpec:
    """What reports read of a spec that is a mapping, as ``RunSpec.to_dict`` gives it. Raises
    RecordError, in one line, if a key that they need is missing or wrong."""
    values = dict(spec)
    for key, whole in (("model", "sizes"), ("contender", "knobs")):
        if isinstance(values.get(key), dict):
            values[key] = values[key] | {whole: values[key]}
    try:
        return validated(RecordedSpec, values, "spec")
    except SpecError as error:
        raise RecordError(str(error)) from None


def read_records(roots: Iterable[Path], problems: list[str]) -> Iterator[RunRecord]:
    """The records below the roots whose specification can be read, too; ``problems`` get a line per
    file that is none."""
    for path in find_records(roots):
        try:
            record = read_record(path)
            read_spec(record.spec)
        except RecordError as error:
            problems.append(f"{path}: {str(error).removeprefix(f'{path}: ')}")
        else:
            yield record


def flat_spec(spec: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A spec's values as words by the keys of a command line: ``model`` (its name),
    ``model.layers``, ``num_gpus``."""
    words: dict[str, str] = {}
    for key, value in spec.items():
        path = above if above and key == "name" else f"{above}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            words |= flat_spec(value, path)
        else:
            words[path] = value if isinstance(value, str) else json.dumps(value)
    return words


def check_key(key: str, flat: Collection[Mapping[str, str]]) -> None:
    """Raise SpecError, with the nearest key, if flat specs do not have this one."""
    known = sorted({name for words in flat for name in words})
    if known and key not in known:
        nearest = get_close_matches(key, known, 1) or [name for name in known if key in name]
        raise SpecError(f"{key}: is a key of no point here (try {(nearest or known)[0]})")


def differences(flat: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of each of several flat specs, the values of the keys that differ between them, without what
    follows from the name of its group (``model.layers`` from ``model``, if no model has two)."""
    keys = dict.fromkeys(key for words in flat for key in words)
    values = {  # by key: (name of the group, value)
        key: {(words.get(key.partition(".")[0], ""), words.get(key, "")) for words in flat}
        for key in keys
    }
    varying = [
        key
        for key, seen in values.items()
        if len({value for _, value in seen}) > 1
        and ("." not in key or len(seen) > len({name for name, _ in seen}))
    ]
    return [{key: words[key] for key in varying if key in words} for words in flat]


def unchecked(spec: Mapping[str, Any]) -> str:
    """How a run was compared with one process less strictly than by default, in a few words that
    every table and figure with this run shows; empty if it was not."""
    measure = spec.get("measure") or {}
    if measure.get("gate") is False:
        return "measure.gate=false"
    tolerance = measure.get("gate_tolerance", GATE_TOLERANCE)
    return "" if tolerance == GATE_TOLERANCE else f"measure.gate_tolerance={tolerance:g}"
