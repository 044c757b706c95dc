"""RunSpec: everything that defines a run. It is frozen, validated once and hashed, and it is all
that ranks get."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import SkipValidation

from benchmarks.specification import GATE_TOLERANCE, SpecError
from benchmarks.specification.contenders import CONTENDERS, name_of
from benchmarks.specification.reading import validated
from zeropp.choose.task import Candidate, Knobs, Task
from zeropp.price.cluster import Cluster
from zeropp.schedule.plan import Plan
from zeropp.types.literals import (
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_TO_1,
    MORE_THAN_0,
    Auto,
    Precision,
)
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

T = TypeVar("T")

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class DataSpec:
    """The source of the tokens.

    ``text``: any file, read as bytes (256 tokens). ``megatron``: a ``.bin``/``.idx`` pair, named
    without its suffix. ``synthetic``: uniform random tokens, to measure speed only.
    """

    kind: Literal["text", "megatron", "synthetic"]
    path: str = ""  # a relative path begins at the checkout
    seed: Annotated[int, AT_LEAST_0] = 1234

    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class MeasureSpec:
    """What is timed, and what is checked before."""

    warmup_steps: Annotated[int, AT_LEAST_0] = 2
    steps: Annotated[int, AT_LEAST_1] = 10
    gate: bool = True  # compare three steps with one process before timing
    # The relative error of loss, gradient norm and each parameter's update that is allowed in
    # addition to what rounding does in the run's precision (see benchmarks/worker/gate.py).
    gate_tolerance: Annotated[float, MORE_THAN_0] = GATE_TOLERANCE
    timeline: bool = True  # record the spans of one extra step after the timed ones
    timeout_s: Annotated[float, AT_LEAST_1] = 600.0  # of the whole attempt

    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What is trained, on which cluster: the same for every contender of a comparison."""

    model: ModelShape
    cluster: Cluster
    num_gpus: Annotated[int, AT_LEAST_1]
    global_batch: Annotated[int, AT_LEAST_1]  # sequences per step
    precision: Precision

    @property
    def task(self) -> Task:
        """The same as the library's type."""
        return Task(
            shape=self.model,
            cluster=self.cluster,
            num_gpus=self.num_gpus,
            global_batch=self.global_batch,
            precision=self.precision,
        )


@dataclass(frozen=True, kw_only=True)
class SearchSpec(TaskSpec):
    """A task for which plans are searched, and the room that they must leave."""

    # What a plan must leave free of the device's memory, as a share of its priced peak. None: what
    # published runs took beyond theirs (``ratio_errors.memory_room``).
    memory_margin: Annotated[float, FROM_0_TO_1] | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec(TaskSpec):
    """One point of a comparison: everything that decides what is computed, and nothing else."""

    contender: SkipValidation[Knobs]  # validated before, as the contender's own type
    microbatch_size: Annotated[int | Auto, AT_LEAST_1]  # sequences
    optimizer: OptimizerConfig
    data: DataSpec
    measure: MeasureSpec
    seed: Annotated[int, AT_LEAST_0] = 0  # of the initial parameters

    __pydantic_config__ = {"extra": "forbid", "arbitrary_types_allowed": True}  # noqa: RUF012

    @cached_property
    def spec_id(self) -> str:
        """A readable name with a hash of the whole spec; equal specs have equal ids."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:10]
        return f"{self.model.name}-{self.contender.name}-{self.num_gpus}gpu-{digest}"

    @property
    def candidate(self) -> Candidate[Knobs]:
        """The contender's settings. If ``microbatch_size`` is still ``auto``, it is 1."""
        size = 1 if self.microbatch_size == "auto" else self.microbatch_size
        return Candidate(self.contender, size)

    def plan(self) -> Plan:
        """What every rank does, made once; raises InfeasibleError if no plan exists."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        return CONTENDERS[self.contender.name].plan(self.task, self.candidate)

    def to_dict(self) -> dict[str, Any]:
        """The spec as nested dictionaries and lists, equal to what JSON reads back. What older
        specs, and their ids, do not have is left out at its default."""
        tree = cast("dict[str, Any]", json.loads(json.dumps(dataclasses.asdict(self))))
        for part, field in (("model", "head_width"), ("cluster", "busbw_gb_s")):
            if tree[part][field] is None:
                del tree[part][field]
        return tree

    def to_json(self) -> str:
        """The spec as canonical JSON: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))


def spec_from_mapping(values: Mapping[str, Any]) -> RunSpec:
    """Build and check a spec; raises SpecError with one line for the first mistake."""
    values = dict(values)
    if "contender" in values:
        values["contender"] = knobs_from(values["contender"])
    spec = validated(RunSpec, values)
    check_heads(spec.model)
    for field, name in (("model.name", spec.model.name), ("cluster.name", spec.cluster.name)):
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise SpecError(
                f"{field}={name!r}: must be a name for files (use letters, digits, _ . + -)"
            )
    return spec


def knobs_from(values: Any) -> Knobs:
    """A contender's knobs as the contender's own type; raises SpecError for an unknown contender or
    knob."""
    name = values.get("name") if isinstance(values, Mapping) else values
    if isinstance(values, Mapping) and name:
        name = name_of(values)
        values = {**values, "name": name}
    if name not in CONTENDERS:
        raise SpecError(
            f"contender.name={name!r}: no such contender (known: {', '.join(CONTENDERS)})"
        )
    kind: Any = CONTENDERS[name].knobs
    known = [field.name for field in dataclasses.fields(kind)]
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            nearest = f"did you mean contender.{near[0]}?; " if near else ""
            raise SpecError(
                f"contender.{key}={value!r}: {name} has no such knob ({nearest}it has "
                f"{', '.join(knob for knob in known if knob != 'name')})"
            )
    knobs: Knobs = validated(kind, dict(values), "contender")
    return knobs


_NEEDED = {"fp32": "peak_fp32_tflops", "bf16": "peak_bf16_tflops", "fp8": "eight_bit_gain"}


def check_priced(cluster: Cluster, precision: Precision) -> None:
    """Raise SpecError if the device's peak is not known for the precision, since nothing can be
    priced then."""
    if not is_priced(cluster, precision):
        raise SpecError(
            f"cluster={cluster.name}: device {cluster.device.name} has no {_NEEDED[precision]} to "
            f"simulate precision={precision} with (use another cluster or precision)"
        )


def is_priced(cluster: Cluster, precision: Precision) -> bool:
    """Whether the device's peak is known for the precision, so that plans can be priced."""
    return getattr(cluster.device, _NEEDED[precision]) is not None


def load_spec(path: Path) -> RunSpec:
    """Read a spec from a JSON file."""
    return spec_from_mapping(json.loads(path.read_text(encoding="utf-8")))


def check_heads(shape: ModelShape) -> None:
    """Raise SpecError unless the heads divide the hidden size, the key/value heads divide the
    heads, and documents are no longer than a sequence."""
    if shape.document > shape.seq:
        raise SpecError(f"model.document={shape.document}: must be at most model.seq={shape.seq}")
    if shape.head_width is None and shape.hidden % shape.heads:
        raise SpecError(f"model.heads={shape.heads}: must divide model.hidden={shape.hidden}")
    if shape.heads % shape.kv_heads:
        raise SpecError(f"model.kv_heads={shape.kv_heads}: must divide model.heads={shape.heads}")
