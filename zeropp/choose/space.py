"""Search spaces: the settings of a contender that are possible for a task.

A contender's ``Space`` says which degrees it may have and yields its knobs; the search is the same
for every contender. What a user has fixed is not searched: a space gets the knobs that were asked
for, in which ``auto`` means that the search may choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import permutations, product
from math import prod
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from zeropp.choose.planner import asked_degrees, most_slices
from zeropp.choose.task import Candidate, K, Task
from zeropp.price.cluster import Cluster
from zeropp.schedule.plan import SizedPlan
from zeropp.types.frozen import replace
from zeropp.types.layout import Layout, divisors
from zeropp.types.literals import (
    Auto,
    Axis,
    Placement,
    Precision,
    Recompute,
    ReplicateZero,
    WireType,
)

T = TypeVar("T")

MICROBATCH_SIZES = (1, 2, 4, 8, 16)
DIVIDES_NOT = "global batch does not divide"


@dataclass(frozen=True)
class SearchPoint(Generic[K]):
    """One combination of degrees and microbatch size, for which a contender yields its knobs.

    ``asked`` are the knobs as the user gave them, ``degrees`` is a layout with degrees only, and
    ``num_microbatches`` is the number per step and pipeline.
    """

    task: Task
    asked: K
    degrees: Layout
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Space(Generic[K]):
    """The settings that are tried for a contender.

    ``families`` yields knobs in which everything is set on which the price depends. ``members``
    yields, for one family and its plan, all other settings (units, activation caps, when gradients
    are reduced) in ascending order of the memory that they need. The price of a member differs from
    that of its family only if reduced gradients are added to those of earlier units.
    """

    families: Callable[[SearchPoint[K]], Iterable[K]]
    members: Callable[[K, K, SizedPlan], Iterable[K]]  # asked, family, the family's plan
    tensor: bool = False  # tensor parallelism may be searched
    pipelines: tuple[int, int] = (1, 0)  # fewest and most pipeline ranks; 0: as many as fit
    shards: tuple[int, int] = (1, 1)  # fewest and most ranks of a ZeRO-3 group; 0: all that remain
    contexts: bool = False  # ranks may divide sequences
    # What is beside the winner is tried, and activation caps are as large as memory holds.
    climbs: bool = True


def one_member(asked: K, family: K, plan: SizedPlan) -> tuple[K]:
    """The members of a family in which everything is set: the family itself."""
    return (family,)


def at_degrees(asked: K, degrees: Layout, **chosen: object) -> K:
    """The knobs that were asked for, with the degrees of a point and what was ``chosen``."""
    sizes = {name: getattr(degrees, name) for name in asked_degrees(asked)}
    return replace(cast("Any", asked), **sizes, **chosen)  # type: ignore[no-any-return]


def choices(value: T | Auto, known: Iterable[T]) -> tuple[T, ...]:
    """The values that a search tries for one knob: the one that was asked for, or all that are
    known if it is ``auto``."""
    return tuple(known) if value == "auto" else (value,)


def zero_choices(zero: ReplicateZero | Auto, degrees: Layout) -> tuple[ReplicateZero, ...]:
    """The ZeRO stages to try: 0 and, if there are replicas over which to shard, 1."""
    return choices(zero, (0, 1) if degrees.replicas > 1 else (0,))


def sequence_choices(sequence_parallel: bool | Auto, degrees: Layout) -> tuple[bool, ...]:
    """Whether to try sequence parallelism: both with tensor parallelism, otherwise only without."""
    return choices(sequence_parallel, (False, True) if degrees.tp > 1 else (False,))


def wire_choices(asked: WireType | Auto, precision: Precision) -> tuple[WireType, ...]:
    """The types to try in which gradients are added or sent: that of compute, too, if it is less
    than fp32."""
    return choices(asked, ("fp32", "bf16") if precision != "fp32" else ("fp32",))


def recompute_choices(
    recompute: Recompute | Auto, blocks: int | Auto, kinds: Iterable[Recompute], per_stage: int
) -> Iterator[tuple[Recompute, int | Auto]]:
    """(kind of recomputation, number of blocks per stage) to try: all, or half of the ``per_stage``
    blocks of the largest stage (or rank, where a contender counts so). For its winner, the search
    then tries all numbers."""
    halves = sorted({-(-per_stage // 2), per_stage})
    for kind in choices(recompute, kinds):
        if kind == "none":
            yield kind, "auto"
            continue
        for count in choices(blocks, halves):
            yield kind, count


def has_host(cluster: Cluster) -> bool:
    """Whether offload has a price: a GPU's link to its host, and the host's memory, are known."""
    return cluster.host is not None and not cluster.device.is_cpu


def offload_choices(
    blocks: int | Auto, numbers: Iterable[int], cluster: Cluster
) -> tuple[int, ...]:
    """The numbers of offloaded blocks per rank to try: none and, where the memory of hosts is
    known, these ``numbers``. For its winner, the search then tries others."""
    known = {0, *numbers} if has_host(cluster) else {0}
    return choices(blocks, sorted(known))


def chunk_choices(
    point: SearchPoint[Any], known: Iterable[int], kinds: Iterable[Recompute]
) -> Iterator[tuple[int, Recompute, int | Auto]]:
    """(chunks per rank, kind of recomputation, number of blocks per stage) to try, where ``known``
    are the numbers of chunks and ``kinds`` the recomputation that the contender may have. Where
    more than one number is known, those that leave one block per chunk are tried, too, with
    embedding and head as chunks of their own (which some planners refuse) or not."""
    asked, layers, pp = point.asked, point.task.shape.layers, point.degrees.pp
    numbers = set(known)
    if len(numbers) > 1:
        numbers |= {max(min(numbers), most // pp) for most in (layers, layers + 2)}
        numbers = {number for number in numbers if number * pp <= layers + 2}
    for chunks in choices(asked.chunks, sorted(numbers)):
        largest = -(-layers // (pp * chunks))
        for kind, blocks in recompute_choices(
            asked.recompute, asked.recompute_blocks, kinds, largest
        ):
            yield chunks, kind, blocks


def placement_choices(placement: Placement | Auto, point: SearchPoint[K]) -> tuple[Placement, ...]:
    """The numberings of ranks to try: both, if they put different ranks into a node."""
    degrees, node = point.degrees, point.task.cluster.gpus_per_node
    moves = degrees.pp > 1 and degrees.dp * degrees.context > 1 and degrees.world > node
    return choices(placement, ("dp_inner", "pp_inner") if moves else ("dp_inner",))


def points(
    task: Task, space: Space[K], asked: K, microbatch_size: int | Auto, *, rejected: Counter[str]
) -> Iterator[tuple[SearchPoint[K], int]]:
    """(point, microbatch size) of all points of a space; those that do not divide are counted in
    ``rejected`` by their cause."""
    for degrees in _degrees(task, space, asked, rejected):
        for size in choices(microbatch_size, MICROBATCH_SIZES):
            slots = degrees.dp * size
            if task.global_batch % slots:
                rejected[DIVIDES_NOT] += 1
                continue
            yield SearchPoint(task, asked, degrees, task.global_batch // slots), size


def contexts(task: Task, degree: int | Auto, ranks: int) -> list[int]:
    """The degrees of context parallelism to try: that which was asked for, or those of ``ranks``
    that leave slices long enough for matrix products."""
    return _open(degree, [d for d in divisors(most_slices(task.shape)) if ranks % d == 0])


def _degrees(task: Task, space: Space[K], asked: K, rejected: Counter[str]) -> Iterator[Layout]:
    """All layouts whose degrees multiply to the ranks and agree with those that were asked for."""
    shape, requests = task.shape, asked_degrees(asked)
    for tp in _open(requests.get("tp", 1), divisors(task.num_gpus) if space.tensor else [1]):
        if any(size % tp for size in (shape.heads, shape.kv_heads, shape.ffn, shape.vocab)):
            rejected["tp does not divide the model"] += 1
            continue
        if tp > task.cluster.gpus_per_node:
            rejected["tp larger than a node"] += 1
            continue
        ranks = task.num_gpus // tp
        for pp in _open(requests.get("pp", 1), _within(space.pipelines, ranks)):
            if pp > shape.layers:
                rejected["more stages than layers"] += 1
                continue
            asked_context = requests.get("context", 1) if space.contexts else 1
            for context in contexts(task, asked_context, ranks // pp):
                for shard in _shards(space, requests, ranks // pp // context, context):
                    replicate = ranks // pp // context // shard
                    if tp * pp * context * shard * replicate != task.num_gpus:
                        continue  # a degree that was asked for does not divide
                    if requests.get("replicate", 1) in ("auto", replicate):
                        yield Layout(
                            pp=pp, tp=tp, context=context, shard=shard, replicate=replicate
                        )


def _shards(
    space: Space[K], requests: Mapping[Axis, int | Auto], ranks: int, context: int
) -> list[int]:
    """The sizes of a ZeRO-3 group to try, which has ``context`` times as many ranks."""
    fewest, most = space.shards
    known = _within((-(-fewest // context), most), ranks)
    replicas = requests.get("replicate", 1)
    if replicas != "auto":  # they leave one size, whatever the space has
        known = [max(1, ranks // replicas)]
    return _open(requests.get("shard", 1), known)


def _open(degree: int | Auto, known: list[int]) -> list[int]:
    return known if degree == "auto" else [degree]


def _within(limits: tuple[int, int], ranks: int) -> list[int]:
    """The divisors of ``ranks`` within the limits; 1 if there are fewer ranks than the least."""
    fewest, most = limits
    return [d for d in divisors(ranks) if fewest <= d <= (most or ranks)] or [1]


# Knobs whose values that are worth a try are all in the families.
_IN_FAMILIES = {"gradient_parts", "prefetch"}


_LARGE = 4096  # a number beside which others by a few make no difference


def neighbours(asked: K, best: Candidate[K]) -> Iterator[tuple[K, int]]:
    """(knobs, microbatch size) beside the best candidate that was found, with one setting changed
    that ``asked`` leaves open, two degrees, or the size with what is recomputed; what fits only the
    old one is ``auto`` again."""
    knobs, size = best.knobs, best.microbatch_size
    values = vars(knobs)
    names = [n for n, value in vars(asked).items() if value == "auto" and n not in _IN_FAMILIES]
    small = ("unit", "activation_cap", "reduce_every", "offload_blocks", "prefetch_bucket_size")
    freed: dict[str, Any] = dict.fromkeys(small, "auto")
    freed = {n: value for n, value in freed.items() if n in names}
    cap = {n: value for n, value in freed.items() if n == "activation_cap"}

    def changed(**new: object) -> K:
        return replace(cast("Any", knobs), **new)  # type: ignore[no-any-return]

    degrees = [name for name in asked_degrees(knobs) if name in names]
    ranks = {n: "auto" for n in ("replicate_zero", "placement", "bucket_size") if n in names}
    for less, more in permutations(degrees, 2):
        for factor in (2, 3):
            if values[less] % factor == 0:
                new = {less: values[less] // factor, more: values[more] * factor}
                yield changed(**freed | ranks | new), size
    known = get_type_hints(type(knobs))
    # Other sizes of microbatches leave room for other numbers of recomputed blocks.
    kinds, numbers = {values.get("recompute")}, list[int]()
    if "recompute" in names and kinds == {"none"}:
        kinds = literals(known["recompute"])
    if "recompute_blocks" in names and int in get_args(known["recompute_blocks"]):
        numbers = [2**power for power in range(7)]
    for other in {size * 2, max(1, size // 2), 1} - {size}:
        yield changed(**freed), other
        for kind, number in product(sorted(map(str, kinds - {"auto", "none"})), numbers):
            yield changed(**freed, recompute=kind, recompute_blocks=number), other
    for name in [name for name in names if name not in degrees]:
        value, named = values[name], literals(known[name]) - {"auto"}
        if not named and isinstance(value, int):
            steps = {value * 2, value // 2, value * 5 // 4, value * 4 // 5}
            if value < _LARGE and name != "bucket_size":
                steps |= {value + sign * 2**power for sign in (-1, 1) for power in range(6)}
            for number in sorted(n for n in steps - {value} if n > 0):
                yield changed(**cap | {name: number}), size
        else:
            blocks = dict.fromkeys(("recompute_blocks", "offload_blocks"), "auto")
            blocks = {n: v for n, v in blocks.items() if n in names and name == "recompute"}
            for choice in named - {value}:
                yield changed(**cap | blocks | {name: choice}), size


def resized(candidate: Candidate[K], num_gpus: int) -> Iterator[Candidate[K]]:
    """The candidate, or where it is of another number of GPUs, it with more or fewer data-parallel
    ranks."""
    knobs = cast("Any", candidate.knobs)
    degrees = {name: getattr(knobs, name) for name in asked_degrees(knobs)}
    ranks = prod(degrees.values())
    if ranks == num_gpus:
        yield candidate
        return
    for name in ("replicate", "shard"):
        if (size := getattr(knobs, name, 0)) and size * num_gpus % ranks == 0:
            more = {name: size * num_gpus // ranks}
            yield replace(candidate, knobs=replace(knobs, **more))


def literals(hint: object) -> set[object]:
    """The values that a type of booleans and literals has."""
    if hint is bool:
        return {False, True}
    values = get_args(hint)
    return (
        set(values) if get_origin(hint) is Literal else {v for of in values for v in literals(of)}
    )


# Knobs that say how data-parallel ranks are used and what they send; the compute of a pipeline rank
# does not depend on them, nor do the cuts.
_OF_DATA_PARALLELISM = {
    *("shard", "replicate", "replicate_zero", "placement"),
    *("reduce_dtype", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "bucket_size"),
    *("reshard_after_forward", "reshard_after_backward", "fsdp_reshard_after_forward"),
    "zero_hpz_partition_size",
}


# Knobs that save memory, for which a pass takes longer, or compute waits, with the value that saves
# none; where that is "auto", the contender says what goes with the others.
_SAVERS = {
    "recompute": "none",
    "recompute_blocks": "auto",
    "split_backward": "auto",
    "gradient_parts": 1,
    "prefetch": 1,
    "offload_blocks": 0,
    "offload_modules": "none",
    "cpu_checkpointing": False,
}


# Knobs that move bytes beside a pass, which has the same kernels.
_BESIDE_PASSES = {
    *("prefetch", "offload_blocks", "offload_modules", "cpu_checkpointing"),
    *("allgather_sequential", "prefetch_bucket_size", "live_parameters"),
    "param_persistence_threshold",
}


def compute_knobs(
    knobs: type[K], *, saving: bool = True, beside: bool = True
) -> Callable[[K], object]:
    """A function that gives the values of all other knobs, and whether gradients are reduced for
    every microbatch (ZeRO-2), which compute does depend on; without those that save memory if
    ``saving`` is false, and without those on which no kernel depends if ``beside`` is."""
    left_out = _OF_DATA_PARALLELISM | (set() if saving else {*_SAVERS})
    left_out |= set() if beside else _BESIDE_PASSES
    names = (field.name for field in fields(cast("Any", knobs)))
    others = attrgetter(*(name for name in names if name not in left_out))
    return lambda of: (others(of), getattr(of, "replicate_zero", 0) == 2)


def saving_none(point: SearchPoint[K]) -> SearchPoint[K]:
    """The point, where nothing is asked for that saves memory."""
    asked = vars(point.asked)
    none = {name: value for name, value in _SAVERS.items() if asked.get(name) == "auto"}
    return replace(point, asked=replace(cast("Any", point.asked), **none))


def with_compute_of(point: SearchPoint[K], knobs: K, *, saving: bool) -> SearchPoint[K]:
    """The point, where these ``knobs`` are asked for, except how data-parallel ranks are used and,
    unless ``saving``, what saves memory."""
    asked = vars(point.asked)
    names = _OF_DATA_PARALLELISM | (set() if saving else {*_SAVERS})
    again = {name: asked[name] for name in names if name in asked}
    return replace(point, asked=replace(cast("Any", knobs), **again))
