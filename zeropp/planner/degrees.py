"""How a planner fills in degrees left ``auto``, and how many microbatches a step then has.

These are simple rules that need no prices. The tuner searches for better degrees wherever the
cluster can be priced, and then nothing is left ``auto`` when a planner is called.
"""

from __future__ import annotations

from collections.abc import Mapping

from zeropp.layout import InfeasibleError, Layout, divisors, most_microbatches
from zeropp.literals import Auto, Axis, Recompute
from zeropp.plan import Knobs, Task

_AXES: tuple[Axis, ...] = ("tp", "pp", "shard", "replicate")


def resolve_degrees(task: Task, knobs: Knobs) -> Layout:
    """A layout of degrees alone, which make up the task's ranks.

    Degrees that are given take their share of the ranks first. Then ``pp: auto`` is one stage per
    node (two on one node, if the ranks allow), ``shard: auto`` the largest group that fits what
    remains of a node, and ``replicate: auto`` the rest. Raises InfeasibleError with one line that
    names field, value and what would work.
    """
    asked = asked_degrees(knobs)
    degrees = _fill(task, asked)
    return Layout(
        pp=degrees.get("pp", 1),
        tp=degrees.get("tp", 1),
        shard=degrees.get("shard", 1),
        replicate=degrees.get("replicate", 1),
    )


def asked_degrees(knobs: Knobs) -> dict[Axis, int | Auto]:
    """The degrees of the axes that a contender has a knob for."""
    return {axis: getattr(knobs, axis) for axis in _AXES if hasattr(knobs, axis)}


def _fill(task: Task, asked: Mapping[Axis, int | Auto]) -> dict[Axis, int]:
    degrees: dict[Axis, int] = {}
    rest = task.num_gpus
    for axis, degree in asked.items():
        if degree == "auto":
            continue
        if rest % degree:
            raise InfeasibleError(
                f"contender.{axis}={degree}: the degrees {_product(asked)} must multiply to "
                f"num_gpus={task.num_gpus} (try contender.{axis} in {divisors(rest)})",
                "degrees do not multiply to the GPUs",
            )
        degrees[axis], rest = degree, rest // degree
    for axis, limit in _limits(task, degrees).items():
        if asked.get(axis) == "auto":
            degrees[axis] = max(d for d in divisors(rest) if d <= limit)
            rest //= degrees[axis]
    if rest != 1:
        given = {axis: degrees[axis] for axis in asked}
        raise InfeasibleError(
            f"num_gpus={task.num_gpus}: the degrees {_product(given)} multiply to "
            f"{task.num_gpus // rest} (set one of them to auto)",
            "degrees do not multiply to the GPUs",
        )
    return degrees


def _limits(task: Task, degrees: Mapping[Axis, int]) -> dict[Axis, int]:
    """The largest degree that the rules above give each axis, in the order of filling."""
    node = task.cluster.gpus_per_node
    return {
        "pp": max(2, task.num_gpus // node),
        "shard": max(1, node // degrees.get("tp", 1)),
        "replicate": task.num_gpus,
    }


def microbatches_per_step(task: Task, layout: Layout, microbatch_size: int) -> int:
    """Microbatches per step and pipeline; raises InfeasibleError where the batch does not divide
    by the data-parallel ranks, or where there are more microbatches than can be planned."""
    slots = layout.dp * microbatch_size
    if task.global_batch % slots:
        below = task.global_batch // slots * slots
        nearest = f"{below} or {below + slots}" if below else f"{slots}"
        raise InfeasibleError(
            f"global_batch={task.global_batch}: must be a multiple of microbatch_size="
            f"{microbatch_size} x {layout.dp} data-parallel ranks (try {nearest})",
            "global batch does not divide",
        )
    count = task.global_batch // slots
    stages = layout.pp * layout.chunks
    if count > most_microbatches(stages):
        raise InfeasibleError(
            f"global_batch={task.global_batch}: {count} microbatches per step and pipeline x "
            f"{stages} stages are more than can be planned (at most {most_microbatches(stages)} "
            "microbatches; try a larger microbatch_size)",
            "more microbatches than can be planned",
        )
    return count


def check_stages(task: Task, layout: Layout, *, split_blocks: bool = False) -> None:
    """Refuse more stages than the model has blocks, or halves of blocks where these can be stages;
    raises InfeasibleError."""
    stages, layers = layout.pp * layout.chunks, task.shape.layers
    most = 2 * layers if split_blocks else layers
    if stages <= most:
        return
    halves = f" (halves of blocks: {most})" if split_blocks else ""
    if layout.pp <= most:
        message = (
            f"contender.pp={layout.pp}: {layout.pp} x chunks={layout.chunks} = {stages} stages, "
            f"but {task.shape.name} has model.layers={layers}{halves} "
            f"(try contender.chunks <= {most // layout.pp})"
        )
    else:
        message = (
            f"contender.pp={layout.pp}: more stages than model.layers={layers} of "
            f"{task.shape.name}{halves} (try contender.pp <= {most})"
        )
    raise InfeasibleError(message, "more stages than layers")


def check_split_blocks(task: Task, split_blocks: bool | Auto, recompute: Recompute) -> None:
    """Refuse cuts inside blocks where whole blocks are needed; raises InfeasibleError."""
    if split_blocks is not True:
        return
    if recompute != "none":
        raise InfeasibleError(
            f"contender.split_blocks=true: contender.recompute={recompute} recomputes whole blocks "
            "(use false, or recompute=none)"
        )
    if task.shape.dropout > 0:
        raise InfeasibleError(
            f"contender.split_blocks=true: model.dropout={task.shape.dropout} draws its numbers "
            "block by block (use false, or model.dropout=0)"
        )


def default_chunks(task: Task, layout: Layout) -> int:
    """Chunks per rank where nobody has said or searched: two, if the model has the blocks."""
    return 2 if layout.pp > 1 and 2 * layout.pp <= task.shape.layers else 1


def _product(degrees: Mapping[Axis, object]) -> str:
    return " x ".join(f"{name}={value}" for name, value in degrees.items())


def recomputed_blocks(asked: int | Auto, num_stages: int) -> tuple[int, ...]:
    """``Plan.recomputed`` for the same number of blocks on every stage; ``auto`` is all blocks."""
    return () if asked == "auto" else (asked,) * num_stages
