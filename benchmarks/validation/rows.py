"""The schema of published training measurements: which columns a row has, and which values agree.

There is one CSV file per table and one line per measured number; the columns are the fields of
``PublishedRow`` (``docs/published_rows.md`` explains each). ``source``, ``url``, ``table``,
``model``, ``verified`` and ``remark`` are for people and never change a price.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from baselines.zeropp.contender import ZeroppKnobs
from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.specification.reading import validated
from zeropp.price import parameter_count
from zeropp.price.programs import Scaling, program_named
from zeropp.types.data import DATA
from zeropp.types.literals import Recompute
from zeropp.types.shape import Family, ModelShape

# ZeroPP's knobs that no other column says.
_OWN_KNOBS = (
    "unit", "activation_cap", "replicate_zero", "reduce_every", "gradient_parts", "prefetch",
    "split_backward", "placement",
)  # fmt: skip
_DECIMAL = r"[0-9]{1,15}(?:\.[0-9]+)?(?:e[-+]?[0-9]{1,2})?"


def _cell(pattern: str, read: Callable[[str], Any], mistake: str) -> BeforeValidator:
    """What reads cells that match ``pattern``, and says the ``mistake`` of others."""

    def made(cell: Any) -> Any:
        if isinstance(cell, str) and re.fullmatch(pattern, cell):
            return read(cell)
        raise ValueError(mistake)

    return BeforeValidator(made)


def _own_knobs(cell: Any) -> ZeroppKnobs:
    """The knobs that a cell states, all others at their defaults."""
    stated = [word.partition("=")[::2] for word in str(cell).split()]
    for name, value in stated:
        if name not in _OWN_KNOBS or not value:
            raise ValueError(f"{name!r} must be one of {', '.join(_OWN_KNOBS)}, with its value")
    from omegaconf import OmegaConf  # slow to import, and few need it

    return validated(ZeroppKnobs, OmegaConf.to_container(OmegaConf.from_dotlist(cell.split())))


Whole = Annotated[
    int, _cell("[0-9]{1,15}", int, "must be a whole number in digits only, for example 8192")
]
Count = Annotated[Whole, Field(ge=1)]
Decimal = Annotated[
    float,
    _cell(_DECIMAL, float, "must be a number in digits with at most a point, for example 41.5"),
    Field(gt=0),
]
YesNo = Annotated[bool, _cell("yes|no", lambda cell: cell == "yes", "must be yes or no")]
Text = Annotated[str, _cell(r"(?s).*\S.*", str, "must not be blank")]
# The places at which stages begin, and the end of the last one.
StageCuts = Annotated[
    tuple[int, ...],
    _cell(
        "[0-9]{1,6}( [0-9]{1,6})*",
        lambda cell: tuple(map(int, cell.split())),
        "must be numbers of pieces with one space between them, such as 0 13 26",
    ),
]
OwnKnobs = Annotated[ZeroppKnobs, BeforeValidator(_own_knobs)]


Kind = Literal["time", "rate", "flops", "utilization", "layer", "memory", "limit"]
Unit = Literal[
    "us", "ms", "s", "min", "1/s", "samples/s", "samples/s/GPU", "tok/s", "tok/s/GPU",
    "TFLOP/s/GPU", "PFLOP/s", "%", "fraction", "GB", "GiB", "MB", "MiB", "yes/no",
]  # fmt: skip

_TIMES = {"us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}
_BYTES = {"GB": 1e-9, "GiB": 2.0**-30, "MB": 1e-6, "MiB": 2.0**-20}
_SHARES = {"%": 100.0, "fraction": 1.0}


@dataclass(frozen=True)
class Metric:
    """A metric's kind and units. ``units`` gives the scale of each unit: a value in the unit is the
    value in SI units (seconds, 1/second, FLOP/s, a fraction, bytes) times the scale. ``per_gpu``
    means divided by the GPUs of the run."""

    kind: Kind
    units: Mapping[str, float]
    hardware: bool = False  # counts the FLOPs that recomputation runs again
    per_gpu: bool = False


# A metric's name is its definition. ``model_`` and ``mfu`` count the model's FLOPs only;
# ``hardware_`` and ``hfu`` also count recomputation (arXiv 2205.05198, appendix). ``allocated`` is
# the memory of tensors, ``reserved`` what torch's allocator holds. The unit says the rest: GB is
# 10^9 bytes, GiB is 2^30.
SPEEDS = ("time", "rate", "flops", "utilization")  # kinds of metrics that say how long a step took
METRICS: Mapping[str, Metric] = {
    "step_time": Metric("time", _TIMES),
    "steps_per_s": Metric("rate", {"1/s": 1.0}),
    "samples_per_s": Metric("rate", {"samples/s": 1.0}),
    "samples_per_s_per_gpu": Metric("rate", {"samples/s/GPU": 1.0}, per_gpu=True),
    "tokens_per_s": Metric("rate", {"tok/s": 1.0}),
    "tokens_per_s_per_gpu": Metric("rate", {"tok/s/GPU": 1.0}, per_gpu=True),
    "model_tflops_per_gpu": Metric("flops", {"TFLOP/s/GPU": 1e-12}, per_gpu=True),
    "hardware_tflops_per_gpu": Metric("flops", {"TFLOP/s/GPU": 1e-12}, True, per_gpu=True),
    "model_pflops": Metric("flops", {"PFLOP/s": 1e-15}),
    "hardware_pflops": Metric("flops", {"PFLOP/s": 1e-15}, True),
    "mfu": Metric("utilization", _SHARES),
    "hfu": Metric("utilization", _SHARES, True),
    "layer_forward_time": Metric("layer", _TIMES),
    "layer_backward_time": Metric("layer", _TIMES),
    "layer_time": Metric("layer", _TIMES),
    "peak_memory_allocated": Metric("memory", _BYTES),
    "peak_memory_reserved": Metric("memory", _BYTES),
    "activation_memory": Metric("memory", _BYTES),  # of the first pipeline rank
    "state_memory": Metric("memory", _BYTES),  # parameters, gradients and optimizer, same rank
    "ran_out_of_memory": Metric("limit", {"yes/no": 1.0}),
}


ScheduleName = Literal[
    "none", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zbv",
    "interleaved_zb", "zeropp", "dualpipe", "dualpipev", "chimera", "hanayo", "v_half", "v_min",
    "seq1f1b",
]  # fmt: skip
CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zeropp", "hanayo", "seq1f1b")
TWO_CHUNKS = ("zbv", "dualpipe", "dualpipev", "v_half", "v_min")


# "fitted": constants of the cost model were fitted on the row's table. "adjusted": no constant was,
# but a trait of its program, or a value that its source states, was chosen after the table's error
# had been seen. "held_out": neither.
Role = Literal["fitted", "adjusted", "held_out"]
# The presets of GPUs; "stated" is a device whose numbers the row itself has.
DEVICES = (
    *sorted({p.stem for p in (DATA / "conf/cluster").glob("*.yaml")} - {"cpu_gloo", "cpu_2cores"}),
    "stated",
)
Precise = Literal[
    "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "int8", "fp4", "nvfp4", "mxfp4"
]  # of the products
Half = Literal["fp32", "fp16", "bf16"]
# The range of each number of a device; one outside it is in another unit.
PLAUSIBLE = {
    "memory_gib": (1, 2000), "memory_bandwidth_gb_s": (50, 50000), "peak_bf16_tflops": (5, 20000),
    "products_tflops": (1, 20000), "power_w": (20, 5000), "intra_gb_s": (1, 5000),
    "nic_gbit_s": (0.1, 10000), "busbw_gb_s": (0.05, 10000),
}  # fmt: skip
SLACK = 0.03  # parameters may differ by this share from those of the shape
NAME_SLACK = 1.5  # the factor by which they may differ from the size in the model's name
# Programs that shard parameters and divide nothing else.
SHARD_ALONE = ("fsdp", "fms_fsdp", "fms_fsdp_eager", "llm_foundry")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([BMTbmt])\b")


class UnpredictableError(ValueError):
    """A correct row has no price; the message is one line that says why."""


class PublishedRow(BaseModel):
    """One measured number and everything on which its price depends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Text
    url: Text
    table: Text
    verified: Literal["yes", "secondary"]
    role: Role
    assumed: str = ""  # columns of this row that the source does not state, separated by spaces
    program: Annotated[Text, AfterValidator(lambda name: program_named(name).name)]
    # The model.
    model: Text
    params_b: Decimal | None = None
    family: Family
    gated_mlp: YesNo
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_width: Count | None = None  # blank: hidden / heads
    ffn: Count
    vocab: Count
    seq: Count
    document: Count | None = None  # tokens of the packed documents at whose ends attention ends
    tied_embeddings: YesNo
    # Device and network; a blank cell means the value of the device's preset in ``conf/cluster``.
    device: Annotated[
        str,
        _cell(
            "|".join(DEVICES),
            str,
            f"must be one of {', '.join(DEVICES)}: a file of conf/cluster, or stated",
        ),
    ]
    memory_gib: Decimal | None = None
    memory_bandwidth_gb_s: Decimal | None = None
    peak_bf16_tflops: Decimal | None = None
    products_tflops: Decimal | None = None  # reached by large 16-bit products
    power_w: Decimal | None = None
    intra_link: Literal["nvlink", "pcie"] | None = None
    intra_gb_s: Decimal | None = None  # of one GPU's links inside a node, per direction
    gpus_per_node: Count | None = None
    nics_per_node: Count | None = None
    nic_gbit_s: Decimal | None = None
    busbw_gb_s: Decimal | None = None  # of large collectives between nodes, as measured
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
    scaling: Scaling | None = None  # of 8-bit products; blank: the program's
    gradient_dtype: Half | None = None  # of the sum over microbatches; blank: the program's
    reduce_dtype: Half | None = None  # on the wire; blank: the program's
    # Traits in which the run differs from its program; blank: the program's.
    attention: Literal["flash", "unfused"] | None = None
    compiled: YesNo | None = None
    overlap_gradients: YesNo | None = None
    overlap_tensor: YesNo | None = None
    offload: Literal["none", "optimizer", "parameters", "activations"]
    offload_blocks: Count | None = None  # of offload=activations; blank: not said, and no price
    # The number.
    metric: Text
    value: Text
    unit: Unit
    attention_flops: Literal["full", "causal"] | None = None  # of FLOPs and utilization alone
    utilization_peak_tflops: Decimal | None = None  # blank: the device's dense peak
    remark: str = ""

    @property
    def shape(self) -> ModelShape:
        """The model's sizes, without ``document``: sources count FLOPs of whole sequences."""
        return ModelShape(
            name=self.model, family=self.family, layers=self.layers, hidden=self.hidden,
            heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn, vocab=self.vocab, seq=self.seq,
            tied_embeddings=self.tied_embeddings, gated_mlp=self.gated_mlp,
            head_width=self.head_width,
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
            for is_wrong, message in check(self):
                if is_wrong:
                    raise ValueError(message)
        return self


COLUMNS = tuple(PublishedRow.model_fields)
# A table need not have these columns.
OPTIONAL = (
    "cuts", "knobs", "intra_gb_s", "products_tflops", "scaling", "document", "busbw_gb_s",
    "offload_blocks", "head_width",
)  # fmt: skip
# Pairs of whether something is wrong with a row, and the words for it.
_Checks = Iterator[tuple[object, str]]
_OF_THE_NUMBER = (
    "metric", "value", "unit", "attention_flops", "utilization_peak_tflops", "verified", "assumed",
    "remark",
)  # fmt: skip


def _metric(row: PublishedRow) -> _Checks:
    yield row.metric not in METRICS, f"metric={row.metric!r}: must be one of {', '.join(METRICS)}"
    units, kind, is_number = row.measure.units, row.measure.kind, row.unit != "yes/no"
    yield row.unit not in units, f"unit={row.unit!r}: {row.metric} must be in {' or '.join(units)}"
    yield (
        not is_number and row.value not in ("yes", "no"),
        f"value={row.value!r}: {row.metric} must be yes or no",
    )
    yield (
        is_number and not (re.fullmatch(_DECIMAL, row.value) and float(row.value) > 0),
        f"value={row.value!r}: must be a number above 0 in digits, without unit or commas",
    )
    share, counts_flops = row.measured / units[row.unit], kind in ("flops", "utilization")
    yield (
        kind == "utilization" and not 0.01 <= share <= 1,
        f"value={row.value}: {row.metric} is {share:.3%}, not 1 to 100 % (unit={row.unit!r})",
    )
    wanted = "full or causal" if row.attention_flops is None else "blank"
    yield (
        counts_flops != (row.attention_flops is not None),
        f"attention_flops={row.attention_flops or ''!r}: must be {wanted} for {row.metric}",
    )
    yield (
        kind != "utilization" and row.utilization_peak_tflops,
        f"utilization_peak_tflops={row.utilization_peak_tflops}: {row.metric} has no peak",
    )


def _shape(row: PublishedRow) -> _Checks:
    yield (
        not row.head_width and row.hidden % row.heads,
        f"heads={row.heads}: must divide hidden={row.hidden}",
    )
    yield row.heads % row.kv_heads, f"kv_heads={row.kv_heads}: must divide heads={row.heads}"
    yield (
        row.document and row.document > row.seq,
        f"document={row.document}: must be at most seq={row.seq}",
    )
    wide = row.shape.head_dim
    yield not 16 <= wide <= 1024, f"heads={row.heads}: heads of {wide} are not from 16 to 1024 wide"
    yield row.vocab < 256, f"vocab={row.vocab}: must be at least 256, the bytes of a text"
    whole = parameter_count(row.shape) / 1e9
    told = f"the shape has {whole:.4g} billion parameters"
    if row.params_b is not None:
        yield abs(row.params_b / whole - 1) > SLACK, f"params_b={row.params_b:g}: {told}"
    elif (named := _SIZE.search(row.model)) and row.measure.kind != "layer":
        size = float(named[1]) * {"B": 1.0, "M": 1e-3, "T": 1e3}[named[2].upper()]
        is_cut = f"{row.layers} layer" in row.model  # the name says how many of its layers were run
        told += f' (state params_b, or end the name with ", {row.layers} layers")'
        is_off = max(size / whole, whole / size) >= NAME_SLACK
        yield is_off and not is_cut, f"model={row.model!r}: {told}"


def _degrees(row: PublishedRow) -> _Checks:
    made = row.tp * row.pp * row.dp * row.cp
    yield (
        made != row.num_gpus,
        f"num_gpus={row.num_gpus}: tp={row.tp} x pp={row.pp} x dp={row.dp} x cp={row.cp} is {made}",
    )
    yield row.zero > 3, f"zero={row.zero}: must be 0, 1, 2 or 3"
    for name, zeros in (("zero3_group", (3,)), ("zero1_group", (1, 2))):
        group = getattr(row, name)
        yield (
            group and (row.zero not in zeros or row.dp % group),
            f"{name}={group}: needs zero={zeros[0]}, and must divide dp={row.dp}",
        )
    node = row.gpus_per_node or row.tp
    yield (
        node % row.tp and row.tp % node,
        f"gpus_per_node={node}: neither divides tp={row.tp} nor is divided by it",
    )
    yield row.sequence_parallel and row.tp == 1, "sequence_parallel=yes: needs tp above 1"
    yield (
        row.program in SHARD_ALONE and row.tp * row.pp > 1,
        f"program={row.program}: shards parameters alone, not tp={row.tp} or pp={row.pp}",
    )
    for name in ("heads", "ffn"):
        yield (
            getattr(row, name) % row.tp,
            f"tp={row.tp}: must divide {name}={getattr(row, name)}",
        )
    yield row.seq % row.cp, f"cp={row.cp}: must divide seq={row.seq}"
    yield (
        row.sequence_parallel and row.seq % row.tp,
        f"seq={row.seq}: sequence_parallel=yes needs a multiple of tp={row.tp}",
    )


def _device(row: PublishedRow) -> _Checks:
    for name, (low, high) in PLAUSIBLE.items():
        number = getattr(row, name) or low
        yield (
            not low <= number <= high,
            f"{name}={number:g}: must be from {low} to {high} in the unit that the name says",
        )
    numbers = (row.memory_gib, row.memory_bandwidth_gb_s, row.peak_bf16_tflops)
    yield (
        row.device == "stated" and None in (*numbers, row.products_tflops),
        "device=stated: needs memory_gib, memory_bandwidth_gb_s, peak_bf16_tflops, and in "
        "products_tflops what large 16-bit products were measured to reach; without a rate of "
        "its own a simulation would be within a factor of 2 at best",
    )
    yield (
        row.intra_link and row.intra_gb_s,
        f"intra_gb_s={row.intra_gb_s or 0:g}: leave intra_link={row.intra_link} or it blank",
    )


def _schedule(row: PublishedRow) -> _Checks:
    name, stages = row.schedule, row.pp * row.chunks
    yield (
        name == "none" if row.pp > 1 else name not in ("none", "zeropp"),
        f"schedule={name}: pp={row.pp} stages (none is for pp=1 and only for it)",
    )
    wanted = 2 if name in TWO_CHUNKS else 1
    yield (
        name not in CHUNKED and row.chunks != wanted,
        f"chunks={row.chunks}: schedule={name} has {wanted}",
    )
    yield (
        name.startswith("interleaved") and row.chunks == 1,
        f"chunks=1: schedule={name} has 2 or more",
    )
    yield row.knobs and name != "zeropp", f"knobs: schedule={name} has none"
    if row.cuts:  # of the embedding, the blocks and the head
        rising = all(begin < end for begin, end in pairwise(row.cuts))
        ends = (len(row.cuts) - 1, row.cuts[0], row.cuts[-1]) == (stages, 0, row.layers + 2)
        yield (
            name == "zeropp" or row.pp == 1 or not (rising and ends),
            f"cuts={' '.join(map(str, row.cuts))!r}: needs pp > 1, schedule other than "
            f"zeropp, and where pp={row.pp} x chunks={row.chunks} stages begin and end, from 0 to "
            f"layers + 2 = {row.layers + 2}",
        )
    elif name == "interleaved_1f1b":  # embedding and head may count as a block each
        told = f"chunks={row.chunks}: pp={row.pp} x chunks do not divide layers={row.layers}"
        evenly = program_named(row.program).spread in ("pieces", "blocks")
        yield evenly and row.layers % stages and (row.layers + 2) % stages, told
    yield (
        stages > row.layers + 2,
        f"chunks={row.chunks}: pp={row.pp} x chunks are more stages than layers={row.layers}",
    )


def _batch(row: PublishedRow) -> _Checks:
    yield (
        row.global_batch % (row.micro_batch * row.dp),
        f"global_batch={row.global_batch}: must be a multiple of micro_batch="
        f"{row.micro_batch} x dp={row.dp} (in sequences)",
    )
    blocks = row.recompute_blocks or 0
    yield (
        blocks and (row.recompute == "none" or blocks > row.layers),
        f"recompute_blocks={blocks}: recompute={row.recompute}, layers={row.layers}",
    )
    sent = row.offload_blocks or 0
    yield (
        sent and (row.offload != "activations" or sent > row.layers),
        f"offload_blocks={sent}: offload={row.offload}, layers={row.layers}",
    )
    for name in row.assumed.split():
        yield name not in COLUMNS, f"assumed={name!r}: must name columns"


_CHECKS = (_metric, _shape, _degrees, _device, _schedule, _batch)


PUBLISHED = CHECKOUT / "results" / "published"
# Tables that are not of training runs and have other columns.
OTHER_TABLES = (
    "claims.csv", "gemm_efficiency.csv", "hardware.csv", "megatron_sc21_table2.csv",
    "mlperf_step_times.csv", "nccl_busbw.csv", "product_times.csv",
)  # fmt: skip


def training_tables() -> list[Path]:
    """The tables of results/published that hold training runs."""
    return [path for path in sorted(PUBLISHED.glob("*.csv")) if path.name not in OTHER_TABLES]


@dataclass(frozen=True)
class Line:
    """A line of a table: its ``cells``, and either the row or the reason why it was refused."""

    place: str  # file and line
    cells: dict[str, str]
    row: PublishedRow | None
    refusal: str = ""


def read_rows(path: Path) -> list[Line]:
    """All lines of a table. Raises SpecError, in one line, if the file cannot be read or if its
    header does not have the columns of the schema."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rest = [*csv.reader(file, strict=True)] or [[]]
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    _check_header(path, header)
    return [_line(f"{path.name}:{n}", header, cells) for n, cells in enumerate(rest, 2) if cells]


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            meant = f"is {near[0]!r} meant?" if near else "docs/published_rows.md has the schema"
            raise SpecError(f"{path}: column {name!r} is not known ({meant})")
        if header.count(name) > 1:
            raise SpecError(f"{path}: column {name!r} appears twice")
    for name in COLUMNS:
        if name not in header and name not in OPTIONAL:
            raise SpecError(f"{path}: column {name!r} is missing (docs/published_rows.md)")


def _line(place: str, header: list[str], cells: list[str]) -> Line:
    named = dict(zip(header, cells, strict=False))
    if len(cells) != len(header):
        return Line(place, named, None, f"{len(cells)} cells, but {len(header)} columns")
    try:
        given = {name: cell for name, cell in named.items() if cell}
        return Line(place, named, PublishedRow.model_validate(given))
    except ValidationError as error:
        return Line(place, named, None, _one_line(error))


def _one_line(error: ValidationError) -> str:
    """The mistake in one line: all columns that are blank but must not be; otherwise the first
    column that is wrong, its value and what it must be."""
    blank = [str(e["loc"][0]) for e in error.errors() if e["type"] == "missing"]
    if blank:
        return f"blank, but must be given: {', '.join(blank)}"
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message  # a check of several columns, which names them
    if first["type"] == "literal_error":
        message = f"must be one of {first['ctx']['expected']}"
    stated = f"{first['loc'][0]}="
    return message if message.startswith(stated) else f"{stated}{first['input']!r}: {message}"
