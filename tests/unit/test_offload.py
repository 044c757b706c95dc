"""Offload in programs, prices and the search: legal orders, the host's link and its memory."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from baselines.deepspeed_3d.contender import DEEPSPEED, DeepSpeedKnobs
from baselines.fsdp.contender import FSDP, MEGATRON_FSDP, FSDPKnobs, MegatronFSDPKnobs
from baselines.megatron_core.contender import MEGATRON_CORE, MegatronCoreKnobs
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from tests.unit.simulated_task import task
from zeropp.choose.contender import WITHOUT_OFFLOAD, Contender
from zeropp.choose.search import search
from zeropp.choose.task import Candidate
from zeropp.price.cluster import Cluster, Host
from zeropp.price.simulator import SimResult, simulate
from zeropp.schedule.event_loop import run
from zeropp.schedule.legality import ScheduleError, validate
from zeropp.schedule.program import Op, Schedule, StageCost, parse_action
from zeropp.types.layout import InfeasibleError

HOST = Host(bandwidth_gb_s=64, memory_gib=2048)


def program(words: str) -> Schedule:
    actions = tuple(parse_action(word) for word in words.split())
    return Schedule(name="test", num_microbatches=2, unit=2, stage_rank=(0, 0), programs=(actions,))


LEGAL = "0F0 0STORE0 0F1 0FREE0 1F0 1F1 1B0 0LOAD0 1B1 0B0 0B1"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (LEGAL, ""),
        (LEGAL.replace("0LOAD0 ", ""), "0B0 without 0LOAD0"),
        (LEGAL.replace("0LOAD0 ", "").replace("0B0", "0B0 0LOAD0"), "0B0 without 0LOAD0"),
        (LEGAL.replace("0FREE0 ", ""), "0LOAD0 must follow 0FREE0"),
        ("0STORE0 " + LEGAL.replace("0STORE0 ", ""), "0STORE0 must follow 0F0"),
        (LEGAL.replace("0STORE0", "0STORE0 0STORE0"), "0STORE0 must follow 0F0"),
    ],
)
def test_what_is_stored_was_computed_and_is_loaded_before_it_is_used(words: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why) if why else nullcontext():
        validate(program(words))


def test_compute_waits_for_a_store_where_it_frees_and_for_a_load_where_it_uses() -> None:
    costs = [StageCost(store=3.0, load=5.0)] * 2
    result = run(program(LEGAL), costs)
    ends = dict(zip(map(str, result.sequence), result.ends, strict=True))
    assert ends["0STORE0"] == 4.0  # behind the forward, beside the next one
    assert ends["0FREE0"] == 4.0
    assert ends["1B0"] == ends["0FREE0"] + 1 + 1 + 2
    assert ends["0LOAD0"] == ends["1B0"] + 5.0
    assert ends["0B0"] == ends["0LOAD0"] + 2.0
    assert result.step_s == ends["0B1"] == ends["0B0"] + 2.0


def on(host: Host | None = HOST, **device: Any) -> Cluster:
    cluster = task().cluster
    return replace(cluster, host=host, device=replace(cluster.device, **device))


def simulated(cluster: Cluster, **knobs: Any) -> SimResult:
    asked = ZeroppKnobs(pp=2, shard=32, chunks=20, unit=2, split_backward=False, **knobs)
    plan = ZEROPP.size(replace(task(64, 128), cluster=cluster), asked, 1)
    price = ZEROPP.prices.of(plan, cluster)
    planned = next(ZEROPP.plans(plan, price))
    planned.check()
    return simulate(planned, cluster, price=price)


def test_offload_moves_bytes_to_the_host_and_costs_what_the_link_cannot_hide() -> None:
    none, half, every = (simulated(on(), offload_blocks=n) for n in (0, 10, 20))
    assert none.memory[0].host == 0
    assert half.memory[0].host < every.memory[0].host
    assert every.memory[0].activations < half.memory[0].activations < none.memory[0].activations
    # Twice a chunk's tensors stay: what is copied, and what is computed.
    moved = none.peak_bytes - every.peak_bytes
    assert 0.8 * every.memory[0].host < moved <= every.memory[0].host
    assert none.step_s <= half.step_s <= every.step_s
    slow = simulated(on(replace(HOST, bandwidth_gb_s=4)), offload_blocks=20)
    stored = sum(slow.price.stages[s].store for s in slow.plan.schedule.stages_of(0)[:-3])
    assert slow.step_s > slow.plan.num_microbatches * stored
    assert slow.breakdown.copies > slow.step_s / 4
    shared = on(replace(HOST, shares_network=True))
    assert simulated(shared, offload_blocks=20).step_s >= every.step_s


def test_more_than_the_share_of_the_hosts_memory_does_not_fit() -> None:
    every = simulated(on(), offload_blocks=20)
    needed = every.memory[0].host * every.plan.layout.world / 8 / 2**30
    small = simulated(on(replace(HOST, memory_gib=0.9 * needed)), offload_blocks=20)
    assert every.fits(every.peak_bytes)
    assert not small.fits(small.peak_bytes)
    with pytest.raises(InfeasibleError, match="says nothing of its hosts"):
        simulated(on(None), offload_blocks=1)


def test_the_search_takes_it_where_memory_is_short() -> None:
    asked = ZeroppKnobs(pp=1, shard=64, replicate=1, chunks=42, split_backward=True)

    def found(cluster: Cluster, blocks: Any = "auto") -> Any:
        wanted = replace(asked, offload_blocks=blocks)
        return search(replace(task(64, 256), cluster=cluster), ZEROPP, wanted, 4).winner

    short = on(memory_gib=24.0)
    without, taken = found(short, 0), found(short)
    assert taken.plan.offload_blocks > 0
    assert taken.step_s < without.step_s
    assert taken.result.fits(taken.result.peak_bytes)
    assert found(replace(short, host=None)).plan == without.plan
    # No fewer blocks are as fast.
    fewer = found(short, taken.plan.offload_blocks - 1)
    assert fewer is None or fewer.step_s > 1.0001 * taken.step_s
    assert any(a.op is Op.LOAD for a in taken.plan.schedule.programs[0])


def test_the_search_sends_as_few_blocks_as_fit_whatever_else_is_open() -> None:
    """A third of the blocks: with all of them offloaded, recomputation beats this kind."""
    slow = on(replace(HOST, bandwidth_gb_s=25), memory_gib=20.0)
    asked = ZeroppKnobs(pp=1, shard=64, replicate=1, context=1, replicate_zero=0, chunks=42)

    def found(**fixed: Any) -> Any:
        wanted = replace(asked, **fixed)
        return search(replace(task(64, 64), cluster=slow), ZEROPP, wanted, 1).winner

    best, selective, every = found(), found(recompute="selective"), found(offload_blocks=40)
    assert 0 < best.plan.offload_blocks < 20
    assert best.step_s <= 1.005 * selective.step_s < every.step_s


@pytest.mark.parametrize(
    ("contender", "asked"), [(FSDP, FSDPKnobs()), (MEGATRON_FSDP, MegatronFSDPKnobs())]
)
def test_fsdp_has_the_same_link_and_its_search_takes_it(
    contender: Contender[Any], asked: FSDPKnobs
) -> None:
    def stepped(cluster: Cluster, blocks: int) -> SimResult:
        knobs = replace(asked, shard=64, replicate=1, recompute="none", offload_blocks=blocks)
        on_it = replace(task(64, 128), cluster=cluster)
        plan = contender.size(on_it, knobs, 1)
        price = contender.prices.of(plan, cluster)
        planned = next(contender.plans(plan, price))
        planned.check()
        return simulate(planned, cluster, price=price)

    none, half, most = (stepped(on(), blocks) for blocks in (0, 23, 45))
    assert none.memory[0].host == 0 < half.memory[0].host < most.memory[0].host
    # The host has all blocks but the last, whose backward comes at once, and the device two.
    a_block = none.price.memory[1].activations
    assert most.memory[0].host == pytest.approx(45 * a_block, rel=0.01)
    assert none.peak_bytes - most.peak_bytes == pytest.approx(43 * a_block, rel=0.03)
    slow = stepped(on(replace(HOST, bandwidth_gb_s=4)), 45)
    stored = sum(stage.store for stage in slow.price.stages)
    assert slow.step_s > 2 * 0.9 * slow.plan.num_microbatches * stored > 2 * most.step_s

    short = replace(task(64, 256), cluster=on(memory_gib=24.0))
    without, taken = (
        search(short, contender, replace(asked, offload_blocks=n), 4).winner for n in (0, "auto")
    )
    assert without
    assert taken
    assert taken.plan.offload_blocks > 0
    assert taken.step_s < without.step_s


def test_megatron_offloads_no_last_layer_and_nothing_beside_recomputation() -> None:
    short = replace(task(64, 256), cluster=on())
    for knobs, why in (
        ({"offload_blocks": 46}, "keeps one layer of 46"),
        ({"offload_blocks": 9, "recompute": "full"}, "offloads nothing where it recomputes"),
    ):
        asked = replace(FSDPKnobs(), shard=64, replicate=1, **knobs)
        assert FSDP.size(short, asked, 1).offload_blocks == knobs["offload_blocks"]
        of_megatron = MegatronFSDPKnobs(shard=64, replicate=1, **knobs)
        with pytest.raises(InfeasibleError, match=why):
            MEGATRON_FSDP.size(short, of_megatron, 1)


def of_megatron(cluster: Cluster, **knobs: Any) -> SimResult:
    asked = replace(ENTRY, **(SIZES | knobs))
    on_it = replace(task(64, 256), cluster=cluster, precision="bf16")
    planned = MEGATRON_CORE.plan(on_it, Candidate(asked, 1))
    planned.check()
    return simulate(planned, cluster)


ENTRY = MegatronCoreKnobs(
    replicate_zero=1, sequence_parallel=True, recompute="none", schedule="1f1b"
)
SIZES: dict[str, Any] = {"tp": 4, "pp": 1, "replicate": 16, "chunks": 1}
PIPELINE: dict[str, Any] = {
    **SIZES,
    "pp": 4,
    "replicate": 4,
    "chunks": 2,
    "schedule": "interleaved_1f1b",
}


def test_megatron_core_sends_attention_or_whole_blocks_where_it_can() -> None:
    shape = task().shape
    # Inputs of the norm and of the product; queries, keys, values and what attention gives; sums.
    a_block = shape.seq * (4 * shape.hidden + 8 * shape.hidden + 4 * shape.heads) / 4
    for way in ("none", "selective"):
        none, sent = (of_megatron(on(), recompute=way, offload_modules=m) for m in MODULES)
        assert sent.memory[0].host == pytest.approx(45 * a_block, rel=1e-3)
        assert none.peak_bytes - sent.peak_bytes == pytest.approx(44 * a_block, rel=0.03)
        assert sent.step_s == pytest.approx(none.step_s, rel=0.01)
    none, sent = (of_megatron(on(), **PIPELINE, offload_modules=module) for module in MODULES)
    freed = none.memory[0].activations - sent.memory[0].activations
    assert 0 < freed < sent.memory[0].host
    slow = on(replace(HOST, bandwidth_gb_s=1))
    assert of_megatron(slow, offload_modules="attention").step_s > 2 * none.step_s
    for refused in (
        {**PIPELINE, "offload_blocks": 3},
        {"offload_blocks": 3, "recompute": "full"},
        {"offload_modules": "attention", "recompute": "full"},
    ):
        with pytest.raises(
            InfeasibleError, match=r"Megatron-Core sends|keeps one|recomputes|leaves nothing"
        ):
            of_megatron(on(), **refused)


MODULES = ("none", "attention")
CHECKPOINTED = DeepSpeedKnobs(
    tp=8, pp=8, replicate=1, recompute="full", recompute_blocks=6, reduce_bucket_size=1
)


@pytest.mark.parametrize(
    ("contender", "asked", "field"),
    [
        (MEGATRON_CORE, replace(ENTRY, **SIZES), "offload_blocks"),
        (MEGATRON_CORE, replace(ENTRY, **PIPELINE), "offload_modules"),
        (DEEPSPEED, CHECKPOINTED, "cpu_checkpointing"),
    ],
)
def test_a_3d_program_has_the_same_link_and_its_search_takes_it(
    contender: Contender[Any], asked: Any, field: str
) -> None:
    on_it = replace(task(64, 256), precision="bf16")

    def fitting(cluster: Cluster, value: Any) -> Any:
        off = {k: v for k, v in WITHOUT_OFFLOAD.items() if hasattr(asked, k)}
        knobs = replace(asked, **off | {field: value})
        return search(replace(on_it, cluster=cluster), contender, knobs, 1).winner

    without, large = fitting(on(memory_gib=1000.0), WITHOUT_OFFLOAD[field]), on(memory_gib=1000.0)
    reserved_gib = 1000.0 - large.device.usable_bytes / 2**30
    short = on(memory_gib=without.peak_bytes / 2**30 + reserved_gib - 0.2)
    assert fitting(short, WITHOUT_OFFLOAD[field]) is None
    taken = fitting(short, "auto")
    assert taken.result.fits(short.device.usable_bytes)
    assert taken.result.memory[0].host > 0.2 * 2**30
    assert any(action.op is Op.LOAD for action in taken.plan.schedule.programs[0])
    assert fitting(replace(short, host=None), "auto") is None
    every = replace(asked, **{name: "auto" for name in WITHOUT_OFFLOAD if hasattr(asked, name)})
    found = search(replace(on_it, cluster=short), contender, every, 1).winner
    assert found
    assert found.step_s <= taken.step_s * 1.005
