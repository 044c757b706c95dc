"""The tuner's bounds hold over drawn tasks: a family's for its members, a member's for all orders.
Other tests are tasks in which a bound was once too high."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from baselines.fsdp.contender import FSDPKnobs
from baselines.public_3d import BEST_3D, Best3DKnobs
from baselines.torch_pp.contender import TORCHTITAN, TorchtitanKnobs
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.reading import preset
from tests.unit.simulated_task import task
from zeropp.choose.bounds import (
    exceeds,
    least_bytes,
    least_compute_s,
    least_of_alike,
    least_of_family,
    least_of_order_s,
    least_step_s,
)
from zeropp.choose.contender import Contender
from zeropp.choose.search import SAVES, search
from zeropp.choose.space import (
    SearchPoint,
    compute_knobs,
    points,
    saving_none,
    with_compute_of,
)
from zeropp.choose.task import Candidate, Task
from zeropp.price import PlanPrice, pass_times, price_plan, time_plan
from zeropp.price.cluster import Cluster
from zeropp.price.peak_memory import peak_memory
from zeropp.price.simulator import simulate
from zeropp.schedule.plan import Draft, SizedPlan
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Auto, Precision, ReduceEvery
from zeropp.types.shape import ModelShape

SEEDS = range(25)
UNITS: tuple[int | Auto, ...] = ("auto", 1, 2, 4)
REDUCTIONS: tuple[ReduceEvery | Auto, ...] = ("auto", "unit", "step")
SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Member:
    candidate: Candidate[Any]
    plan: SizedPlan
    price: PlanPrice


@dataclass(frozen=True)
class Family:
    task: Task
    bound_s: float
    members: tuple[Member, ...]


def on_cluster(name: str, num_gpus: int, batch: int, **changed: Any) -> Task:
    """The 14.6-billion-parameter GPT, with some of its sizes changed."""
    base, cluster = task(num_gpus, batch), preset("cluster", name, Cluster)
    return replace(base, shape=replace(base.shape, **changed), cluster=cluster)


def drawn_task(draw: random.Random) -> Task:
    """A small task, on a cluster whose links are slower than the preset's."""
    what = on_cluster(
        draw.choice(("a800", "h100")),
        draw.choice((4, 8, 16)),
        draw.choice((16, 32, 48)),
        layers=draw.choice((4, 6)),
        seq=draw.choice((512, 2048)),
    )
    cluster = what.cluster
    intra, inter = (
        replace(link, bandwidth_gb_s=link.bandwidth_gb_s * draw.choice((0.002, 0.1, 0.3, 1.0)))
        for link in (cluster.intra, cluster.inter)
    )
    host = cluster.host
    if host:
        host = replace(host, bandwidth_gb_s=host.bandwidth_gb_s * draw.choice((0.05, 0.3, 1.0)))
    precisions: tuple[Precision, ...] = ("bf16", "bf16", "fp8")  # the last not of all programs
    cluster = replace(cluster, intra=intra, inter=inter, host=host)
    return replace(what, cluster=cluster, precision=draw.choice(precisions))


def narrowed(point: SearchPoint[Any], draw: random.Random) -> SearchPoint[Any]:
    """The point with some knobs of ZeroPP or FSDP2 fixed."""
    reduce_every = draw.choice(REDUCTIONS)
    if isinstance(point.asked, ZeroppKnobs):
        knobs = replace(point.asked, unit=draw.choice(UNITS), reduce_every=reduce_every)
        knobs = replace(knobs, gradient_parts=draw.choice((1, 4)), prefetch=draw.choice((0, 1)))
        knobs = replace(knobs, merged_microbatches=draw.choice((1, 2)))
        return replace(point, asked=knobs)
    if isinstance(point.asked, FSDPKnobs):
        return replace(point, asked=replace(point.asked, reduce_every=reduce_every))
    return point


