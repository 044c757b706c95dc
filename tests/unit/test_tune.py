"""The tuner: its bounds hold, its search finds what brute force finds, its command line is kind."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
from omegaconf import OmegaConf

from baselines.deepspeed_3d.contender import DEEPSPEED
from baselines.torch_pp.contender import TorchtitanKnobs
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.reading import preset
from benchmarks.tune import __main__ as tune
from tests.unit.simulated_task import task
from zeropp.choose.bounds import least_bytes, least_compute_s, least_step_s
from zeropp.choose.planner import asked_degrees
from zeropp.choose.search import OOM, _Search, search
from zeropp.choose.space import compute_knobs, neighbours, points
from zeropp.choose.steps import Steps
from zeropp.choose.task import Candidate, Task
from zeropp.price import pass_times, price_plan
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import SimResult, simulate
from zeropp.schedule.plan import SizedPlan
from zeropp.types.layout import InfeasibleError
from zeropp.types.shape import ModelShape

TINY_GIB = 7.4
SHAPE = replace(task().shape, layers=8, hidden=2048, heads=16, kv_heads=16, ffn=8192)
SMALL = replace(task(8, 16), shape=SHAPE)
FEWER = replace(SMALL, global_batch=8)  # so that there are fewer candidates


def tiny() -> Task:
    """Four GPUs whose memory does not hold every plan."""
    return with_memory(replace(task(4, 4), shape=replace(SHAPE, layers=4)), TINY_GIB)


def with_memory(what: Task, gib: float) -> Task:
    """The task on GPUs with so much memory."""
    device = replace(what.cluster.device, memory_gib=gib)
    return replace(what, cluster=replace(what.cluster, device=device))


@cache
def everything(name: str, what: Task) -> list[tuple[Candidate[Any], SizedPlan]]:
    """All candidates of a contender, with their plans without an order of actions."""
    return list(PRICED[name].candidates(what))


def check_bounds(what: Task, plan: SizedPlan, result: SimResult) -> None:
    assert least_bytes(plan, result.price) <= result.peak_bytes, result.plan
    least_s = least_step_s(plan, result.price)
    assert least_compute_s(plan, pass_times(plan, what.cluster)) <= least_s, result.plan
    assert least_s <= result.step_s * (1 + 1e-9), result.plan


@pytest.mark.parametrize("name", PRICED)
def test_bounds_hold_and_the_winner_is_the_best_of_all(name: str) -> None:
    contender, what = PRICED[name], tiny()
    found = everything(name, what)
    results = [contender.simulated(what, candidate) for candidate, _ in found]
    for (_, plan), result in zip(found, results, strict=True):
        check_bounds(what, plan, result)
    smallest = min(result.peak_bytes for result in results)
    if smallest > what.cluster.device.usable_bytes:  # without ZeRO no plan fits
        reserved = what.cluster.device.reserved_gib
        what = with_memory(what, reserved + 1.01 * smallest / 2**30)
    room = what.cluster.device.usable_bytes
    fitting = [result.step_s for result in results if result.peak_bytes <= room]
    assert 0 < len(fitting) < len(found)
    winner = search(what, contender, tolerance=0.0).winner
    assert winner is not None
    assert winner.step_s <= min(fitting) * (1 + 1e-9)
    assert winner.step_s == contender.simulated(what, winner.candidate).step_s  # it may be beside


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small its budget is, a search goes on until it has found something."""
    monkeypatch.setattr("zeropp.choose.budget._PATIENCE", 1e12)


def test_a_search_that_begins_with_the_winner_finds_it_and_simulates_less() -> None:
    first = search(task(16, 32), ZEROPP, runner_up=False)
    assert first.winner is not None
    again = search(task(16, 32), ZEROPP, runner_up=False, known=[first.winner.candidate])
    assert again.winner is not None
    assert again.winner.step_s == first.winner.step_s
    assert again.simulated < first.simulated


@pytest.mark.usefixtures("patient")
def test_a_search_that_ends_early_has_compared_all_pipelines_with_the_most_shards() -> None:
    asked = ZeroppKnobs(pp=4, context=1, chunks=2, unit=8, recompute="none")
    at_ease = search(task(32, 128), ZEROPP, asked, 1, runner_up=False)
    found = search(task(32, 128), ZEROPP, asked, 1, runner_up=False, budget_s=1e-9)
    assert not found.is_complete
    assert at_ease.winner is not None
    assert found.winner is not None
    assert found.winner.plan.layout.shard == 8


