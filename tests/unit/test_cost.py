"""The cost model: orders that physics fixes, figures that others published, known small cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.deepspeed_3d.zero3 import DEEPSPEED_ZERO3, Zero3Knobs
from benchmarks.specification.reading import preset
from tests.unit.shapes import gpt
from tests.unit.simulated_task import cluster
from zeropp.choose.task import Candidate, Task
from zeropp.price import PlanPrice, balanced_cuts, parameter_count, price_plan
from zeropp.price.activations import block_kept
from zeropp.price.cluster import Cluster
from zeropp.price.kernels import alignment_efficiency, fused_attention_s, matmul_s, stream_s
from zeropp.price.network import all_reduce_s, gather_s, group_of
from zeropp.price.pieces import Work, attention_s, loss_bytes
from zeropp.price.price import stragglers, work_of
from zeropp.price.programs import (
    Program,
    Selective,
    StateBytes,
    Updated,
    program_as_run,
    program_named,
)
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import loop_placement, unordered
from zeropp.types.layout import InfeasibleError, Layout
from zeropp.types.literals import Recompute, ReduceEvery, ReplicateZero
from zeropp.types.operators import Attention
from zeropp.types.shape import ModelShape

CONF = Path(__file__).resolve().parents[2] / "conf"
GPT = gpt(8, 1024, 16, seq=1024)
LLAMA = replace(GPT, name="llama", family="llama", kv_heads=4, ffn=2816)
TIMES = ("forward", "backward_input", "backward_weight")


A100 = cluster("a100")


def plan(shape: ModelShape = GPT, microbatch: int = 2, **layout: object) -> SizedPlan:
    """A plan whose order is not chosen: the price needs none."""
    made = Layout(**layout)  # type: ignore[arg-type]
    stages = made.pp * made.chunks
    schedule = unordered("1f1b", loop_placement(made.pp, made.chunks), 8)
    cuts = balanced_cuts(shape, stages)
    return SizedPlan(
        contender="zeropp",
        shape=shape,
        layout=made,
        microbatch_size=microbatch,
        schedule=schedule,
        cuts=cuts,
        program="zeropp",
        precision="bf16",
    )


@pytest.mark.parametrize("path", sorted((CONF / "cluster").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_cluster_prices_a_plan(path: Path) -> None:
    price = price_plan(plan(pp=2, shard=2), cluster(path.stem))
    assert all(getattr(cost, name) > 0 for cost in price.stages for name in TIMES)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt_175b", 174.6), ("gpt_76b", 76.1), ("llama_8b", 8.03), ("llama_70b", 70.6),
     ("llama_405b", 405.9)],
)  # fmt: skip
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert parameter_count(preset("model", name, ModelShape)) / 1e9 == pytest.approx(
        billions, rel=0.01
    )


@given(st.integers(1, 64), st.sampled_from([GPT, LLAMA]))
def test_a_larger_microbatch_takes_longer_but_not_more_a_token(
    size: int, shape: ModelShape
) -> None:
    small = price_plan(plan(shape, size), A100).stages[0]
    large = price_plan(plan(shape, 2 * size), A100).stages[0]
    for name in TIMES:
        assert getattr(small, name) < getattr(large, name) * 1.001
        assert getattr(large, name) < getattr(small, name) * 2.2  # tiles may fill a wave worse


@given(st.sampled_from([2, 4, 8]), st.sampled_from([GPT, LLAMA]))
def test_shards_shrink_what_is_resident(shard: int, shape: ModelShape) -> None:
    whole = price_plan(plan(shape), A100).memory[0]
    split = price_plan(plan(shape, shard=shard), A100).memory[0]
    for name in ("parameters", "optimizer", "gradients"):
        assert getattr(split, name) == pytest.approx(getattr(whole, name) / shard, abs=shard)
    assert split.unsharded == whole.unsharded > 0  # in bf16 even one rank computes on copies
    assert split.activations == whole.activations


def test_recomputation_trades_activations_for_time() -> None:
    kept = price_plan(plan(), A100)
    again = price_plan(replace(plan(), recompute="full"), A100)
    assert again.memory[0].activations < kept.memory[0].activations / 2  # the head keeps its part
    assert again.stages[0].backward_input > kept.stages[0].backward_input
    assert again.stages[0].forward == kept.stages[0].forward


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole() -> None:
    tensor = price_plan(plan(tp=4), A100)
    both = price_plan(plan(tp=4, sequence_parallel=True), A100)
    assert both.memory[0].activations < tensor.memory[0].activations
    extras = tensor.extras[0]
    assert min(extras.tensor_forward, extras.tensor_backward) > 0.0
    assert price_plan(plan(), A100).extras[0].exposed == 0.0


def test_zero1_splits_the_optimizer_over_replicas() -> None:
    plain = price_plan(plan(replicate=4), A100)
    split = price_plan(plan(replicate=4, replicate_zero=1), A100)
    assert split.memory[0].optimizer * 4 == pytest.approx(plain.memory[0].optimizer, abs=4)
    assert split.stages[0].reduce_replicas < plain.stages[0].reduce_replicas
    assert split.stages[0].gather_updated > 0.0 == plain.stages[0].gather_updated


@pytest.mark.parametrize(("side", "share"), [(1376, 1.0), (1800, 0.5), (1801, 0.5)])
def test_products_lose_rate_where_a_side_is_no_multiple_of_32(side: int, share: float) -> None:
    """``product_times.csv`` has products with a side of 1,376 = 43 x 32, at the whole rate."""
    assert alignment_efficiency(8192, side, 8192) == share


def test_fsdp2_adds_no_gradient_of_the_first_microbatch_to_a_sum() -> None:
    """It reduces one microbatch's gradients as they are, and casts the first of several."""

    def moved(
        microbatches: int, program: str = "fsdp", reduce_every: ReduceEvery = "step"
    ) -> float:
        order = unordered("accumulation", (0,) * GPT.num_pieces, microbatches, 1)
        mine = replace(
            plan(shard=4), schedule=order, cuts=tuple(range(GPT.num_pieces + 1)), program=program,
            reduce_every=reduce_every,
        )  # fmt: skip
        return work_of(mine, A100).accumulated

    assert moved(1) == moved(4, reduce_every="unit") == 0.0
    assert moved(4) == (6 + 3 * 10) / 4
    assert moved(1, program="zeropp") == moved(4, program="zeropp") == 6


