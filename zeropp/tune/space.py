"""Every configuration of a contender that could run on so many GPUs at a global batch.

The same generator for all contenders: what differs is one ``Space`` a contender, the choices
that its software has. Configurations whose sizes do not divide are counted, not listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from zeropp.cluster import Cluster
from zeropp.layout import Layout, divisors, most_microbatches
from zeropp.literals import Placement, Precision, Recompute, ReduceEvery, StageStyle
from zeropp.shape import ModelShape

_MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Task:
    """What is tuned: the same for every contender of a comparison."""

    shape: ModelShape
    cluster: Cluster
    num_gpus: int
    global_batch: int  # sequences
    precision: Precision = "bf16"


@dataclass(frozen=True)
class Space:
    """What a contender can choose from. ``schedules``: generator -> numbers of chunks a rank."""

    name: str
    label: str
    program: str  # name in the registry of programs
    schedules: dict[str, tuple[int, ...]]
    tensor: bool = False  # has tensor parallelism
    sequence_parallel: bool = False
    shards: bool = False  # has ZeRO-3 groups
    pipelines: tuple[int, int] = (1, 0)  # fewest and most pipeline ranks; 0: as many as fit
    replicate_zero: tuple[int, ...] = (0,)
    # Megatron's selective recomputation drops attention scores, which fused attention never keeps;
    # ZeroPP's was tried in all cells of the verdict, and no best plan had it: smaller units did.
    recompute: tuple[Recompute, ...] = ("none", "full")
    placements: tuple[Placement, ...] = ("dp_inner",)
    unit_factors: tuple[float, ...] = ()  # U as multiples of P, beside m; none: no units
    cap_factors: tuple[float, ...] = ()  # activation cap as multiples of U*V, between its bounds
    v_chunks: tuple[int, ...] = ()  # chunks per rank with which stages may stand on a V, too
    v_cap_factors: tuple[float, ...] = ()  # activation cap as multiples of P*V, on a V
    reduce_every: tuple[ReduceEvery, ...] = ("step",)


SPACES: dict[str, Space] = {
    space.name: space
    for space in (
        Space(
            "deepspeed_3d",
            "3D, DeepSpeed",
            "deepspeed_3d",
            {"1f1b": (1,)},
            tensor=True,
            replicate_zero=(0, 1),
        ),
        Space(
            "best_3d",
            "3D, best known",
            "best_public_3d",
            {
                "1f1b": (1,),
                "interleaved_1f1b": (2, 3, 4, 6, 8, 12),
                "zb_h1": (1,),
                "interleaved_zb": (2, 3, 4, 6, 8, 12),
                "zbv": (2,),
            },
            tensor=True,
            sequence_parallel=True,
            replicate_zero=(0, 1),
            placements=("dp_inner", "pp_inner"),
        ),
        Space(
            "zeropp",
            "ZeroPP",
            "zeropp",
            {"zeropp": (1, 2, 3, 4, 6, 8, 12)},
            shards=True,
            pipelines=(2, 0),  # with one pipeline rank it is FSDP
            replicate_zero=(0, 1),
            placements=("dp_inner", "pp_inner"),
            unit_factors=(0.5, 1, 2, 4),
            cap_factors=(0.0, 1.0, 1.5),
            v_chunks=(2, 4),  # more of them gain little; with one a V is a loop
            v_cap_factors=(0.375, 0.5),
            reduce_every=("unit", "step"),
        ),
        Space(
            "fsdp",
            "FSDP",
            "fsdp",
            {"fsdp": (1,)},
            shards=True,
            pipelines=(1, 1),
            recompute=("none", "selective", "full"),
            reduce_every=("unit", "step"),
        ),
    )
}


@dataclass(frozen=True)
class Candidate:
    """One configuration; ``unit`` and ``cap`` are 0 where the schedule knows none."""

    contender: str
    layout: Layout
    microbatch_size: int
    num_microbatches: int
    schedule: str
    recompute: Recompute
    unit: int = 0
    cap: int = 0
    reduce_every: ReduceEvery = "step"
    stage_style: StageStyle = "loop"

    def describe(self) -> str:
        """Degrees and knobs in one line, as a person would set them."""
        layout = self.layout
        words = [f"pp={layout.pp}"]
        words += [f"{k}={getattr(layout, k)}" for k in ("tp", "shard", "replicate")]
        words = [w for w in words if not w.endswith("=1")] or ["one GPU"]
        words += [f"b={self.microbatch_size}", f"m={self.num_microbatches}", self.schedule]
        if layout.chunks > 1:
            words.append(f"V={layout.chunks}")
        if self.unit:
            words.append(f"U={self.unit} cap={self.cap} reduce={self.reduce_every}")
        words += ["stages on a V"] * (self.stage_style == "v")
        words += ["zero1"] * layout.replicate_zero + ["sp"] * layout.sequence_parallel
        if layout.placement == "pp_inner":
            words.append("pp inside the node")
        if self.recompute != "none":
            words.append(f"{self.recompute} recompute")
        return " ".join(words)


def families(task: Task, space: Space, fallen: Counter[str]) -> Iterator[Candidate]:
    """All configurations whose sizes divide, but for the choice of unit, cap and reduction;
    the others are counted in ``fallen`` by reason."""
    for layout in _layouts(task, space, fallen):
        for b in _MICROBATCHES:
            slots = layout.dp * b
            if task.global_batch % slots:
                fallen["global batch does not divide"] += 1
                continue
            m = task.global_batch // slots
            for schedule, chunk_choices in space.schedules.items():
                for chunks in chunk_choices:
                    if reason := _refuse(task, layout, schedule, chunks, m):
                        fallen[reason] += 1
                        continue
                    chunked = replace(layout, chunks=chunks)
                    styles: list[StageStyle] = ["loop", "v"]
                    styles = styles if chunks in space.v_chunks else styles[:1]
                    unit = m if space.unit_factors else 0
                    for recompute, style in product(space.recompute, styles):
                        family = Candidate(space.name, chunked, b, m, schedule, recompute, unit)
                        yield replace(family, stage_style=style)


def _layouts(task: Task, space: Space, fallen: Counter[str]) -> Iterator[Layout]:
    shape, node = task.shape, task.cluster.gpus_per_node
    for tp in divisors(task.num_gpus) if space.tensor else [1]:
        if any(size % tp for size in (shape.heads, shape.kv_heads, shape.ffn, shape.vocab)):
            fallen["tp does not divide the model"] += 1
            continue
        if tp > node:
            fallen["tp larger than a node"] += 1
            continue
        for pp in _pipeline_degrees(space, task.num_gpus // tp):
            if pp > shape.layers:
                fallen["more stages than layers"] += 1
                continue
            rest = task.num_gpus // tp // pp
            # One shard is no ZeRO-3: that is a zero-bubble pipeline beside plain data parallelism.
            for shard in divisors(rest)[1:] if space.shards else [1]:
                yield from _variants(space, Layout(pp, tp, shard, rest // shard), node)


def _pipeline_degrees(space: Space, ranks: int) -> list[int]:
    fewest, most = space.pipelines
    return [pp for pp in divisors(ranks) if fewest <= pp <= (most or ranks)]


def _variants(space: Space, layout: Layout, node: int) -> Iterator[Layout]:
    """ZeRO-1, sequence parallelism and placement, where they make a difference."""
    zeros = [z for z in space.replicate_zero if z == 0 or layout.replicate > 1]
    sequence = [False, True] if space.sequence_parallel and layout.tp > 1 else [False]
    moves = layout.pp > 1 and layout.dp > 1 and layout.world > node
    for zero in zeros:
        for sp in sequence:
            for placement in space.placements if moves else space.placements[:1]:
                yield replace(
                    layout,
                    replicate_zero=zero,  # type: ignore[arg-type]
                    sequence_parallel=sp,
                    placement=placement,
                )


def _refuse(task: Task, layout: Layout, schedule: str, chunks: int, m: int) -> str:
    if layout.pp == 1 and schedule not in ("1f1b", "zeropp", "fsdp"):
        return "no pipeline to schedule"
    if layout.pp * chunks > task.shape.layers:
        return "more stages than layers"
    stages = task.shape.num_pieces if schedule == "fsdp" else layout.pp * chunks
    if m > most_microbatches(stages):
        return "more microbatches than can be planned"
    if schedule in ("interleaved_1f1b", "interleaved_zb") and m % layout.pp:
        return "microbatches do not divide into groups of pp"
    return ""


def units_of(space: Space, pp: int, num_microbatches: int) -> list[int]:
    """Units to choose from, ascending: parts and multiples of P, and all microbatches."""
    parts = {max(1, int(pp * factor)) for factor in space.unit_factors}
    return sorted({min(num_microbatches, part) for part in parts} | {num_microbatches})


def members(space: Space, family: Candidate) -> Iterator[Candidate]:
    """A family's configurations: every unit, activation cap and point of reduction."""
    if not space.unit_factors:
        for reduce_every in space.reduce_every:
            yield replace(family, reduce_every=reduce_every)
        return
    m, pp, chunks = family.num_microbatches, family.layout.pp, family.layout.chunks
    if family.stage_style == "v":  # all chunks stay gathered through the step: units save nothing
        wanted = {max(chunks, int(pp * chunks * factor)) for factor in space.v_cap_factors}
        for cap in sorted({min(cap, m * chunks) for cap in wanted}):
            yield replace(family, cap=cap)
        return
    for unit in units_of(space, pp, m):
        smallest = (chunks - 1) * unit + 1
        wanted = {round(unit * chunks * factor) for factor in space.cap_factors}
        for cap in sorted({min(max(w, smallest), m * chunks) for w in wanted}):
            for reduce_every in space.reduce_every if unit < m else ("step",):
                yield replace(family, unit=unit, cap=cap, reduce_every=reduce_every)