def test_where_one_wins_those_that_share_its_compute_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards: list[int] = []
    evaluate = _Search.evaluate

    def counted(self: Any, entry: Any) -> Any:
        shards.append(entry.candidate.knobs.shard)
        return evaluate(self, entry)

    monkeypatch.setattr(_Search, "evaluate", counted)
    asked = ZeroppKnobs(pp=2, context=1, placement="dp_inner", unit=2, recompute="none")
    search(task(16, 128), ZEROPP, asked, runner_up=False)
    with_most = [number for number, shard in enumerate(shards) if shard == 8]
    with_less = [number for number, shard in enumerate(shards) if shard < 8]
    assert with_most[0] < with_less[0] < with_most[-1]


def test_most_shards_and_those_of_a_node_are_tried_first() -> None:
    asked = ZeroppKnobs(pp=2, context=1)
    begins = _Search(task(64, 128), ZEROPP, asked, False)._roots(asked, 1)
    shards = [root.candidate.knobs.shard for root in begins]
    assert set(shards) == {8, 32}
    two = replace(asked, context=2)  # a ZeRO-3 group has both slices of a sequence
    begins = _Search(task(64, 128), ZEROPP, two, False)._roots(two, 1)
    assert {root.candidate.knobs.shard for root in begins} == {4, 16}


def test_beside_a_winner_other_shards_may_have_another_zero() -> None:
    knobs = ZeroppKnobs(pp=2, shard=16, context=1, replicate=1, replicate_zero=0)
    beside = [new for new, _ in neighbours(ZeroppKnobs(), Candidate(knobs, 1))]
    assert [new.replicate_zero for new in beside if new.replicate != 1] == ["auto"] * 2
    same = {new.replicate_zero for new in beside if (new.pp, new.shard) == (2, 16)}
    assert same == {0, 1}  # no other numbers than it may have


def test_beside_a_winner_larger_microbatches_may_recompute_some_blocks() -> None:
    def beside(asked: Any) -> set[tuple[str, object]]:
        one = dict.fromkeys(asked_degrees(asked), 1)
        found = Candidate(replace(asked, recompute="none", **one), 1)
        return {(k.recompute, k.recompute_blocks) for k, b in neighbours(asked, found) if b == 2}

    assert {("none", "auto"), ("full", 4), ("selective", 64)} < beside(ZeroppKnobs())
    assert beside(ZeroppKnobs(recompute="none")) == {("none", "auto")}  # as it was asked for
    whole = TorchtitanKnobs()  # it has no key for some blocks
    assert {blocks for _, blocks in beside(whole)} == {"auto"}


def test_a_climb_may_ask_for_more_than_it_then_misses() -> None:
    """As that of ``explain``, which takes less time."""
    strict, loose = (
        search(
            task(16, 64),
            ZEROPP,
            ZeroppKnobs(offload_blocks=0),
            tolerance=0.06,
            climbs=climbs,
            runner_up=False,
        ).winner
        for climbs in (1e-4, 0.03)
    )
    assert strict is not None
    assert loose is not None
    assert strict.step_s < loose.step_s < 1.03 * strict.step_s


@pytest.mark.usefixtures("patient")
def test_a_search_in_a_hurry_begins_with_what_holds_least() -> None:
    asked = ZeroppKnobs(pp=4, context=1, replicate_zero=0, placement="dp_inner")
    at_ease = search(task(16, 128), ZEROPP, asked, runner_up=False)
    hurried = search(task(16, 128), ZEROPP, asked, budget_s=1e-9)
    assert at_ease.is_complete
    assert not hurried.is_complete
    assert at_ease.winner is not None
    assert hurried.winner is not None
    assert at_ease.winner.plan.recompute != "full"
    assert (hurried.winner.plan.recompute, hurried.winner.candidate.microbatch_size) == ("full", 1)


def test_a_search_that_finds_nothing_ends_with_its_budget() -> None:
    none = with_memory(task(32, 128), 1)
    assert search(none, ZEROPP).is_complete
    hurried = search(none, ZEROPP, budget_s=0.0)
    assert hurried.winner is None
    assert not hurried.is_complete