def test_a_plan_has_the_price_of_its_program_and_an_unknown_program_is_refused() -> None:
    known = plan(pp=2, tp=2)
    assert price_plan(known, A100) != price_plan(replace(known, program="deepspeed_3d"), A100)
    message = r"program='fsdp3': not registered .known: .*torchtitan_compiled, zero_bubble"
    with pytest.raises(ValueError, match=message):
        price_plan(replace(known, program="fsdp3"), A100)


def test_one_shard_pays_for_the_copies_of_mixed_precision_alone() -> None:
    (bf16,) = price_plan(plan(), A100).stages
    assert bf16.unshard > 0  # a cast beside compute
    assert bf16.copy_out == 0
    assert bf16.copy_in > 0  # the buffer of gradients is cleared
    assert bf16.reduce_grad == 0
    (fp32,) = price_plan(replace(plan(), precision="fp32"), A100).stages
    assert (fp32.unshard, fp32.copy_out, fp32.copy_in) == (0, 0, 0)


def test_gathers_and_copies_grow_as_they_must() -> None:
    inside, outside = (price_plan(plan(shard=shard, pp=2), A100).stages[0] for shard in (8, 32))
    assert outside.unshard > 1.4 * inside.unshard  # NICs are slower than NVLink
    assert outside.copy_out == inside.copy_out == 0  # flat buffers are not copied


def test_a_transfer_shares_the_network_with_gathers() -> None:
    shared = price_plan(plan(pp=2, shard=4), A100).stages[0].transfer  # both inside a node
    alone = price_plan(plan(pp=2, replicate=4), A100).stages[0].transfer
    latency = A100.intra.latency_us * 1e-6
    assert shared - latency == pytest.approx(2 * (alone - latency))


def test_backward_of_attention() -> None:
    fused = work(flash=True)
    ramp = A100.device.kernel_us * 1e-6
    assert attention_s(fused, backward=True) - ramp == pytest.approx(
        2.5 * (attention_s(fused) - ramp)
    )
    unfused = work(flash=False, dropout_masks=True)
    assert attention_s(unfused) < attention_s(unfused, backward=True) < 2.5 * attention_s(unfused)
    assert attention_s(unfused) > attention_s(work(flash=False)) > attention_s(fused)


