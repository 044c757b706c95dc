"""Search spaces: the settings of a contender that could run on so many GPUs at a global batch.

A contender's ``Space`` says which degrees its program has and yields its own knobs; what is done
with them is the same for every contender. Whatever a user has fixed is not searched: a space takes
the knobs that were asked for, in which ``auto`` means that the search may choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from zeropp.layout import Layout, divisors
from zeropp.literals import Auto, Placement, Recompute, ReplicateZero
from zeropp.plan import K, Plan, Task
from zeropp.planner.degrees import asked_degrees

T = TypeVar("T")

MICROBATCH_SIZES = (1, 2, 4, 8, 16)
DIVIDES_NOT = "global batch does not divide"


@dataclass(frozen=True)
class Point(Generic[K]):
    """One place in a space from which a contender yields its knobs: degrees and microbatches.

    ``asked`` are the knobs as the user left them, ``degrees`` a layout of degrees alone, and
    ``num_microbatches`` those of one step and pipeline.
    """

    task: Task
    asked: K
    degrees: Layout
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Space(Generic[K]):
    """What a contender can choose from.

    ``families`` yields knobs with everything set that a price depends on. ``members`` opens one
    family, whose plan it is given, into all settings of what no price depends on, such as units
    and activation caps; they come in ascending order of the memory that they take.
    """

    families: Callable[[Point[K]], Iterable[K]]
    members: Callable[[K, K, Plan], Iterable[K]]  # asked, family, the family's plan
    tensor: bool = False  # tensor parallelism may be searched
    pipelines: tuple[int, int] = (1, 0)  # fewest and most pipeline ranks; 0: as many as fit
    shards: tuple[int, int] = (1, 1)  # fewest and most ranks of a ZeRO-3 group; 0: all that remain


def one_member(asked: K, family: K, plan: Plan) -> tuple[K]:
    """The members of a family in which nothing is left open."""
    return (family,)


def choices(asked: T | Auto, known: Iterable[T]) -> tuple[T, ...]:
    """What a search tries for one knob: what was asked for, or all that is known."""
    return tuple(known) if asked == "auto" else (asked,)


def zero_choices(asked: ReplicateZero | Auto, degrees: Layout) -> tuple[ReplicateZero, ...]:
    """ZeRO-0 and ZeRO-1, where there are replicas to shard the optimizer over."""
    return choices(asked, (0, 1) if degrees.replicate > 1 else (0,))


def sequence_choices(asked: bool | Auto, degrees: Layout) -> tuple[bool, ...]:
    """Without and with sequence parallelism, where there is tensor parallelism."""
    return choices(asked, (False, True) if degrees.tp > 1 else (False,))


def recompute_choices(
    asked: Recompute | Auto, blocks: int | Auto, kinds: Iterable[Recompute], per_stage: int
) -> Iterator[tuple[Recompute, int | Auto]]:
    """Kinds of recomputation, and of how many blocks per stage, of which the largest has
    ``per_stage``: half of them, or all. The search takes its winner further, block by block."""
    halves = sorted({-(-per_stage // 2), per_stage})
    for kind in choices(asked, kinds):
        if kind == "none":
            yield kind, "auto"
            continue
        for count in choices(blocks, halves):
            yield kind, count


def placement_choices(asked: Placement | Auto, point: Point[K]) -> tuple[Placement, ...]:
    """Both numberings of ranks, where they put other ranks into a node."""
    degrees, node = point.degrees, point.task.cluster.gpus_per_node
    moves = degrees.pp > 1 and degrees.dp > 1 and degrees.world > node
    return choices(asked, ("dp_inner", "pp_inner") if moves else ("dp_inner",))


def points(
    task: Task, space: Space[K], asked: K, microbatch_size: int | Auto, fallen: Counter[str]
) -> Iterator[tuple[Point[K], int]]:
    """All points of a space with their microbatch sizes; what does not divide is counted in
    ``fallen`` by its cause."""
    for degrees in _degrees(task, space, asked, fallen):
        for size in choices(microbatch_size, MICROBATCH_SIZES):
            slots = degrees.dp * size
            if task.global_batch % slots:
                fallen[DIVIDES_NOT] += 1
                continue
            yield Point(task, asked, degrees, task.global_batch // slots), size


def _degrees(task: Task, space: Space[K], asked: K, fallen: Counter[str]) -> Iterator[Layout]:
    """All degrees that make up the ranks and agree with those that were asked for."""
    shape, given = task.shape, asked_degrees(asked)
    for tp in _open(given.get("tp", 1), divisors(task.num_gpus) if space.tensor else [1]):
        if any(size % tp for size in (shape.heads, shape.kv_heads, shape.ffn, shape.vocab)):
            fallen["tp does not divide the model"] += 1
            continue
        if tp > task.cluster.gpus_per_node:
            fallen["tp larger than a node"] += 1
            continue
        ranks = task.num_gpus // tp
        for pp in _open(given.get("pp", 1), _within(space.pipelines, ranks)):
            if pp > shape.layers:
                fallen["more stages than layers"] += 1
                continue
            for shard in _open(given.get("shard", 1), _within(space.shards, ranks // pp)):
                replicate = ranks // pp // shard
                if tp * pp * shard * replicate != task.num_gpus:
                    continue  # a degree that was asked for does not divide
                if given.get("replicate", "auto") in ("auto", replicate):
                    yield Layout(pp, tp, shard, replicate)


def _open(asked: int | Auto, known: list[int]) -> list[int]:
    return known if asked == "auto" else [asked]


def _within(limits: tuple[int, int], ranks: int) -> list[int]:
    """Divisors between the limits; one rank where there are fewer ranks than the fewest."""
    fewest, most = limits
    return [d for d in divisors(ranks) if fewest <= d <= (most or ranks)] or [1]
