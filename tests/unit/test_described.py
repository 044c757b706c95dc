"""What replays have corrected in the descriptions of programs (docs/decisions.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.evidence.traced import described_compute_s
from benchmarks.specification.contenders import PRICED
from tests.unit.simulated_task import cluster, model, task
from zeropp.choose.task import Candidate
from zeropp.price import price_plan
from zeropp.price.cluster import Link
from zeropp.price.kernels import stream_s
from zeropp.price.network import all_reduce_s, gather_s, group, group_of
from zeropp.price.price import work_of
from zeropp.price.simulator import SimResult, simulate


@cache
def described(name: str, microbatch: int = 1, **knobs: Any) -> SimResult:
    contender = PRICED[name]
    return contender.simulated(task(64, 64), Candidate(contender.knobs(**knobs), microbatch))


CHUNKS: dict[str, Any] = {
    "pp": 2,
    "replicate": 32,
    "replicate_zero": 1,
    "schedule": "interleaved_1f1b",
    "chunks": 2,
}


def test_reductions_that_a_backward_hides_slow_compute() -> None:
    result = described("megatron_core", tp=1, **CHUNKS)
    price, plan = result.price, result.plan
    assert all(extras.hidden_replicas > 0 for extras in price.extras)
    free = replace(price, extras=tuple(replace(e, hidden_replicas=0.0) for e in price.extras))
    hidden = sum(price.extras[stage].hidden_replicas for stage in plan.schedule.stages_of(0))
    faster = simulate(plan, task().cluster, price=free)
    less = result.events.busy[0] - faster.events.busy[0]
    assert less == pytest.approx(price.overlap_slowdown * hidden, rel=0.05)


def test_the_first_chunk_is_gathered_before_a_step_of_megatron_core() -> None:
    result = described("megatron_core", tp=1, **CHUNKS)
    cluster, plan = task().cluster, result.plan
    seconds = result.price.stages[0].gather_updated
    parameters = sum(result.price.memory[s].parameters for s in plan.schedule.stages_of(0))
    replicas = group_of(cluster, plan.layout, "replicate")
    half = gather_s(cluster, replicas, parameters) / 2  # one of two chunks
    slowed = half * (1 + result.price.overlap_slowdown)
    assert seconds == pytest.approx(slowed, rel=0.15)


def test_forwards_of_one_group_hide_the_gather_of_megatron_cores_next_chunk() -> None:
    """It is asked for with a group's first forward, of as many microbatches as there are ranks."""
    contender, cluster = PRICED["megatron_core"], task().cluster
    slow = replace(cluster, inter=replace(cluster.inter, bandwidth_gb_s=1.0))
    late = []
    for batch in (64, 512):
        given = replace(task(64, batch), cluster=slow)
        candidate = Candidate(contender.knobs(tp=1, **CHUNKS), 1)
        late.append(contender.simulated(given, candidate).price.stages[0].gather_updated)
    assert late[0] == pytest.approx(late[1])


def test_pipelines_without_chunks_hide_none_of_megatron_cores_gathers() -> None:
    result = described("megatron_core", pp=2, tp=1, replicate=32, replicate_zero=1)
    price, plan = result.price, result.plan
    replicas = group_of(task().cluster, plan.layout, "replicate")
    for stage, memory in zip(price.stages, price.memory, strict=True):
        whole = gather_s(task().cluster, replicas, memory.parameters)
        assert stage.gather_updated == pytest.approx(whole)