def drawn_families(contender: Contender[Any]) -> Iterator[Family]:
    """A family per seed, unless the one that was drawn is infeasible, or there is none."""
    for seed in SEEDS:
        draw = random.Random(f"{contender.name} {seed}")
        what = drawn_task(draw)
        known = [*points(what, contender.space, contender.knobs(), "auto", rejected=Counter())]
        point, size = draw.choice(known)
        point = narrowed(point, draw)
        families = [*contender.space.families(point)]
        if not families:
            continue
        knobs = draw.choice(families)
        with suppress(InfeasibleError):
            plan = contender.size(what, knobs, size)
            bound_s = least_step_s(plan, time_plan(plan, what.cluster), any_unit=True)
            assert least_compute_s(plan, pass_times(plan, what.cluster)) <= bound_s * SLACK
            # What recomputes and offloads takes about as long as what does neither, or longer.
            kept_s = least_step_s(
                plan.keeping_all, time_plan(plan.keeping_all, what.cluster), any_unit=True
            )
            assert kept_s * SAVES <= bound_s, knobs
            all_knobs = contender.space.members(point.asked, knobs, plan)
            found = members(contender, what, [Candidate(one, size) for one in all_knobs])
            yield Family(what, bound_s, tuple(found))


def members(
    contender: Contender[Any], what: Task, candidates: list[Candidate[Any]]
) -> Iterator[Member]:
    for candidate in candidates:
        with suppress(InfeasibleError):
            plan = contender.size(what, candidate.knobs, candidate.microbatch_size)
            yield Member(candidate, plan, price_plan(plan, what.cluster))


def check_orders(contender: Contender[Any], what: Task, member: Member) -> None:
    """No order of the member takes less time or memory than its bounds."""
    plan, price = member.plan, member.price
    least_s = least_step_s(plan, price)
    for order in contender.plans(plan, price):
        result = simulate(order, what.cluster, price=price)
        assert least_s <= result.step_s * SLACK, member.candidate
        peaks = peak_memory(order, price)
        enough = replace(price, host_limit=max(peak.host for peak in peaks))
        assert least_bytes(plan, enough) <= result.peak_bytes, member.candidate
    check_drafts(contender.orders(plan, price.stages, lambda _: False), what, member)


def check_drafts(drafts: Iterator[Draft], what: Task, member: Member) -> None:
    """No draft, once it is complete, takes less time or memory than the bounds of its order."""
    plan, price = member.plan, member.price
    for draft in drafts:
        if draft.compute is None:
            return  # a contender with one order
        result = simulate(draft.complete(), what.cluster, price=price)
        assert least_of_order_s(draft.compute, plan, price) <= result.step_s * SLACK, plan
        assert not exceeds(draft.compute, plan, price, result.peak_bytes), plan
        assert exceeds(draft.compute, plan, price, int(0.5 * result.peak_bytes)), plan


@pytest.mark.parametrize("name", PRICED)
def test_a_familys_bound_holds_for_all_its_members_and_theirs_for_all_orders(name: str) -> None:
    contender, checked = PRICED[name], 0
    for family in drawn_families(contender):
        for member in family.members:
            assert family.bound_s <= least_step_s(member.plan, member.price) * SLACK, member
            first = family.members[0]
            least = least_of_family(first.plan, first.price)
            assert least <= least_bytes(member.plan, member.price), member
            check_orders(contender, family.task, member)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("name", PRICED)
def test_families_alike_need_at_least_the_same_activations(name: str) -> None:
    contender, what = PRICED[name], on_cluster("a800", 16, 32, layers=4)
    of_compute = compute_knobs(contender.knobs)
    found: dict[object, list[int]] = {}
    for point, size in points(what, contender.space, contender.knobs(), 2, rejected=Counter()):
        for knobs in contender.space.families(point):
            with suppress(InfeasibleError):
                plan = contender.size(what, knobs, size)
                all_knobs = contender.space.members(point.asked, knobs, plan)
                candidates = [Candidate(one, size) for one in all_knobs]
                known = list(members(contender, what, candidates))
                least = least_of_alike(known[0].plan, known[0].price)
                assert 0 < least <= min(least_bytes(m.plan, m.price) for m in known), known[0]
                key = (size, point.num_microbatches, of_compute(knobs))
                found.setdefault(key, []).append(least)
    has_ways = {"replicate", "replicate_zero"} & {field.name for field in fields(contender.knobs)}
    assert not has_ways or any(len(values) > 1 for values in found.values())
    assert found
    assert all(len(set(values)) == 1 for values in found.values())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", PRICED)