def test_causal_attention_computes_half_and_the_tiles_on_the_diagonal() -> None:
    asked = Attention(heads=32, queries=2048, keys=2048, width=128, causal=True)
    device = replace(A100.device, kernel_us=0.0)
    half, whole = (
        fused_attention_s(device, "bf16", replace(asked, causal=causal)) for causal in (True, False)
    )
    assert half / whole == pytest.approx((2048 + 128) / (2 * 2048))


def test_deepspeed_pays_for_what_it_does_not_overlap() -> None:
    mine = replace(plan(pp=2, replicate=8, replicate_zero=1), program="deepspeed_3d")
    deepspeed = price_plan(mine, A100)
    best = price_plan(replace(mine, program="best_public_3d"), A100)
    in_the_open = deepspeed.stages[0].reduce_replicas  # and an all-reduce
    assert in_the_open > 1.9 * best.stages[0].reduce_replicas
    assert deepspeed.stages[0].backward_weight > best.stages[0].backward_weight  # adds apart
    assert deepspeed.stages[0].transfer == 0 < best.stages[0].transfer  # in line with compute
    tied = sum(price.extras[0].tensor_forward for price in (deepspeed, best))
    assert tied == 0.0  # so that its transfer, which is in line, is all that a forward adds
    assert deepspeed.extras[0].transfer_forward > 0 == best.extras[0].transfer_forward


def without_pipeline(name: str, microbatches: int, zero: ReplicateZero = 1) -> PlanPrice:
    mine = plan(replicate=16, replicate_zero=zero)
    schedule = unordered("1f1b", (0,), microbatches)
    return price_plan(replace(mine, schedule=schedule, program=name), A100)


def test_deepspeed_without_a_pipeline_hides_its_reduction() -> None:
    names = ("deepspeed_ordinary", "deepspeed_zero1+bf16.bucket=50000000")
    open_, hidden = (without_pipeline(name, 4) for name in names)
    (behind,), (beside,) = open_.stages, hidden.stages
    backward = beside.backward_input + beside.backward_weight
    assert behind.reduce_replicas < backward  # so that it can be hidden
    assert beside.reduce_replicas < 0.5 * behind.reduce_replicas
    assert beside.backward_weight < behind.backward_weight  # adds in bf16
    # Its sums have two bytes instead of four, but gradients also stand in buckets.
    less = open_.memory[0].gradients - hidden.memory[0].gradients
    assert 2 * less == open_.memory[0].gradients
    state = program_named(names[1]).state("bf16")
    assert hidden.memory[0].parameters - open_.memory[0].parameters >= 2 * 2 * state.bucket
    assert open_.resident_gradients > hidden.resident_gradients


def test_zero2_shards_the_sums_and_reduces_every_microbatch() -> None:
    one, four = (without_pipeline("deepspeed_zero2", m, zero=2) for m in (1, 4))
    first = without_pipeline("deepspeed_zero1", 1)
    assert one.memory[0].gradients == pytest.approx(2 * first.memory[0].gradients / 16, rel=1e-6)
    assert one.extras[0].reductions == 0
    assert four.stages[0].reduce_replicas == one.stages[0].reduce_replicas
    earlier = 4 * four.extras[0].reductions  # those of three microbatches
    assert earlier == pytest.approx(3 * four.stages[0].reduce_replicas)
    more = four.stages[0].backward_weight - one.stages[0].backward_weight
    assert more == pytest.approx(four.extras[0].reductions)


def test_gradients_that_are_added_in_16_bits_are_joined_and_cast_before_an_update() -> None:
    mine = plan(replicate=16, replicate_zero=1)
    joins = program_named("deepspeed_zero1")
    both = [
        price_plan(mine, A100, replace(joins, joins_gradients=v, gradient_passes=0))
        for v in (True, False)
    ]
    more = both[0].stages[0].update - both[1].stages[0].update
    updated = both[0].memory[0].gradients / 2 / 16
    # Scaled, joined and cast, instead of scaled in fp32.
    assert more == pytest.approx(stream_s(A100.device, (4 * 2 + 2 + 4 - 2 * 4) * updated, 0))