def test_winner_fits_and_runner_up_is_another_plan_and_no_faster() -> None:
    outcome = search(task(), DEEPSPEED)
    assert outcome.winner is not None
    assert outcome.runner_up is not None
    assert outcome.winner.peak_bytes <= task().cluster.device.usable_bytes
    assert outcome.winner.step_s <= outcome.runner_up.step_s
    assert outcome.winner.degrees != outcome.runner_up.degrees
    assert outcome.rejected[OOM] > 0


def test_what_no_planner_would_plan_is_not_tried() -> None:
    many = task(8, 8 * 2**18)
    plans = [plan for _, plan in ZEROPP.candidates(many)]
    assert plans
    assert all(p.num_microbatches * p.layout.pp * p.layout.chunks <= 2**18 for p in plans)
    with pytest.raises(InfeasibleError) as refusal:
        ZEROPP.size(many, ZeroppKnobs(pp=2, shard=4), 1)
    assert refusal.value.kind == "more microbatches than can be planned"


def test_nothing_fits_on_too_few_gpus() -> None:
    outcome = search(with_memory(tiny(), 5), ZEROPP)
    assert outcome.winner is None
    assert outcome.rejected[OOM] > 0


def test_the_baseline_may_use_all_that_its_software_has() -> None:
    layouts = [plan.layout for _, plan in everything("best_3d", FEWER)]
    assert {layout.tp for layout in layouts} == {1, 2, 4, 8}
    assert any(layout.sequence_parallel for layout in layouts)
    assert any(layout.replicate_zero for layout in layouts)
    plans = [plan for _, plan in everything("deepspeed_3d", FEWER)]
    assert {plan.schedule.name for plan in plans} == {"1f1b"}


def test_embedding_and_head_may_be_chunks_of_their_own() -> None:
    what = task(8, 32)
    what = replace(what, shape=replace(what.shape, layers=14))
    assert (8, 2) in {
        (plan.layout.pp, plan.layout.chunks) for _, plan in everything("megatron_core", what)
    }