def test_a_group_of_points_is_told_by_the_one_with_the_most_shards(
    name: str, precision: Precision
) -> None:
    contender = PRICED[name]
    what = replace(on_cluster("h100", 16, 32, layers=6), precision=precision)
    of_compute = compute_knobs(contender.knobs)
    of_root = compute_knobs(contender.knobs, saving=False)
    of_passes = compute_knobs(contender.knobs, beside=False)
    groups: dict[object, list[SearchPoint[Any]]] = {}
    for point, size in points(what, contender.space, contender.knobs(), 1, rejected=Counter()):
        degrees = point.degrees
        groups.setdefault((size, degrees.tp, degrees.pp, degrees.context), []).append(point)
    for group in groups.values():
        most = max(group, key=lambda point: point.degrees.shard)
        told = {of_compute(knobs) for knobs in contender.space.families(most)}
        assert all({*map(of_compute, contender.space.families(other))} <= told for other in group)
        # What saves memory takes about as long as what saves none, or longer; and all that a point
        # has is found from what saves none there, and from what is alike in other points.
        bounds, found = dict[object, float](), set[object]()
        for knobs in contender.space.families(saving_none(most)):
            with suppress(InfeasibleError):
                plan = contender.size(what, knobs, 1)
                least_s = least_compute_s(plan, pass_times(plan, what.cluster))
                bounds[of_root(knobs)] = min(bounds.get(of_root(knobs), least_s), least_s)
            more = with_compute_of(most, knobs, saving=False)
            found |= {k for k in contender.space.families(more) if of_root(k) == of_root(knobs)}
        assert found == {*contender.space.families(most)}
        same = dict[object, float]()  # where only what moves bytes beside passes differs
        for knobs in found:
            with suppress(InfeasibleError):
                plan = contender.size(what, knobs, 1)
                least_s = least_compute_s(plan, pass_times(plan, what.cluster))
                assert same.setdefault(of_passes(knobs), least_s) == pytest.approx(
                    least_s, rel=1e-9
                )
                assert least_s >= bounds[of_root(knobs)] * SAVES
        alike = {of_compute(knobs): knobs for knobs in found}
        for other in group[:1]:
            for compute, knobs in [*alike.items()][::9]:
                own = contender.space.families(with_compute_of(other, knobs, saving=True))
                assert {k for k in own if of_compute(k) == compute} == {
                    k for k in contender.space.families(other) if of_compute(k) == compute
                }


def test_a_familys_least_memory_holds_for_large_units_under_a_fixed_cap() -> None:
    """Stages of one block recompute it, and those of two recompute one of them, so that the last
    chunk of some ranks keeps far more than their first. With a cap of 9, units of 8 leave room for
    one microbatch in it, and units of 2 fill it with two."""
    what = on_cluster(
        "a800",
        8,
        48,
        layers=11,
        hidden=256,
        heads=4,
        kv_heads=4,
        ffn=1024,
        vocab=1024,
        seq=512,
        tied_embeddings=False,
    )
    asked = ZeroppKnobs(
        pp=4,
        shard=2,
        replicate=1,
        chunks=2,
        activation_cap=9,
        recompute="full",
        recompute_blocks=1,
    )
    candidates = [c for c, _ in ZEROPP.candidates(what, asked) if c.microbatch_size == 1]
    found = list(members(ZEROPP, what, candidates))
    assert {member.plan.schedule.unit for member in found} == {2, 4, 5, 6, 8}
    least = least_of_family(found[0].plan, found[0].price)
    assert least <= min(least_bytes(member.plan, member.price) for member in found)


def test_a_fixed_unit_hides_no_faster_plan_from_the_search() -> None:
    shape, what = preset("model", "gpt_6_2b", ModelShape), on_cluster("a800", 32, 128)
    slow = replace(what.cluster.intra, bandwidth_gb_s=20.0)
    what = replace(what, shape=replace(shape, layers=4), cluster=replace(what.cluster, intra=slow))
    asked = ZeroppKnobs(pp=4, shard=8, chunks=1, unit=2, recompute="none", placement="dp_inner")
    steps = [
        result.step_s
        for candidate, _ in ZEROPP.candidates(what, asked)
        if (result := ZEROPP.simulated(what, candidate)).peak_bytes
        <= what.cluster.device.usable_bytes
    ]
    winner = search(what, ZEROPP, asked, tolerance=0.0, runner_up=False).winner
    assert winner is not None
    assert winner.step_s == pytest.approx(min(steps))