def test_blocks_that_are_not_compiled_move_more_bytes_if_they_rotate() -> None:
    def forwards(shape: ModelShape, name: str) -> list[float]:
        mine = replace(plan(shape, pp=2), program=name)
        both = (price_plan(replace(mine, compile=c), A100) for c in (False, True))
        return [price.stages[0].forward for price in both]

    eager, compiled = forwards(LLAMA, "zeropp")
    assert eager > 1.03 * compiled
    for shape, name in ((LLAMA, "megatron_core"), (GPT, "zeropp")):
        eager, compiled = forwards(shape, name)  # fused without torch.compile, or nothing to fuse
        assert eager == compiled


def test_torch_computes_all_but_the_last_product_again() -> None:
    full = replace(plan(), recompute="full")
    whole, stops = (
        price_plan(full, A100, program(stops_recomputing=s)).stages[0] for s in (False, True)
    )
    last = matmul_s(A100.device, "bf16", m=2 * GPT.seq, k=GPT.ffn, n=GPT.hidden)
    less = whole.backward_input - stops.backward_input
    assert less == pytest.approx(GPT.layers * last)


def test_a_head_that_is_not_delayed_moves_its_weight_gradient_into_the_backward() -> None:
    late, soon = (
        price_plan(plan(pp=2), A100, program(delays_ends=delays)).stages[1]
        for delays in (True, False)
    )
    head = matmul_s(A100.device, "bf16", m=GPT.hidden, k=2 * GPT.seq, n=GPT.vocab)
    moved = late.backward_weight - soon.backward_weight
    assert head < moved < 1.3 * head  # with its sum and its norm's weight
    assert soon.backward_input - late.backward_input == pytest.approx(moved)
    assert soon.forward == late.forward


@pytest.mark.parametrize("compiled", [False, True])
def test_contenders_on_torch_stop_before_the_last_product(compiled: bool) -> None:
    for name in ("zeropp", "fsdp", "torch_pp", "deepspeed_3d"):
        as_run = program_as_run(name, compiled=compiled)
        assert as_run.stops_recomputing
        assert as_run.delays_ends == (name != "zeropp")  # of those with split backwards: torch PP


