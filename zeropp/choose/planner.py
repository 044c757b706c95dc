"""What the planners of all contenders share. Imports no torch.

In: a Task and a contender's knobs. Out: degrees, the fastest of several orders, and refusals of
what no contender could run. Degrees that are ``auto`` follow simple rules, which need no prices; a
search (``zeropp.choose.search``) calls planners with degrees of its own, none of them ``auto``. A
contender's planner is its ``size`` and its ``orders`` (``zeropp.choose.contender.Contender``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from operator import attrgetter

from zeropp.choose.task import Knobs, Task
from zeropp.price import PlanPrice
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import SimResult, simulate
from zeropp.schedule.plan import Draft, Plan, SizedPlan, TooLarge
from zeropp.schedule.program import Schedule, StageCost
from zeropp.types.layout import InfeasibleError, Layout, divisors
from zeropp.types.literals import Auto, Axis, if_auto
from zeropp.types.shape import ModelShape

_AXES: tuple[Axis, ...] = ("tp", "pp", "context", "shard", "replicate")


def resolve_degrees(task: Task, knobs: Knobs) -> Layout:
    """A layout whose degrees multiply to the task's ranks; its other fields have their defaults.

    Degrees that are given are taken first. ``context: auto`` is 1. Then ``pp: auto`` is one
    pipeline rank per node (two on a single node, if the ranks allow it), ``shard: auto`` is the
    largest group that fits into what is left of a node, and ``replicate: auto`` is what is left of
    the ranks. Raises InfeasibleError with one line that names the field, its value and what would
    work.
    """
    requests = asked_degrees(knobs)
    if "auto" in requests.values():  # no choice may be able to use all GPUs
        limits: dict[Axis, int] = {
            "tp": task.cluster.gpus_per_node,
            "pp": task.shape.layers,
            "context": most_slices(task.shape),
        }
        largest = {
            axis: if_auto(requests[axis], limits[axis]) for axis in limits if axis in requests
        }
        most = prod([task.global_batch, *largest.values()])
        if task.num_gpus > most:
            factors = [f" x {axis}={degree}" for axis, degree in largest.items() if degree > 1]
            raise InfeasibleError(
                f"num_gpus={task.num_gpus}: {task.shape.name} has work for at most {most}: "
                f"global_batch={task.global_batch}{''.join(factors)} (try num_gpus={most}, or a "
                "larger global_batch)",
                "more GPUs than the batch and the layers have work for",
            )
    degrees = _fill(task, requests)
    return Layout(
        pp=degrees.get("pp", 1),
        tp=degrees.get("tp", 1),
        context=degrees.get("context", 1),
        shard=degrees.get("shard", 1),
        replicate=degrees.get("replicate", 1),
    )


def asked_degrees(knobs: Knobs) -> dict[Axis, int | Auto]:
    """The degrees that were asked for, of the axes for which a contender has a knob."""
    return {axis: getattr(knobs, axis) for axis in _axes(type(knobs))}


@cache
def _axes(kind: type[Knobs]) -> tuple[Axis, ...]:
    return tuple(axis for axis in _AXES if hasattr(kind, axis))  # knobs have defaults


def _fill(task: Task, requests: Mapping[Axis, int | Auto]) -> dict[Axis, int]:
    degrees: dict[Axis, int] = {}
    rest = task.num_gpus
    for axis, degree in requests.items():
        if degree == "auto":
            continue
        if rest % degree:
            raise InfeasibleError(
                f"contender.{axis}={degree}: the degrees {_product(requests)} must multiply to "
                f"num_gpus={task.num_gpus} (try contender.{axis} in {divisors(rest)})",
                "degrees do not multiply to the GPUs",
            )
        degrees[axis], rest = degree, rest // degree
    node = task.cluster.gpus_per_node
    limits: dict[Axis, int] = {  # in the order in which the axes are filled
        "pp": min(max(2, task.num_gpus // node), task.shape.layers),
        "shard": max(1, node // degrees.get("tp", 1)),
        "replicate": task.num_gpus,
    }
    for axis, limit in limits.items():
        if requests.get(axis) == "auto":
            degrees[axis] = max(d for d in divisors(rest) if d <= limit)
            rest //= degrees[axis]
    if rest != 1:
        filled = {axis: degrees.get(axis, 1) for axis in requests}
        raise InfeasibleError(
            f"num_gpus={task.num_gpus}: the degrees {_product(filled)} multiply to "
            f"{task.num_gpus // rest} (set one of them to auto)",
            "degrees do not multiply to the GPUs",
        )
    return degrees


def check_stages(task: Task, layout: Layout, *, lone_ends: bool = False) -> None:
    """Raise InfeasibleError if there are more stages than the model has blocks; with ``lone_ends``
    embedding and head may be stages of their own."""
    stages, layers = layout.pp * layout.chunks, task.shape.layers
    most = layers + 2 * lone_ends
    if stages <= most:
        return
    if layout.pp <= layers:
        message = (
            f"contender.pp={layout.pp}: {layout.pp} x chunks={layout.chunks} = {stages} stages, "
            f"but {task.shape.name} has model.layers={layers} "
            f"(try contender.chunks <= {most // layout.pp})"
        )
    else:
        message = (
            f"contender.pp={layout.pp}: more stages than model.layers={layers} of "
            f"{task.shape.name} (try contender.pp <= {layers})"
        )
    raise InfeasibleError(message, "more stages than layers")


def check_tensor_parallel(shape: ModelShape, layout: Layout) -> None:
    """Raise InfeasibleError unless ``layout.tp`` divides the heads, the key/value heads, the MLP's
    width, the vocabulary and, with sequence parallelism, the sequence length."""
    cut = {"heads": shape.heads, "kv_heads": shape.kv_heads, "ffn": shape.ffn, "vocab": shape.vocab}
    if layout.sequence_parallel:
        cut["seq"] = shape.seq
    for field, size in cut.items():
        if size % layout.tp:
            fits = [d for d in divisors(shape.kv_heads) if not any(n % d for n in cut.values())]
            raise InfeasibleError(
                f"contender.tp={layout.tp}: must divide model.{field}={size} "
                f"(try {', '.join(map(str, fits))})"
            )


LEAST_TOKENS = 1024  # of a slice of a sequence, where nobody has asked for shorter ones


def most_slices(shape: ModelShape) -> int:
    """The largest number of slices of a sequence that leaves them long enough for products."""
    return max(1, shape.seq // LEAST_TOKENS)


def check_context(shape: ModelShape, layout: Layout, *, kv_heads: bool = False) -> None:
    """Raise InfeasibleError unless ``layout.context`` divides the sequence length and, where heads
    are exchanged for tokens, the heads of a rank; those of keys and values, too, where the program
    does not repeat them (``kv_heads``). A ring takes two parts of a sequence per rank, one of its
    first half and one of its second, which makes causal work equal."""
    sizes = {"heads": shape.heads // layout.tp}
    sizes |= {"kv_heads": shape.kv_heads // layout.tp} if kv_heads else {}
    cut = sizes | {"seq": shape.seq} if layout.exchange == "heads" else {"seq": shape.seq // 2}
    for field, size in cut.items():
        if size % layout.context:
            fits = [d for d in divisors(layout.context) if not size % d]
            raise InfeasibleError(
                f"contender.context={layout.context}: must divide model.{field}="
                f"{getattr(shape, field)}{f' / tp={layout.tp}' if layout.tp > 1 else ''} "
                f"(try {', '.join(map(str, fits))})",
                "sequences are not divided so",
            )


def default_chunks(task: Task, layout: Layout) -> int:
    """The simple rule for chunks per rank: two, if the model has enough blocks for the stages."""
    return 2 if layout.pp > 1 and 2 * layout.pp <= task.shape.layers else 1


def _product(degrees: Mapping[Axis, object]) -> str:
    return " x ".join(f"{name}={value}" for name, value in degrees.items())


def recomputed_blocks(blocks: int | Auto, num_stages: int) -> tuple[int, ...]:
    """``Plan.recomputed`` for the same number of blocks in every stage; ``auto`` means all
    blocks."""
    return () if blocks == "auto" else (blocks,) * num_stages


_step_s = attrgetter("step_s")


def fastest(
    plans: Iterable[Plan], cluster: Cluster, price: PlanPrice, limit_bytes: int | None = None
) -> SimResult:
    """The simulated step of the fastest plan that takes at most ``limit_bytes``, or fits the
    device's memory, or of the fastest one if none fits; the first of several. All have one
    ``price``."""
    results = sorted((simulate(plan, cluster, price=price) for plan in plans), key=_step_s)
    if len(results) == 1:
        return results[0]
    usable = cluster.device.usable_bytes
    limits = (usable if limit_bytes is None else limit_bytes, usable)
    fitting = (r for limit in limits for r in results if r.fits(limit))
    return next(fitting, results[0])


def one_order(
    programs: Callable[[SizedPlan], Schedule],
) -> Callable[[SizedPlan, Sequence[StageCost] | None, TooLarge | None], Iterator[Draft]]:
    """The ``orders`` of a contender that has a single order for every plan: ``programs``."""
    return partial(_only_order, programs)  # no closure, because traced ranks get contenders pickled


def _only_order(
    programs: Callable[[SizedPlan], Schedule],
    plan: SizedPlan,
    costs: Sequence[StageCost] | None,
    too_large: TooLarge | None,
) -> Iterator[Draft]:
    del costs, too_large
    yield Draft(lambda: plan.ordered(programs(plan)))