# One chunk per rank has one buffer of unreduced gradients; copies of the last reductions hold up no
# other rank.
NARROW: list[tuple[Contender[Any], Any, tuple[int, int]]] = [
    (
        ZEROPP,
        ZeroppKnobs(pp=2, shard=4, replicate=2, chunks=1, unit=2, reduce_every="unit"),
        (16, 48),
    ),
    (TORCHTITAN, TorchtitanKnobs(pp=2, chunks=2, schedule="looped_bfs"), (2, 6)),
]


@pytest.mark.parametrize(("contender", "asked", "sizes"), NARROW, ids=["zeropp", "torchtitan"])
def test_bounds_hold_for_all_plans_of_a_narrow_question(
    contender: Contender[Any], asked: Any, sizes: tuple[int, int]
) -> None:
    what = on_cluster("h100", *sizes, layers=6, seq=512)
    found = list(members(contender, what, [c for c, _ in contender.candidates(what, asked)]))
    assert found
    for member in found:
        check_orders(contender, what, member)


@pytest.mark.parametrize("blocks", [8, 13, 20])
def test_a_bound_counts_the_waits_for_a_slow_host(blocks: int) -> None:
    what = on_cluster("h100", 8, 8, layers=20, seq=2048)
    assert what.cluster.host is not None
    host = replace(what.cluster.host, bandwidth_gb_s=what.cluster.host.bandwidth_gb_s / 5)
    what = replace(what, cluster=replace(what.cluster, host=host))
    asked = ZeroppKnobs(pp=1, shard=8, chunks=22, unit=1, offload_blocks=blocks, compile=False)
    plan = ZEROPP.size(what, asked, 1)
    price = price_plan(plan, what.cluster)
    step_s = min(
        simulate(order, what.cluster, price=price).step_s for order in ZEROPP.plans(plan, price)
    )
    assert 0.9 * step_s < least_step_s(plan, price) <= step_s * SLACK
    assert sum(cost.compute for cost in price.stages) < 0.9 * step_s


@pytest.mark.parametrize(
    ("layers", "batch", "knobs", "step", "compute"),
    [  # of the step's time: a microbatch's way through all stages, the wait for the first backward
        (12, 2, {"pp": 4, "replicate": 2, "chunks": 3}, 0.9, 0.6),
        (12, 4, {"pp": 4, "replicate": 2, "chunks": 3}, 0.9, 0.6),
        (48, 8, {"tp": 1, "pp": 8, "replicate": 1, "chunks": 2}, 0.93, 0.84),
        (48, 16, {"tp": 1, "pp": 8, "replicate": 1, "chunks": 4}, 0.93, 0.84),
    ],
)
def test_a_bound_counts_what_a_pipeline_waits_for(
    layers: int, batch: int, knobs: dict[str, Any], step: float, compute: float
) -> None:
    what = on_cluster("h100", 8, batch, layers=layers, seq=2048)
    plan = BEST_3D.size(what, Best3DKnobs(**knobs, schedule="interleaved_zb"), 1)
    price = price_plan(plan, what.cluster)
    (order,) = BEST_3D.plans(plan, price)
    step_s = simulate(order, what.cluster, price=price).step_s
    assert step * step_s < least_step_s(plan, price) <= step_s * SLACK
    assert compute * step_s < least_compute_s(plan, pass_times(plan, what.cluster)) <= step_s


def test_an_order_that_fits_is_found_behind_one_that_does_not() -> None:
    what = on_cluster("h100", 16, 64, layers=24)
    asked = ZeroppKnobs(
        pp=4,
        shard=4,
        replicate=1,
        replicate_zero=0,
        chunks=4,
        unit=2,
        activation_cap=8,
        recompute="none",
        reduce_every="unit",
        placement="dp_inner",
        compile=False,
    )
    plan = ZEROPP.size(what, asked, 1)
    price = price_plan(plan, what.cluster)
    peaks = [
        simulate(order, what.cluster, price=price).peak_bytes for order in ZEROPP.plans(plan, price)
    ]
    assert peaks[0] > peaks[1]
    device = what.cluster.device
    between = sum(peaks) / 2 / 2**30 + device.memory_gib - device.usable_bytes / 2**30
    cluster = replace(what.cluster, device=replace(device, memory_gib=between))
    winner = search(replace(what, cluster=cluster), ZEROPP, asked, 1).winner
    assert winner is not None
    assert winner.peak_bytes == peaks[1]