@pytest.mark.parametrize("sliced", [False, True])
def test_what_is_not_computed_again_is_not_summed_again(sliced: bool) -> None:
    mine = replace(plan(tp=2, sequence_parallel=sliced), recompute="full")

    half = matmul_s(A100.device, "bf16", m=2 * GPT.seq, k=GPT.ffn // 2, n=GPT.hidden)
    summed_s = gather_s if sliced else all_reduce_s
    size = 2 * GPT.seq * GPT.hidden * 2  # bytes of the hidden states of two sequences
    summed = summed_s(A100, group_of(A100, mine.layout, "tp"), size)
    whole, stops = (priced(mine, stops_recomputing=stops) for stops in (False, True))
    less = whole.stages[0].backward_input - stops.stages[0].backward_input
    assert less == pytest.approx(GPT.layers * (half + summed))
    recomputation = whole.extras[0].recomputation - stops.extras[0].recomputation
    assert recomputation == pytest.approx(GPT.layers * half)


def test_torch_computes_gradients_of_biases_with_those_of_weights() -> None:
    ours, torchs = (
        price_plan(replace(plan(pp=2), program=name), A100, program(torch_stages=stages)).stages[0]
        for name, stages in (("zeropp", False), ("zeropp", True))
    )
    assert torchs.backward_weight > ours.backward_weight
    assert torchs.compute == pytest.approx(ours.compute)


def test_biases_behind_a_sum_over_ranks_are_added_apart() -> None:
    def forward(tp: int, **traits: bool) -> float:
        return priced(plan(tp=tp), separate_projections=True, **traits).stages[0].forward

    assert forward(1, separate_biases=True) == forward(1)
    hidden = 2 * GPT.seq * GPT.hidden * 2  # bytes of the hidden states of two sequences
    each = stream_s(A100.device, 2 * hidden)
    assert forward(2, separate_biases=True) - forward(2) == pytest.approx(2 * GPT.layers * each)


def test_updated_parameters_sent_in_parts_cost_more_the_more_ranks_there_are() -> None:
    def after(updated: Updated, replicas: int) -> float:
        mine = plan(replicate=replicas, replicate_zero=1)
        return priced(mine, updated=updated).stages[0].gather_updated

    for updated in ("broadcasts", "slices"):
        few, many = (after(updated, n) - after("gather", n) for n in (8, 512))
        assert 0 < 30 * few < many


def test_a_job_of_many_nodes_waits_for_the_slowest_which_costs_what_nvidia_measured() -> None:
    assert stragglers(A100, 8) == 1.0
    assert 1.0 < stragglers(A100, 64) < stragglers(A100, 4096) < 1.1
    # results/published/nvidia_dgxc_h100.csv: 1 to 5 % from 16 to 256 nodes, 2 % from 2 to 16
    assert 1.01 < stragglers(A100, 2048) / stragglers(A100, 128) < 1.05
    assert 1.01 < stragglers(A100, 128) / stragglers(A100, 16) < 1.03


def test_writing_a_product_weighs_more_the_smaller_its_inner_side() -> None:
    hidden = replace(A100.device, exposed_output=0.0)

    def slower(k: int) -> float:
        open_s, hidden_s = (
            matmul_s(device, "bf16", m=4096, k=k, n=4096) for device in (A100.device, hidden)
        )
        return open_s / hidden_s

    assert 1.0 < slower(8192) < 1.03 < 1.1 < slower(512)


def test_the_loss_moves_what_its_program_s_kernels_read_and_write() -> None:
    assert loss_bytes(program(fused_loss=True), "bf16") == (2, 4)
    assert loss_bytes(program(loss_gradient="torch"), "bf16") == (14, 22)
    assert loss_bytes(program(), "bf16") == (38, 14)


def test_selective_recomputation_costs_what_its_program_makes_again() -> None:
    def backward(recompute: Recompute, selective: Selective) -> float:
        mine = replace(plan(), recompute=recompute)
        return priced(mine, selective=selective).stages[0].backward_input

    assert backward("selective", "scores") == backward("none", "scores")  # they are never in memory
    elementwise, half, mlp, qkv_out, qkv = (
        backward("selective", kind) for kind in ("elementwise", "half", "mlp", "qkv_out", "qkv")
    )
    assert backward("none", "half") < elementwise < half < backward("full", "half")
    assert elementwise < mlp < min(qkv_out, backward("full", "mlp"))
    assert qkv_out < qkv < backward("full", "qkv")


def test_recomputed_mlps_run_one_of_two_tensor_parallel_sums_again() -> None:
    def backward(recompute: Recompute) -> float:
        mine = replace(plan(tp=4), recompute=recompute)
        return priced(mine, selective="mlp").extras[0].tensor_backward

    full = backward("full") - backward("none")
    assert backward("selective") - backward("none") == pytest.approx(full / 2)
    assert full > 0


def test_recomputed_mlps_keep_neither_their_tensors_nor_their_norm_s_output() -> None:
    """arXiv 2205.05198, section 4.1: of 34 s b h bytes without dropout's masks and the attention's
    scores, an MLP's two tensors of 4 h and the norm's output of h have 18."""
    shape = replace(GPT, ffn=4 * GPT.hidden)

    def kept(recompute: Recompute) -> float:
        mine = replace(plan(), shape=shape, recompute=recompute)
        return block_kept(work_of(mine, A100, program(selective="mlp")))

    tokens = plan().microbatch_size * shape.seq
    assert kept("none") - kept("selective") == 18 * tokens * shape.hidden


def test_a_loss_that_is_not_split_gathers_the_logits_on_the_last_stage() -> None:
    def stages(**traits: object) -> tuple[float, float]:
        first, last = priced(plan(pp=2, tp=4), **traits).stages
        return first.forward, last.forward

    split, whole = stages(), stages(vocab_parallel=False)
    assert whole[0] == split[0]
    assert whole[1] > 1.05 * split[1]
    alone = plan(pp=2)
    assert priced(alone, vocab_parallel=False) == priced(alone)  # there is nothing to gather


def test_two_input_layers_of_a_gated_mlp_reduce_their_input_gradients_apart() -> None:
    def backward(shape: ModelShape, *, split: bool, sequence_parallel: bool = False) -> float:
        mine = plan(shape, tp=4, sequence_parallel=sequence_parallel)
        return priced(mine, split_gate=split).extras[0].tensor_backward

    assert backward(LLAMA, split=True) > 1.4 * backward(LLAMA, split=False)
    assert backward(GPT, split=True) == backward(GPT, split=False)
    gathered = [backward(LLAMA, split=split, sequence_parallel=True) for split in (True, False)]
    assert gathered[0] == gathered[1]


def program(**traits: object) -> Program:
    state = StateBytes(2, 4, 12)
    return Program(name="mine", bf16=state, fp32=state, **traits)  # type: ignore[arg-type]


def priced(mine: SizedPlan, **traits: object) -> PlanPrice:
    return price_plan(mine, A100, program(**traits))


def work(**traits: Any) -> Work:
    return Work(
        shape=GPT,
        device=A100.device,
        program=program(**traits),
        precision="bf16",
        recompute="none",
        microbatch=2,
        tp=1,
        sequence_parallel=False,
        accumulated=6,
    )


def test_a_second_copy_saves_gathers_beyond_the_node_and_takes_memory() -> None:
    slow = replace(preset("cluster", "a800", Cluster), nics_per_node=1)
    shape = preset("model", "gpt_14_6b", ModelShape)
    steps = {}
    for microbatches in (1, 4):
        task = Task(shape=shape, cluster=slow, num_gpus=64, global_batch=64 * microbatches)
        for ranks in (1, 8):
            knobs = Zero3Knobs(shard=64, zero_hpz_partition_size=ranks)
            steps[microbatches, ranks] = DEEPSPEED_ZERO3.simulated(task, Candidate(knobs, 1))
    more = steps[1, 8].peak_bytes - steps[1, 1].peak_bytes
    assert more == pytest.approx(2 * parameter_count(shape) / 8, rel=0.01)
    gains = [steps[m, 1].step_s / steps[m, 8].step_s for m in (1, 4)]
    assert 1.1 < gains[0] < gains[1]  # of later microbatches the forwards, too
    with pytest.raises(InfeasibleError, match=r"zero_hpz_partition_size=5: must divide the 64"):
        DEEPSPEED_ZERO3.size(task, Zero3Knobs(shard=64, zero_hpz_partition_size=5), 1)


def test_logits_in_slices_move_the_head_into_the_backward() -> None:
    shape = replace(LLAMA, vocab=128_000)
    of = [replace(plan(shape, 4, pp=2), logits_slices=n, program="zeropp") for n in (1, 8, 64)]
    whole, few, many = (price_plan(one, A100) for one in of)
    assert whole.stages[0] == few.stages[0]
    assert whole.memory[0] == few.memory[0]
    tokens, device = 4 * shape.seq, A100.device
    head_s = matmul_s(device, "bf16", m=tokens, k=shape.hidden, n=shape.vocab)
    moved = whole.stages[1].forward - few.stages[1].forward
    assert head_s < moved < 4 * head_s  # with norm and loss
    more = [price.stages[1].compute - whole.stages[1].compute for price in (few, many)]
    # Every slice reads and writes the sum of the weight's gradients, in fp32.
    added = 6 * shape.vocab * shape.hidden / device.memory_bandwidth_gb_s / 1e9
    assert 7 * added < more[0] < 0.3 * whole.stages[1].compute
    assert more[1] > more[0] + 56 * added


def test_logits_in_slices_exist_one_after_another() -> None:
    shape = replace(LLAMA, vocab=128_000)
    of = [replace(plan(shape, 4, pp=2), logits_slices=n, program="zeropp") for n in (1, 4, 8)]
    whole, four, eight = (price_plan(one, A100).memory[1] for one in of)
    hidden, logits = (4 * shape.seq * width * 2 for width in (shape.hidden, shape.vocab))
    assert whole.activations - four.activations == hidden + logits
    assert four.forward < whole.forward - 2 * logits
    # In 16 bits logits and their gradient, and three tensors of the loss in fp32.
    for memory, slices in ((four, 4), (eight, 8)):
        inside = memory.backward_input - memory.activations - hidden
        assert inside == pytest.approx((2 + 3 * 2) * logits / slices, rel=1e-3)
