"""The schema of published training measurements: which columns a row has, and which values agree.

There is one CSV file per table and one line per measured number; the columns are the fields of
``PublishedRow`` (``docs/published_rows.md`` explains each). ``source``, ``url``, ``table``,
``model``, ``verified`` and ``remark`` are for people and never change a price.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from benchmarks.studies.validation.quantities import METRICS, Metric, Unit
from benchmarks.studies.validation.spelling import (
    Count,
    Decimal,
    OwnKnobs,
    StageCuts,
    Text,
    Whole,
    YesNo,
)
from benchmarks.studies.validation.stages import CHUNKED, TWO_CHUNKS, ScheduleName, are_cuts
from zeropp.cost import parameter_count
from zeropp.literals import Recompute
from zeropp.programs import entry_named
from zeropp.shape import Family, ModelShape

# "fitted": constants of the cost model were fitted on the row's table. "adjusted": no constant was,
# but a trait of its program, or a value that its source states, was chosen after the table's error
# had been seen. "held_out": neither. "computed": the number is of a simulator or a formula of
# the source, and nobody measured it; such rows are priced, but no total of measurements counts
# them.
Role = Literal["fitted", "adjusted", "held_out", "computed"]
Device = Literal["v100", "a100", "a800", "h100", "h800", "h200", "b200", "gb200", "stated"]
Precise = Literal[
    "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "int8", "fp4", "nvfp4", "mxfp4"
]  # of the products
Half = Literal["fp32", "fp16", "bf16"]
# Nominal power of the boards in W (results/published/hardware.csv), for rows with ``power_w``.
POWER_W = {"v100": 300, "a100": 400, "a800": 400, "h100": 700, "h800": 700, "h200": 700}
# The range of each number of a device; one outside it is in another unit.
PLAUSIBLE = {
    "memory_gib": (1, 2000), "memory_bandwidth_gb_s": (50, 50000), "peak_bf16_tflops": (5, 20000),
    "power_w": (20, 5000), "intra_gb_s": (1, 5000), "nic_gbit_s": (0.1, 10000),
}  # fmt: skip
SLACK = 0.03  # parameters may differ by this share from those of the shape


class UnpredictableError(ValueError):
    """A correct row has no price; the message is one line that says why."""


def _registered(name: str) -> str:
    entry_named(name)
    return name


class PublishedRow(BaseModel):
    """One measured number and everything on which its price depends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Text
    url: Text
    table: Text
    verified: Literal["yes", "secondary"]
    role: Role
    assumed: str = ""  # columns of this row that the source does not state, separated by spaces
    program: Annotated[Text, AfterValidator(_registered)]
    # The model.
    model: Text
    params_b: Decimal | None = None
    family: Family
    gated_mlp: YesNo
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    ffn: Count
    vocab: Count
    seq: Count
    tied_embeddings: YesNo
    # Device and network; a blank cell means the value of the device's preset in ``conf/cluster``.
    device: Device
    memory_gib: Decimal | None = None
    memory_bandwidth_gb_s: Decimal | None = None
    peak_bf16_tflops: Decimal | None = None
    power_w: Decimal | None = None
    intra_link: Literal["nvlink", "pcie"] | None = None
    intra_gb_s: Decimal | None = None  # of one GPU's links inside a node, per direction
    gpus_per_node: Count | None = None
    nics_per_node: Count | None = None
    nic_gbit_s: Decimal | None = None
    # Degrees.
    num_gpus: Count
    tp: Count
    pp: Count
    chunks: Count
    dp: Count
    cp: Count
    ep: Count
    sequence_parallel: YesNo
    zero: Whole
    zero3_group: Count | None = None  # ranks over which ZeRO-3 shards; blank: all of dp
    zero1_group: Count | None = None  # replicas over which ZeRO-1 shards; blank: all of them
    schedule: ScheduleName
    cuts: StageCuts | None = None  # where stages begin and the last ends; blank: the program's rule
    knobs: OwnKnobs | None = None  # of schedule=zeropp: those that are not at their defaults
    # Batch, recomputation and types.
    micro_batch: Count
    global_batch: Count
    recompute: Recompute
    recompute_blocks: Count | None = None  # blank: all blocks
    dtype: Precise
    gradient_dtype: Half | None = None  # of the sum over microbatches; blank: the program's
    reduce_dtype: Half | None = None  # on the wire; blank: the program's
    # Traits in which the run differs from its program; blank: the program's.
    attention: Literal["flash", "unfused"] | None = None
    compiled: YesNo | None = None
    overlap_gradients: YesNo | None = None
    overlap_tensor: YesNo | None = None
    offload: Literal["none", "optimizer", "parameters", "activations"]
    # The number.
    metric: Text
    value: Text
    unit: Unit
    attention_flops: Literal["full", "causal"] | None = None  # of FLOPs and utilization alone
    utilization_peak_tflops: Decimal | None = None  # blank: the device's dense peak
    remark: str = ""

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return ModelShape(
            name=self.model, family=self.family, layers=self.layers, hidden=self.hidden,
            heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn, vocab=self.vocab, seq=self.seq,
            tied_embeddings=self.tied_embeddings, gated_mlp=self.gated_mlp,
        )  # fmt: skip

    @property
    def measure(self) -> Metric:
        """The metric's kind, units and definition."""
        return METRICS[self.metric]

    @property
    def measured(self) -> float:
        """The number in the row's unit; 1 for yes and 0 for no."""
        return float(self.value == "yes") if self.unit == "yes/no" else float(self.value)

    @property
    def run(self) -> tuple[tuple[str, Any], ...]:
        """What two rows of the same run have in common: all columns except those of the number."""
        return tuple((name, value) for name, value in self if name not in _OF_THE_NUMBER)

    @model_validator(mode="after")
    def _consistent(self) -> PublishedRow:
        for check in _CHECKS:
            wrong = check(self)
            if wrong:
                raise ValueError(wrong)
        return self


