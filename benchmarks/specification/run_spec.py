"""RunSpec: what is run. Frozen, validated once, hashed; the only thing that ranks are given."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from zeropp.cluster import Cluster
from zeropp.literals import Precision
from zeropp.plan import PlanRequest, Settings
from zeropp.shape import ModelShape
from zeropp.training import OptimizerConfig

T = TypeVar("T")

_STRICT = {"extra": "forbid"}


class SpecError(ValueError):
    """Bad input. The message is one line: field, value, and what would work."""


@dataclass(frozen=True)
class DataSpec:
    """Where tokens come from.

    ``text``: any file, read as bytes (256 tokens). ``megatron``: a ``.bin``/``.idx`` pair, named
    without its suffix. ``synthetic``: uniform random tokens, for speed alone.
    """

    kind: Literal["text", "megatron", "synthetic"]
    path: str = ""  # relative paths are looked up from the checkout
    seed: int = 1234

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class MeasureSpec:
    """What is timed, and what must hold before it is."""

    warmup_steps: int = 2
    steps: int = 10
    gate: bool = True  # compare three steps with one process before timing
    # Relative error of loss, gradient norm and each parameter's update that is allowed beside what
    # rounding does in the run's precision (see benchmarks/worker/gate.py).
    gate_tolerance: float = 1e-4
    timeline: bool = True  # record the spans of one extra step after the timed ones
    timeout_s: float = 600.0  # of the whole attempt

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class RunSpec:
    """One cell of a comparison: everything that decides what is computed, and nothing else."""

    model: ModelShape
    cluster: Cluster
    num_gpus: int
    contender: Settings
    global_batch: int  # sequences a step
    microbatch_size: int  # sequences
    precision: Precision
    optimizer: OptimizerConfig
    data: DataSpec
    measure: MeasureSpec
    seed: int = 0  # of the initial parameters

    __pydantic_config__ = _STRICT

    @cached_property
    def spec_id(self) -> str:
        """Readable name with a hash of the whole spec: equal specs have equal ids."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:10]
        return f"{self.model.name}-{self.contender.name}-{self.num_gpus}gpu-{digest}"

    @property
    def request(self) -> PlanRequest:
        """The part of the spec that a planner needs."""
        return PlanRequest(
            shape=self.model,
            cluster=self.cluster,
            num_gpus=self.num_gpus,
            global_batch=self.global_batch,
            microbatch_size=self.microbatch_size,
            precision=self.precision,
            settings=self.contender,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries and lists, as they come back from JSON."""
        return cast("dict[str, Any]", json.loads(json.dumps(dataclasses.asdict(self))))

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))


_LIMITS: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        (
            *("num_gpus", "global_batch", "microbatch_size", "measure.steps", "measure.timeout_s"),
            *("model.layers", "model.hidden", "model.ffn", "model.vocab", "model.heads"),
            *("model.kv_heads", "model.seq", "cluster.gpus_per_node", "cluster.nics_per_node"),
            *("contender.tp", "contender.pp", "contender.shard", "contender.replicate"),
            *("contender.chunks", "contender.unit", "contender.activation_cap"),
            "cluster.device.units",
        ),
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        (
            *("measure.warmup_steps", "contender.prefetch", "seed", "data.seed"),
            *("optimizer.lr", "optimizer.weight_decay", "optimizer.clip_norm", "tolerance"),
            *("cluster.device.overlap_slowdown", "cluster.device.reserved_gib"),
            *("cluster.device.kernel_us", "cluster.device.launch_us"),
            *("cluster.intra.latency_us", "cluster.inter.latency_us"),
            *("cluster.intra.hop_us", "cluster.inter.hop_us"),
        ),
    ),
    (
        "more than 0",
        lambda value: value > 0,
        (
            *("measure.gate_tolerance", "cluster.intra.bandwidth_gb_s"),
            *("cluster.inter.bandwidth_gb_s", "cluster.intra.efficiency"),
            *("cluster.inter.efficiency", "cluster.device.memory_gib"),
            *("cluster.device.memory_bandwidth_gb_s", "cluster.device.memory_efficiency"),
            *("cluster.device.matmul_bf16_tflops", "cluster.device.matmul_fp32_tflops"),
            *("cluster.device.peak_bf16_tflops", "cluster.device.peak_fp32_tflops"),
            *("cluster.device.attention_efficiency", "cluster.reduction_gain"),
            *("cluster.group_shares", "contender.activation_cap_gib"),
        ),
    ),
    ("from 0 to less than 1", lambda value: 0 <= value < 1, ("model.dropout",)),
)

_adapter = lru_cache(TypeAdapter)  # takes milliseconds to make


def validated(kind: type[T], values: Any, prefix: str = "") -> T:
    """Values as a ``kind``; raises SpecError with one line for the first thing wrong, whose field
    is named below ``prefix``."""
    try:
        adapter = _adapter(kind)  # type: ignore[arg-type]  # mypy: types are hashable
        return cast("T", adapter.validate_python(values))
    except ValidationError as error:
        raise SpecError(_one_line(error, values, prefix)) from None


def spec_from_mapping(values: Mapping[str, Any]) -> RunSpec:
    """Build and check a spec; raises SpecError with one line for the first thing wrong."""
    spec = validated(RunSpec, dict(values))
    check_ranges(spec)
    check_heads(spec.model)
    _check_names(spec)
    return spec


def check_priced(cluster: Cluster, precision: Precision) -> None:
    """Refuse a device whose peak is not known for the precision; raises SpecError."""
    device = cluster.device
    peaks = {"bf16": device.peak_bf16_tflops, "fp32": device.peak_fp32_tflops}
    if peaks[precision] is None:
        raise SpecError(
            f"cluster={cluster.name}: device {device.name} has no peak_{precision}_tflops to price "
            "with (use another cluster or precision)"
        )


def load_spec(path: Path) -> RunSpec:
    """Read a frozen spec from JSON."""
    return spec_from_mapping(json.loads(path.read_text()))


def _one_line(error: ValidationError, values: Any, prefix: str) -> str:
    problems = error.errors(include_url=False)
    first, path = problems[0], _path(problems[0]["loc"], values)
    field = ".".join([prefix] * bool(prefix) + path)
    if first["type"] == "unexpected_keyword_argument":
        return f"{field}={first['input']!r}: unknown key"
    if first["type"] == "missing":
        return f"{field}: missing; it has no default"
    same = [p["msg"] for p in problems if _path(p["loc"], values) == path]
    return f"{field}={first['input']!r}: {'; or '.join(dict.fromkeys(same)).lower()}"


def _path(location: tuple[int | str, ...], values: Any) -> list[str]:
    """The keys of a location, without what follows the value itself: members of its union."""
    path = []
    for part in location:
        if not isinstance(values, Mapping):
            break
        path.append(str(part))
        values = values.get(part)
    return path


def check_ranges(spec: object) -> None:
    """Refuse numbers that mean nothing, in whatever of ``_LIMITS`` a spec has; raises SpecError."""
    for words, holds, paths in _LIMITS:
        for path in paths:
            for value in _numbers_at(spec, path):
                if not math.isfinite(value):
                    raise SpecError(f"{path}={value}: must be finite")
                if not holds(value):
                    raise SpecError(f"{path}={value}: must be {words}")


def _numbers_at(spec: object, path: str) -> list[float]:
    """The numbers at a dotted path; none where there is no such path, or no number."""
    for name in path.split("."):
        spec = getattr(spec, name, None)
    values = spec if isinstance(spec, tuple) else (spec,)
    return [value for value in values if isinstance(value, int | float)]


def _check_names(spec: RunSpec) -> None:
    for field, name in (("model.name", spec.model.name), ("cluster.name", spec.cluster.name)):
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise SpecError(
                f"{field}={name!r}: folders and files are named by it (letters, digits, _ . + -)"
            )


def check_heads(shape: ModelShape) -> None:
    """Refuse heads that do not divide what they share; raises SpecError."""
    if shape.hidden % shape.heads:
        raise SpecError(f"model.heads={shape.heads}: must divide model.hidden={shape.hidden}")
    if shape.heads % shape.kv_heads:
        raise SpecError(f"model.kv_heads={shape.kv_heads}: must divide model.heads={shape.heads}")
