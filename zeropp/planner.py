"""What the planners of all contenders share. Imports no torch.

In: a Task and a contender's knobs. Out: degrees, the number of microbatches, ZeroPP's orders.
Read ``degrees``, which fills in degrees that are ``auto`` and refuses what no contender could run,
then ``orders``, which makes the orders of a ZeroPP step from which the simulator chooses. The
planners themselves are the ``plan.py`` of every contender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import attrgetter

from zeropp.cluster import Cluster
from zeropp.cost import PlanPrice
from zeropp.layout import InfeasibleError, Layout, divisors, most_microbatches
from zeropp.literals import Auto, Axis, if_auto
from zeropp.plan import Knobs, Plan, SizedPlan, Task
from zeropp.schedule.build import StepSizes, step_drafts
from zeropp.schedule.program import Schedule
from zeropp.sim.simulator import SimResult, simulate

# Simple rules for degrees that are ``auto``, and the number of microbatches of a step.
#
# The rules need no prices. If the cluster can be priced, the tuner searches for better degrees, and
# then nothing is ``auto`` when a planner is called.


_AXES: tuple[Axis, ...] = ("tp", "pp", "shard", "replicate")


def resolve_degrees(task: Task, knobs: Knobs) -> Layout:
    """A layout whose degrees multiply to the task's ranks; its other fields have their defaults.

    Degrees that are given are taken first. Then ``pp: auto`` is one pipeline rank per node (two on
    a single node, if the ranks allow it), ``shard: auto`` is the largest group that fits into what
    is left of a node, and ``replicate: auto`` is what is left of the ranks. Raises InfeasibleError
    with one line that names the field, its value and what would work.
    """
    asked = asked_degrees(knobs)
    _check_ranks(task, asked)
    degrees = _fill(task, asked)
    return Layout(
        pp=degrees.get("pp", 1),
        tp=degrees.get("tp", 1),
        shard=degrees.get("shard", 1),
        replicate=degrees.get("replicate", 1),
    )


def asked_degrees(knobs: Knobs) -> dict[Axis, int | Auto]:
    """The degrees that were asked for, of the axes for which a contender has a knob."""
    return {axis: getattr(knobs, axis) for axis in _AXES if hasattr(knobs, axis)}


def _check_ranks(task: Task, asked: Mapping[Axis, int | Auto]) -> None:
    """Raise InfeasibleError if no choice of the degrees that are ``auto`` can use all GPUs."""
    if "auto" not in asked.values():
        return
    limits: dict[Axis, int] = {"tp": task.cluster.gpus_per_node, "pp": task.shape.layers}
    degrees = {a: if_auto(asked[a], limits[a]) for a in limits if a in asked}
    most = prod([task.global_batch, *degrees.values()])
    if task.num_gpus > most:
        factors = [f" x {axis}={degree}" for axis, degree in degrees.items() if degree > 1]
        raise InfeasibleError(
            f"num_gpus={task.num_gpus}: {task.shape.name} has work for at most {most}: "
            f"global_batch={task.global_batch}{''.join(factors)} (try num_gpus={most}, or a "
            "larger global_batch)",
            "more GPUs than the batch and the layers have work for",
        )


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
    """The largest degree that the rules allow each axis, in the order in which they are filled."""
    node = task.cluster.gpus_per_node
    return {
        "pp": min(max(2, task.num_gpus // node), task.shape.layers),
        "shard": max(1, node // degrees.get("tp", 1)),
        "replicate": task.num_gpus,
    }


def microbatches_per_step(task: Task, layout: Layout, microbatch_size: int) -> int:
    """Microbatches per step and pipeline. Raises InfeasibleError if the global batch does not
    divide among the data-parallel ranks, or if there are more microbatches than can be planned."""
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
    """Raise InfeasibleError if there are more stages than the model has blocks, or, with
    ``split_blocks``, than it has halves of blocks."""
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


def check_split_blocks(task: Task, split_blocks: bool | Auto) -> None:
    """Raise InfeasibleError where cuts inside blocks are asked for and whole blocks are needed."""
    if split_blocks is True and task.shape.dropout > 0:
        raise InfeasibleError(
            f"contender.split_blocks=true: model.dropout={task.shape.dropout} draws its masks "
            "block by block (use false, or model.dropout=0)"
        )


def default_chunks(task: Task, layout: Layout) -> int:
    """The simple rule for chunks per rank: two, if the model has enough blocks for the stages."""
    return 2 if layout.pp > 1 and 2 * layout.pp <= task.shape.layers else 1


def _product(degrees: Mapping[Axis, object]) -> str:
    return " x ".join(f"{name}={value}" for name, value in degrees.items())


def recomputed_blocks(asked: int | Auto, num_stages: int) -> tuple[int, ...]:
    """``Plan.recomputed`` for the same number of blocks in every stage; ``auto`` means all
    blocks."""
    return () if asked == "auto" else (asked,) * num_stages


# ZeroPP's orders of a step, from which the simulator chooses the fastest.
#
# One order is planned for equal durations, the other with the durations that the cost model
# predicts on the cluster. The planner and the tuner call the same functions, so that what is priced
# is what runs.


_step_s = attrgetter("step_s")


def fastest(plans: Iterable[Plan], cluster: Cluster, price: PlanPrice) -> SimResult:
    """The simulated step of the fastest plan that fits the device's memory, or of the fastest one
    if none fits; the first of several. All have one ``price``."""
    results = sorted((simulate(plan, cluster, price=price) for plan in plans), key=_step_s)
    if len(results) == 1:
        return results[0]
    limit = cluster.device.usable_bytes
    fitting = (found for found in results if found.peak_bytes <= limit)
    return next(fitting, results[0])


TooLarge = Callable[[Schedule], bool]


@dataclass(frozen=True)
class Draft:
    """An order of a plan's actions. ``complete`` gives the plan with its programs. Where that takes
    long, because gathers, reductions and transfers must be added, ``compute`` has the compute
    actions; of an order that is too large it may be the beginning alone."""

    complete: Callable[[], Plan]
    compute: Schedule | None = None


def one_order(
    programs: Callable[[SizedPlan], Schedule],
) -> Callable[[SizedPlan, PlanPrice | None, TooLarge | None], Iterator[Draft]]:
    """The ``orders`` of a contender that has a single order for every plan: ``programs``."""
    return partial(_only_order, programs)  # no closure, because traced ranks get contenders pickled


def _only_order(
    programs: Callable[[SizedPlan], Schedule],
    plan: SizedPlan,
    price: PlanPrice | None,
    too_large: TooLarge | None,
) -> Iterator[Draft]:
    del price, too_large
    yield Draft(lambda: plan.ordered(programs(plan)))


def drafts(
    plan: SizedPlan, price: PlanPrice | None = None, too_large: TooLarge | None = None
) -> Iterator[Draft]:
    """The orders of a ZeroPP plan to choose from, made one by one: that for equal durations and, if
    a ``price`` is given, those planned with its durations. ``too_large`` says whether compute
    actions, of a whole order or of its beginning, need more memory than there is; such orders need
    not be planned to the end."""
    sizes = StepSizes(
        num_ranks=plan.layout.pp,
        chunks=plan.layout.chunks,
        num_microbatches=plan.num_microbatches,
        unit=plan.schedule.unit,
        activation_cap=plan.activation_cap,
        split_backward=plan.split_backward,
        gather=plan.gathers,
        prefetch=plan.prefetch,
        reduce_every=plan.reduce_every,
    )
    # Orders do not depend on gathers and reductions; without these, more plans share cached orders.
    none = {"unshard": 0.0, "reduce_grad": 0.0, "copy_out": 0.0, "copy_in": 0.0}
    costs = tuple(replace(cost, **none) for cost in price.stages) if price else None
    for compute, complete in step_drafts(sizes, costs, too_large):
        yield Draft(partial(_completed, plan, complete), compute)


def _completed(plan: SizedPlan, complete: Callable[[], Schedule]) -> Plan:
    return plan.ordered(complete())