COLUMNS = tuple(PublishedRow.model_fields)
OPTIONAL = ("cuts", "knobs", "intra_gb_s")  # a table need not have these columns
_NUMBER: TypeAdapter[float] = TypeAdapter(Decimal)
_OF_THE_NUMBER = (
    "metric", "value", "unit", "attention_flops", "utilization_peak_tflops", "verified", "assumed",
    "remark",
)  # fmt: skip


def _metric(row: PublishedRow) -> str:
    if row.metric not in METRICS:
        return f"metric={row.metric!r}: must be one of {', '.join(METRICS)}"
    if row.unit not in row.measure.units:
        return f"unit={row.unit!r}: {row.metric} must be in {' or '.join(row.measure.units)}"
    try:
        if row.unit == "yes/no" and row.value not in ("yes", "no"):
            return f"value={row.value!r}: {row.metric} must be yes or no"
        if row.unit != "yes/no":
            _NUMBER.validate_python(row.value)
    except ValidationError:
        return f"value={row.value!r}: must be a number above 0 in digits, without unit or commas"
    kind, share = row.measure.kind, row.measured / row.measure.units[row.unit]
    if kind == "utilization" and not 0.01 <= share <= 1:
        return f"value={row.value}: {row.metric} is {share:.3%}, not 1 to 100 % (unit={row.unit!r})"
    if (kind in ("flops", "utilization")) != (row.attention_flops is not None):
        wanted = "full or causal" if row.attention_flops is None else "blank"
        return f"attention_flops={row.attention_flops or ''!r}: must be {wanted} for {row.metric}"
    if kind != "utilization" and row.utilization_peak_tflops:
        return f"utilization_peak_tflops={row.utilization_peak_tflops}: {row.metric} has no peak"
    return ""


def _shape(row: PublishedRow) -> str:
    if row.hidden % row.heads:
        return f"heads={row.heads}: must divide hidden={row.hidden}"
    if row.heads % row.kv_heads:
        return f"kv_heads={row.kv_heads}: must divide heads={row.heads}"
    if row.params_b is None:
        return ""
    whole = parameter_count(row.shape) / 1e9
    if abs(row.params_b / whole - 1) > SLACK:
        return f"params_b={row.params_b:g}: the shape has {whole:.4g} billion parameters"
    return ""