def test_what_was_asked_for_is_kept_and_the_rest_is_searched() -> None:
    asked = ZeroppKnobs(pp=4, unit=3, activation_cap=7, recompute="selective")
    winner = search(SMALL, ZEROPP, asked, 2).winner
    assert winner is not None
    found = winner.candidate
    assert found.microbatch_size == 2
    for knob in ("pp", "unit", "activation_cap", "recompute"):
        assert getattr(found.knobs, knob) == getattr(asked, knob)
    assert "auto" not in (found.knobs.shard, found.knobs.chunks, found.knobs.reduce_every)


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """The configuration of the command without arguments, which Hydra needs long to compose."""
    (config,) = compose("tune", [])
    return config


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ("num_gpus=x", "num_gpus"),
        ("contenders=[abc]", "contenders"),
        ("model.heads=7", "model.heads=7: must divide model.hidden"),
        ("cluster.group_shares=[0,0]", "cluster.group_shares=0: must be more than 0"),
    ],
)
def test_a_bad_value_ends_with_2_and_one_line(
    argument: str,
    word: str,
    composed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = OmegaConf.merge(composed, OmegaConf.from_dotlist([argument]))
    composing = "benchmarks.specification.compose.compose"
    monkeypatch.setattr(composing, lambda name: [OmegaConf.to_container(config)])
    assert tune.main() == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""


def test_the_answer_comes_last(
    composed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind the commands, which took it off the screen."""
    words = ["contenders=[fsdp]", "num_gpus=8", "global_batch=8", "model.layers=2"]
    config = OmegaConf.merge(composed, OmegaConf.from_dotlist(words))
    composing = "benchmarks.specification.compose.compose"
    monkeypatch.setattr(composing, lambda name: [OmegaConf.to_container(config)])
    assert tune.main() == 0
    printed = capsys.readouterr().out
    assert printed.index("this runs its plan") < printed.index("Do you need tensor parallelism")


@pytest.mark.parametrize("name", PRICED)
def test_data_parallel_knobs_change_no_cut_and_no_compute(name: str) -> None:
    contender, what = PRICED[name], tiny()
    of_compute = compute_knobs(contender.knobs)
    found: dict[object, set[object]] = {}
    plans = 0
    for candidate, plan in everything(name, what):
        key = (candidate.microbatch_size, plan.num_microbatches, of_compute(candidate.knobs))
        bound_s = least_compute_s(plan, pass_times(plan, what.cluster))
        found.setdefault(key, set()).add((plan.cuts, bound_s))
        plans += 1
    assert 0 < len(found) <= plans
    assert all(len(values) == 1 for values in found.values())


@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_a_plan_whose_faster_order_leaves_too_little_room_runs_in_the_other(margin: float) -> None:
    candidate, faster, other = _leaner_but_slower()
    limit = (other.peak_bytes + faster.peak_bytes) // 2
    device = SMALL.cluster.device
    gib = device.memory_gib + (limit * (1 + margin) - device.usable_bytes) / 2**30
    tight = replace(with_memory(SMALL, gib), memory_margin=margin)
    assert other.peak_bytes <= tight.limit_bytes < faster.peak_bytes
    assert tight.cluster.device.usable_bytes == pytest.approx(tight.limit_bytes * (1 + margin))
    assert ZEROPP.simulated(tight, candidate).step_s == other.step_s
    winner = search(tight, ZEROPP, candidate.knobs, candidate.microbatch_size).winner
    assert winner is not None
    assert winner.step_s == other.step_s


def _leaner_but_slower() -> tuple[Candidate[ZeroppKnobs], SimResult, SimResult]:
    """A candidate, its faster order, and one that is slower but needs less memory."""
    asked = ZeroppKnobs(pp=4, shard=2, replicate=1, recompute="none")
    for candidate, plan in ZEROPP.candidates(SMALL, asked):
        price = price_plan(plan, SMALL.cluster)
        orders = ZEROPP.plans(plan, price)
        faster, *others = sorted(
            (simulate(order, SMALL.cluster, price=price) for order in orders),
            key=lambda result: result.step_s,
        )
        for other in others:
            if other.peak_bytes < faster.peak_bytes and other.step_s > faster.step_s:
                return candidate, faster, other
    raise AssertionError("no two orders of a candidate differ so")


@pytest.mark.parametrize(
    ("pp", "chunks", "unit", "microbatches"),
    [(2, 1, 3, 7), (4, 2, 5, 13), (8, 2, 8, 20), (8, 4, 9, 31), (16, 1, 20, 40), (16, 2, 16, 33)],
)
def test_planning_with_durations_never_costs_time(
    pp: int, chunks: int, unit: int, microbatches: int
) -> None:
    knobs = ZeroppKnobs(pp=pp, shard=64 // pp, chunks=chunks, unit=unit)
    what = replace(task(64, microbatches * 64 // pp))
    sized = ZEROPP.size(what, knobs, 1)
    price = price_plan(sized, what.cluster)
    plans = ZEROPP.plans(sized, price)
    equal, *others = (simulate(plan, what.cluster, price=price).step_s for plan in plans)
    assert others
    assert min(others) <= equal


def test_the_winner_recomputes_no_more_blocks_than_it_must() -> None:
    asked = ZeroppKnobs(pp=2, shard=4, chunks=1, unit=4, activation_cap=8, recompute="full")
    found = set()
    for tenths in range(70, 120, 2):  # from a device that holds nothing to one with room
        small = with_memory(SMALL, tenths / 10)
        winner = search(small, ZEROPP, asked, 1).winner
        if winner is None:
            continue
        assert winner.peak_bytes <= small.cluster.device.usable_bytes
        blocks = winner.candidate.knobs.recompute_blocks
        assert isinstance(blocks, int)
        found.add(blocks)
        if blocks > 1:
            knobs = replace(winner.candidate.knobs, recompute_blocks=blocks - 1)
            fewer = ZEROPP.simulated(small, Candidate(knobs, 1))
            # Stages are cut anew for fewer blocks, so that fewer need not be faster.
            fits = fewer.peak_bytes <= small.cluster.device.usable_bytes
            assert not fits or fewer.step_s >= winner.step_s
    assert 1 in found
    assert found & {2, 3}  # of the four blocks of a stage


@pytest.mark.parametrize("most", [8, 11, 16])
def test_the_cap_is_the_fastest_of_all_that_fit(most: int) -> None:
    what = replace(task(8, 64), shape=SHAPE)
    asked = search(what, ZEROPP, ZeroppKnobs(pp=2, chunks=4, unit=2, recompute="none")).winner
    assert asked is not None
    by_cap = {
        cap: ZEROPP.simulated(
            what, Candidate(replace(asked.candidate.knobs, activation_cap=cap), 1)
        )
        for cap in range(7, 33)
    }
    room = by_cap[most].peak_bytes * (1 + what.memory_margin) / 2**30
    small = with_memory(what, room + 1e-3 + what.cluster.device.reserved_gib)
    fitting = {c: r.step_s for c, r in by_cap.items() if r.peak_bytes <= small.limit_bytes}
    assert len(fitting) < len(by_cap)
    open_cap = replace(asked.candidate.knobs, activation_cap="auto")
    winner = search(small, ZEROPP, open_cap, 1, tolerance=0.0).winner
    assert winner is not None
    assert winner.step_s == min(fitting.values())


def test_a_known_plan_that_does_not_fit_hides_no_other() -> None:
    shape, cluster = preset("model", "llama_8b", ModelShape), preset("cluster", "h100", Cluster)
    what = replace(task(16, 256), shape=shape, cluster=cluster)
    asked = ZeroppKnobs(
        pp=2, chunks=8, context=1, recompute="none", offload_blocks=0, replicate_zero=0,
        placement="dp_inner", compile=True,
    )  # fmt: skip
    alone = search(what, ZEROPP, asked, runner_up=False).winner
    assert alone is not None
    large = replace(alone.candidate.knobs, unit=32, activation_cap=256, reduce_every="step")
    known = [Candidate(large, alone.candidate.microbatch_size)]
    begun = search(what, ZEROPP, asked, runner_up=False, known=known).winner
    assert begun is not None
    assert begun.step_s == alone.step_s


@pytest.mark.parametrize("name", ["megatron_core", "zeropp", "torch_pp"])
def test_what_shorter_steps_tell_is_no_more_than_a_long_one_takes(name: str) -> None:
    contender, draw, checked = PRICED[name], random.Random(name), 0
    shape, cluster = preset("model", "llama_8b", ModelShape), preset("cluster", "h100", Cluster)
    slow = replace(cluster, nics_per_node=1)
    asked = replace(contender.knobs(), pp=2)
    while checked < 12:
        what = replace(
            task(draw.choice((8, 16)), draw.choice((256, 384))),
            shape=shape,
            cluster=draw.choice((cluster, slow)),
        )
        known = points(what, contender.space, asked, 1, rejected=Counter())
        point, size = draw.choice([p for p in known if p[0].num_microbatches >= 48])
        families = [*contender.space.families(point)]
        with suppress(InfeasibleError):
            family = draw.choice(families)
            plan = contender.size(what, family, size)
            member = draw.choice([*contender.space.members(asked, family, plan)])
            plan = contender.size(what, member, size)
            price = price_plan(plan, what.cluster)
            steps = Steps(contender=contender, limit_bytes=2**60, asks_cap=False)
            told = steps.told(plan, price)
            real, _ = steps.fastest(plan, price, inf)
            assert told is not None
            assert real is not None
            assert told[1] <= real.step_s
            checked += 1


def test_where_a_host_is_slow_the_least_cap_is_tried() -> None:
    """Stores are hidden best where forwards and backwards alternate, far from the largest cap."""
    base, cluster = task(8, 16), preset("cluster", "h100", Cluster)
    assert cluster.host is not None
    host = replace(cluster.host, bandwidth_gb_s=cluster.host.bandwidth_gb_s / 5)
    shape = replace(base.shape, layers=12)
    what = replace(base, shape=shape, cluster=replace(cluster, host=host), memory_margin=0.0)
    asked = ZeroppKnobs(
        pp=2, shard=4, replicate=1, context=1, chunks=3, unit=1, recompute="none",
        reduce_every="step", split_backward=False, compile=False, placement="dp_inner",
        replicate_zero=0,
    )  # fmt: skip
    steps = {
        cap: ZEROPP.simulated(
            what, Candidate(replace(asked, offload_blocks=6, activation_cap=cap), 1)
        )
        for cap in (3, 9)
    }
    small = with_memory(what, steps[9].peak_bytes / 2**30 + 1e-3 + what.cluster.device.reserved_gib)
    winner = search(
        small, ZEROPP, replace(asked, activation_cap="auto", offload_blocks="auto"), 1
    ).winner
    assert winner is not None
    assert steps[3].step_s < 0.8 * steps[9].step_s
    assert winner.step_s <= steps[3].step_s