def test_megatron_core_waits_for_buckets_that_follow_each_other_closely() -> None:
    """The first products of a block's attention and of its MLP fill one bucket, the two others
    another. Its gather begins when the last product of the block before is to run, and the next
    product needs it."""
    given, contender = task(64, 64), PRICED["megatron_core"]
    given = replace(given, shape=model("gpt_28_3b"), cluster=cluster("h100"))
    shards = {"tp": 4, "replicate": 16, "replicate_zero": 1, "sequence_parallel": True}
    price = contender.simulated(given, Candidate(contender.knobs(pp=1, **shards), 4)).price
    among, h = group(given.cluster, 16, 4, 64), given.shape.hidden
    assert given.shape.ffn == 4 * h  # 12 h^2 parameters per block
    gathered = gather_s(given.cluster, among, 2 * 7 * h * h / 4)
    last_product = price.stages[0].forward / given.shape.layers * price.stragglers * 4 / 12
    late = given.shape.layers * (gathered - last_product)
    hidden = price.memory[0].parameters / among.rate * price.overlap_slowdown
    assert late > 0.02
    assert price.stages[0].gather_updated == pytest.approx(late + hidden, rel=0.2)

    def times(**knobs: Any) -> tuple[float, float]:
        asked = contender.knobs(pp=1, **shards, **knobs)
        first = contender.simulated(given, Candidate(asked, 4)).price.stages[0]
        return first.gather_updated, first.reduce_replicas

    # They are of one model, whether or not the host keeps some blocks. Larger ones wait less, and
    # the last of their reductions hides less.
    assert times(offload_blocks=1) == pytest.approx(times(), rel=0.05)
    assert times(bucket_size=100_000_000)[0] < 0.7 * times()[0]
    large = {"bucket_size": 10**9}
    assert times(offload_blocks=1, **large) == pytest.approx(times(**large), rel=0.02)
    assert times(**large)[1] > 4 * times()[1]


ZERO2: dict[str, Any] = {"pp": 1, "tp": 2, "replicate": 32, "replicate_zero": 2}
ZERO2 |= {"reduce_dtype": "bf16", "reduce_bucket_size": 50_000_000}


def test_deepspeed_waits_for_one_reduction_before_the_bias_that_follows_it() -> None:
    """Both matrices of an MLP are larger than a bucket. The bias of the first one in the model
    comes with its matrix, after the other one's reduction has begun, and no compute lies between
    them."""
    result = described("deepspeed", **ZERO2)
    cluster, plan = task().cluster, result.plan
    replicas = group_of(cluster, plan.layout, "replicate")
    matrix = plan.shape.hidden * plan.shape.ffn / plan.layout.tp
    assert matrix > work_of(plan, cluster).program.state("bf16").bucket
    each = all_reduce_s(cluster, replicas, 2 * matrix)
    assert result.price.stages[0].reduce_replicas > plan.shape.layers * each


def test_deepspeed_divides_gradients_where_a_backward_has_copied_them() -> None:
    """With ZeRO-2: on a network that takes no time the divisions of the last two buckets are left,
    in 16 bits. One is the embedding's, the other as large at most as a bucket."""
    asked = task(64, 64)
    fast = Link(bandwidth_gb_s=1e12, latency_us=0.0, hop_us=0.0)
    cluster = replace(asked.cluster, intra=fast, inter=fast)
    shape = replace(asked.shape, ffn=2 * asked.shape.hidden)  # all matrices fit into a bucket
    contender = PRICED["deepspeed"]
    knobs = contender.knobs(**ZERO2)
    plan = contender.simulated(
        replace(asked, cluster=cluster, shape=shape), Candidate(knobs, 1)
    ).plan
    work = work_of(plan, cluster)
    table = shape.vocab * shape.hidden / plan.layout.tp
    seconds = price_plan(plan, cluster).stages[0].reduce_replicas
    least, most = (
        stream_s(work.device, 2 * 2 * elements)
        for elements in (table, table + work.program.state("bf16").bucket)
    )
    assert least < seconds < most


def test_described_compute_has_no_collectives_but_the_update() -> None:
    """As a replay counts it: what tensor parallelism and ZeRO-2 send is no kernel. If collectives
    slow no compute, the kernels take the same on a network that takes no time."""
    asked = task(64, 64)
    device = replace(asked.cluster.device, overlap_slowdown=0.0)
    slow = replace(asked.cluster, device=device)
    link = Link(bandwidth_gb_s=1e12, latency_us=0.0, hop_us=0.0)
    free = replace(slow, intra=link, inter=link)
    knobs = PRICED["deepspeed"].knobs(pp=1, tp=2, replicate=32, replicate_zero=2)
    here, alone = (
        PRICED["deepspeed"].simulated(replace(asked, cluster=each), Candidate(knobs, 1))
        for each in (slow, free)
    )
    kernels = alone.events.busy[0] + alone.price.stages[0].update
    assert here.events.busy[0] > 1.15 * kernels
    assert described_compute_s(here) == pytest.approx(kernels, rel=0.01)