def _degrees(row: PublishedRow) -> str:
    made = row.tp * row.pp * row.dp * row.cp
    if made != row.num_gpus:
        return (
            f"num_gpus={row.num_gpus}: tp={row.tp} x pp={row.pp} x dp={row.dp} x cp={row.cp} is "
            f"{made}"
        )
    if row.zero > 3:
        return f"zero={row.zero}: must be 0, 1, 2 or 3"
    for name, group, zeros in (
        ("zero3_group", row.zero3_group, (3,)),
        ("zero1_group", row.zero1_group, (1, 2)),
    ):
        if group and (row.zero not in zeros or row.dp % group):
            return f"{name}={group}: needs zero={zeros[0]}, and must divide dp={row.dp}"
    if row.sequence_parallel and row.tp == 1:
        return "sequence_parallel=yes: needs tp above 1"
    return ""


def _units(row: PublishedRow) -> str:
    for name, (low, high) in PLAUSIBLE.items():
        number = getattr(row, name)
        if number is not None and not low <= number <= high:
            return f"{name}={number:g}: must be from {low} to {high} in the unit that the name says"
    if row.sequence_parallel and row.seq % row.tp:
        return f"seq={row.seq}: sequence_parallel=yes needs a multiple of tp={row.tp}"
    return ""


def _device(row: PublishedRow) -> str:
    numbers = (row.memory_gib, row.memory_bandwidth_gb_s, row.peak_bf16_tflops)
    if row.device == "stated" and None in numbers:
        return "device=stated: needs memory_gib, memory_bandwidth_gb_s and peak_bf16_tflops"
    if row.intra_link and row.intra_gb_s:
        return f"intra_gb_s={row.intra_gb_s:g}: leave intra_link={row.intra_link} or it blank"
    if row.power_w and row.device not in POWER_W:
        return f"power_w={row.power_w:g}: no nominal power of device={row.device} is known"
    for name in ("heads", "ffn"):
        if getattr(row, name) % row.tp:
            return f"tp={row.tp}: must divide {name}={getattr(row, name)}"
    return ""


def _schedule(row: PublishedRow) -> str:
    if row.schedule == "none" if row.pp > 1 else row.schedule not in ("none", "zeropp"):
        return f"schedule={row.schedule}: pp={row.pp} stages (none is for pp=1 and only for it)"
    wanted = 2 if row.schedule in TWO_CHUNKS else 1
    if row.schedule not in CHUNKED and row.chunks != wanted:
        return f"chunks={row.chunks}: schedule={row.schedule} has {wanted}"
    if row.schedule.startswith("interleaved") and row.chunks == 1:
        return f"chunks=1: schedule={row.schedule} has 2 or more"
    if row.knobs and row.schedule != "zeropp":
        return f"knobs: schedule={row.schedule} has none"
    stages = 0 if row.schedule == "zeropp" or row.pp == 1 else row.pp * row.chunks
    if row.cuts and not are_cuts(row.cuts, stages, row.layers):
        return (
            f"cuts={' '.join(f'{cut:g}' for cut in row.cuts)!r}: needs pp > 1, schedule other than "
            f"zeropp, and where pp={row.pp} x chunks={row.chunks} stages begin and end, from 0 to "
            f"layers + 2 = {row.layers + 2}"
        )
    if row.pp * row.chunks > row.layers + 2:
        return f"chunks={row.chunks}: pp={row.pp} x chunks are more stages than layers={row.layers}"
    return ""


def _batch(row: PublishedRow) -> str:
    if row.global_batch % (row.micro_batch * row.dp):
        return (
            f"global_batch={row.global_batch}: must be a multiple of micro_batch="
            f"{row.micro_batch} x dp={row.dp} (in sequences)"
        )
    blocks = row.recompute_blocks
    if blocks and (row.recompute == "none" or blocks > row.layers):
        return f"recompute_blocks={blocks}: recompute={row.recompute}, layers={row.layers}"
    unknown = [name for name in row.assumed.split() if name not in COLUMNS]
    return f"assumed={unknown[0]!r}: must name columns" if unknown else ""


_CHECKS: tuple[Callable[[PublishedRow], str], ...] = (
    _metric, _shape, _degrees, _units, _device, _schedule, _batch,
)  # fmt: skip
