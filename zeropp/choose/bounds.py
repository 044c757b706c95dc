"""Lower bounds of a plan's step time and memory, with which the tuner avoids simulations.

They are bounds for every order of actions that the contenders' planners make; tests compare them
with the simulator for all contenders, over drawn tasks. They need only a plan whose order is not
chosen yet, and its price.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zeropp.price import StepBytes, StepTimes
from zeropp.price.peak_memory import TOO_MANY, always_held, needed_bytes
from zeropp.price.plan_price import StageMemory
from zeropp.price.programs import gathers, program_named
from zeropp.price.simulator import slowed_cost
from zeropp.schedule.event_loop import run_within
from zeropp.schedule.passes import with_collectives
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import (
    NEEDS_PARAMETERS,
    Action,
    Op,
    RankProgram,
    Schedule,
    StageCost,
)
from zeropp.types.frozen import replace

_SPLIT = frozenset({"zeropp", "zb_h1", "interleaved_zb", "zbv", "dualpipev"})


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of a microbatch that waits for nothing. Lists have one entry per stage; ``backward``
    is a full backward if weight gradients do not wait, and otherwise an input gradient."""

    to: list[float]  # from the step's start to the stage
    back: list[float]  # from the end of its backward at the stage to that at stage 0
    turn: float  # from the step's start to the end of its last forward
    backward: list[float]
    weight: list[float]  # weight gradients that wait

    def held_s(self, stage: int) -> float:
        """The seconds for which a stage holds the activations of one microbatch at least: from its
        forward there to the end of its weight gradient."""
        forwards, backwards = self.turn - self.to[stage], self.back[-1] - self.back[stage]
        return forwards + self.backward[-1] + backwards + self.weight[stage]

    def first_backward_s(self, stage: int) -> float:
        """The seconds until the first backward of a stage may begin: it has come through all
        stages, and back."""
        turned = self.turn + self.backward[-1] + self.back[-1]
        return turned - self.back[stage] - self.backward[stage]

    @classmethod
    def of(cls, plan: SizedPlan, price: StepTimes) -> Latency:
        """The latencies of a priced plan."""
        ranks, split, costs = plan.schedule.stage_rank, splits(plan), price.stages
        backward = [c.backward_input + (0.0 if split else c.backward_weight) for c in costs]
        weight = [c.backward_weight if split else 0.0 for c in costs]
        to, back = [first_gather_s(plan, price, 0)], [0.0]
        for stage, (here, there) in enumerate(pairwise(ranks)):
            hop = costs[stage].transfer if here != there else 0.0
            to.append(to[-1] + costs[stage].forward + hop)
            back.append(back[-1] + hop + backward[stage])
        return cls(
            to=to,
            back=back,
            turn=to[-1] + costs[-1].forward,
            backward=backward,
            weight=weight,
        )


def splits(plan: SizedPlan) -> bool:
    """Whether input gradients do not wait for weight gradients."""
    is_delayed = plan.split_backward or plan.merged_microbatches > 1
    return plan.schedule.name in _SPLIT and is_delayed


def first_gather_s(plan: SizedPlan, price: StepTimes, stage: int) -> float:
    """The least seconds until a stage can be used for the first time."""
    return price.stages[stage].unshard if plan.layout.shards > 1 else 0.0


def least_bytes(plan: SizedPlan, held: StepBytes) -> int:
    """The least peak of the fullest rank in bytes: in the forward that fills its memory, or when
    the optimizer has all gradients; more than any device has where the host's memory is too
    small."""
    worst = 0
    for rank in range(plan.schedule.num_ranks):
        memory = [held.memory[s] for s in plan.schedule.stages_of(rank)]
        if _least_stored(plan, [m.sent for m in memory]) > held.host_limit:
            return TOO_MANY
        gradients = sum(m.gradients for m in memory)
        unreduced = [m.unsharded_gradients for m in memory]
        filled = max(_filling_bytes(plan, held, rank), _least_gradients(plan, unreduced))
        later = 0 if held.resident_gradients else gradients  # those for the optimizer
        worst = max(worst, always_held(plan, held, rank).total + max(filled, later))
    return worst


def _least_stored(plan: SizedPlan, sent: Sequence[int]) -> int:
    """The least bytes that wait in the host's memory when a rank's last chunk turns, by what each
    of its stages sends of a microbatch: those of a unit, except what turns at once. Orders without
    units have no bound."""
    if plan.schedule.name not in ("zeropp", "accumulation"):
        return 0
    unit = min(plan.schedule.unit, plan.num_microbatches)
    return unit * sum(sent[: _stored(plan, len(sent))])


def _stored(plan: SizedPlan, chunks: int) -> int:
    """The first chunks of a rank from which everything that is sent is stored. Of the last one,
    nothing may be, and of a lone microbatch that of the chunk before turns as soon."""
    lone = 1 in (plan.schedule.unit, plan.num_microbatches % plan.schedule.unit)
    return max(0, chunks - 1 - lone)


def least_of_family(first: SizedPlan, held: StepBytes) -> int:
    """The least bytes of every member of a family; ``first`` has the smallest unit of them. What
    may be less in other members is left out: gradients that wait for the end of a step, and all but
    one of the activations of a rank's last chunk. Where units are larger, a cap that was asked for
    leaves room for fewer of these."""
    return least_bytes(replace(first, activation_cap=0, reduce_every="unit"), held)


def least_of_alike(first: SizedPlan, held: StepBytes) -> int:
    """The least bytes of every plan that differs from ``first`` in how data-parallel ranks are used
    (and, as above, in unit and cap): those of activations, temporaries and messages, and what is
    gathered and summed of flat chunks, which is no less with other numbers of shards."""
    kinds = ["parameters", "optimizer", "gradients"]
    if not program_named(first.program).flat_chunks:
        kinds += ["unsharded", "unsharded_gradients"]
    none = dict.fromkeys(kinds, 0)
    # Equal stages share one object, and do so here.
    new = {id(of): replace(of, **none) for of in {id(of): of for of in held.memory}.values()}
    return least_of_family(first, replace(held, memory=tuple(new[id(of)] for of in held.memory)))


def _filling_bytes(plan: SizedPlan, held: StepBytes, rank: int) -> int:
    """The least bytes in the forward that fills a rank's memory, before its first backward."""
    ranks, stages = plan.schedule.stage_rank, plan.schedule.stages_of(rank)
    memory = [held.memory[s] for s in stages]
    gathered = min(m.unsharded + m.forward - m.activations + m.sent for m in memory)
    if not held.torch_runtime:
        sizes = [m.activations - m.sent for m in memory]
        filled = _least_activations(plan, rank, sizes) + gathered
        return max(filled, _turning_bytes(plan, memory) if plan.schedule.name == "zeropp" else 0)
    # Torch's pipelining has a permanent buffer for every message of a step, in which the inputs of
    # stages are kept, and keeps its 16-bit copies of all chunks if there is nothing to gather.
    neighbours = [other for s in stages for other in (s - 1, s + 1) if 0 <= other < len(ranks)]
    messages = sum(ranks[other] != rank for other in neighbours) * plan.num_microbatches
    sizes = [m.activations - m.boundary * (s > 0) for s, m in zip(stages, memory, strict=True)]
    kept = messages * memory[0].boundary + _least_activations(plan, rank, sizes)
    if plan.layout.shards > 1:
        return kept + gathered
    shared = {0, plan.schedule.num_stages - 1} if held.shared_ends else set()
    copies = sum(m.unsharded for s, m in zip(stages, memory, strict=True) if s not in shared)
    copies += held.memory[0].unsharded if shared else 0
    return kept + copies + min(m.forward - m.activations for m in memory)


def _turning_bytes(plan: SizedPlan, memory: list[StageMemory]) -> int:
    """The least bytes at the first backward of a rank's last two chunks: all of a unit is held in
    the chunks before, and the last one's gradients may be on their way."""
    split, most = splits(plan), 0
    sums = [m.early_gradients if split else m.unsharded_gradients for m in memory]
    before, copied = 0, 0
    for chunk in range(len(memory) - 1, max(-1, len(memory) - 3), -1):
        m = memory[chunk]
        others = sum(other.activations - other.sent for other in memory[:chunk])
        before = plan.schedule.unit * others
        own = max(m.backward_input, m.activations) if split else m.full_backward
        if chunk < len(memory) - 1:  # all microbatches of the unit are still held here
            before += (plan.schedule.unit - 1) * (m.activations - m.sent)
        most = max(most, before + own + m.unsharded + sums[chunk] + copied)
        one_buffer = plan.gradient_parts > 1
        copied = min(m.early_gradients if one_buffer else sums[chunk], m.reduction_copy)
    return most


def _least_gradients(plan: SizedPlan, sizes: list[int]) -> int:
    """The bytes of unsharded gradients that are held together at least once; ``sizes`` are per
    chunk. Weight gradients come unit by unit. So gradients that are reduced once per step exist in
    all chunks before the first reduction; otherwise those of one chunk come while the copy of the
    chunk before is reduced. A rank with one chunk, or whose chunks share one buffer, has freed the
    copy by then."""
    if plan.reduce_every == "step" and plan.num_units > 1:
        return sum(sizes)
    return max(sizes) + (min(sizes) if len(sizes) > 1 and plan.gradient_parts == 1 else 0)


def largest_cap(plan: SizedPlan, held: StepBytes, limit_bytes: int) -> int:
    """The largest activation cap, at most the plan's, up to which the first rank of a ZeroPP plan
    can fill its memory; 0 if there is none. A rank whose order reaches no cap has the order of a
    smaller one."""
    memory = [held.memory[s] for s in plan.schedule.stages_of(0)]
    gathered = min(m.unsharded + m.forward - m.activations for m in memory)
    room = limit_bytes - always_held(plan, held, 0).total - gathered
    split = splits(plan)
    sizes = [
        min(m.activations - m.sent, m.deferred) if split else m.activations - m.sent for m in memory
    ]
    caps = range(plan.activation_cap + 1)
    return bisect_right(caps, room, lo=1, key=lambda cap: _least_live(plan, sizes, cap)) - 1


def _least_live(plan: SizedPlan, sizes: list[int], cap: int) -> int:
    """The least bytes of ``cap`` live chunk-activations of a rank: those of its first forwards
    without those of its first weight gradients. In units, forwards go through the chunks in turn,
    and weight gradients back."""
    unit, chunks = min(plan.schedule.unit, plan.num_microbatches), len(sizes)
    round_ = unit * chunks
    forwards = [0, *accumulate(size * unit for size in sizes)]
    weights = [0, *accumulate(size * unit for size in reversed(sizes))]

    def first(sums: list[int], count: int) -> int:
        rounds, rest = divmod(count, round_)
        chunk, more = divmod(rest, unit)
        part = (sums[chunk + 1] - sums[chunk]) * more // unit if more else 0
        return rounds * sums[-1] + sums[chunk] + part

    most = max(0, plan.num_microbatches * chunks - cap)
    # The least is where a chunk ends, of the forwards or of the weight gradients.
    ends = {min(most, n * unit) for n in range(chunks)}
    ends |= {min(most, (n * unit - cap) % round_) for n in range(chunks)}
    return min(first(forwards, done + cap) - first(weights, done) for done in ends)


def _least_activations(plan: SizedPlan, rank: int, sizes: list[int]) -> int:
    """The bytes of chunk-activations that are held together at least once; ``sizes`` are per
    chunk. They are those of the forwards that a rank makes before its first backward."""
    name, m, pp = plan.schedule.name, plan.num_microbatches, plan.layout.pp
    way_round = 2 * (pp - rank) - 1  # forwards before the first input gradient can arrive
    if name in ("1f1b", "zb_h1"):
        return min(m, pp - rank) * sizes[0]
    if name == "interleaved_1f1b":
        return _in_groups(min(pp, m), way_round, m, sizes)
    if name == "interleaved_zb":
        return _in_groups(min(pp, m), pp - rank, m, sizes)
    if name == "looped_bfs":
        return m * sum(sizes)
    if name in ("zbv", "dualpipev"):
        return min(m, 2 * pp - rank - 1) * sizes[0] + min(m, rank + 1) * sizes[1]
    if name == "zeropp":
        unit, cap = plan.schedule.unit, plan.activation_cap
        last = min(unit, way_round, cap - (len(sizes) - 1) * unit if cap else 1)
        return unit * sum(sizes[:-1]) + last * sizes[-1]
    return sum(sizes) if name == "accumulation" else min(sizes)


def _in_groups(group: int, last: int, m: int, sizes: list[int]) -> int:
    """The least bytes of the forwards of ``group`` or more microbatches in every chunk but the
    last, and of ``last`` forwards after them, as far as a step of ``m`` microbatches has this many:
    up to ``group`` are in the last chunk, and the others may be in any."""
    others = min(last - group, (m - group) * len(sizes)) if last > group else 0
    return group * sum(sizes[:-1]) + min(last, group) * sizes[-1] + others * min(sizes)


def order_peak(
    compute: Schedule, plan: SizedPlan, held: StepBytes, ranks: Iterable[int]
) -> tuple[int, int]:
    """The peak in bytes of the fullest of these ranks, and that rank, if they have their compute
    actions in the order of ``compute``, which has no other actions and may be the beginning of a
    step. Messages arrive as late as possible."""
    peaks = []
    wanted = gathers(plan), plan.prefetch, plan.reduce_every, plan.offloaded_stages
    for rank in ranks:
        if (rank, *wanted) not in compute.lone:
            gather, prefetch, reduce_every, offloaded = wanted
            program = with_collectives(
                compute,
                rank,
                gather=gather,
                prefetch=prefetch,
                reduce_every=reduce_every,
                offloaded=offloaded,
            )
            programs: list[RankProgram] = [()] * compute.num_ranks
            programs[rank] = tuple(_with_receives(program, compute))
            compute.lone[rank, *wanted] = replace(compute, programs=tuple(programs))
        ordered = plan.with_programs(compute.lone[rank, *wanted])
        peaks.append((needed_bytes(ordered, held, rank), rank))
    return max(peaks)


def exceeds(compute: Schedule, plan: SizedPlan, held: StepBytes, limit_bytes: int) -> bool:
    """Whether the first or the last rank, usually the fullest, holds more than ``limit_bytes``."""
    return order_peak(compute, plan, held, {0, compute.num_ranks - 1})[0] > limit_bytes


def _with_receives(program: RankProgram, schedule: Schedule) -> Iterator[Action]:
    """A rank's program with each receive just before the action that needs the message."""
    ranks, last = schedule.stage_rank, schedule.num_stages - 1
    for action in program:
        stage, op, microbatch = action
        if op is Op.FORWARD:
            if stage and ranks[stage - 1] != ranks[stage]:
                yield Action(stage, Op.RECV_F, microbatch)
        elif op in NEEDS_PARAMETERS and stage < last and ranks[stage + 1] != ranks[stage]:
            yield Action(stage, Op.RECV_B, microbatch)
        yield action


_ROUNDING = 1e-9  # the share by which sums of the same durations may differ


def least_compute_s(plan: SizedPlan, passes: Sequence[tuple[float, float, float]]) -> float:
    """The cheapest bound: that of ``least_step_s`` for compute alone, from the seconds of every
    stage's forward, input gradient and weight gradient."""
    schedule, split = plan.schedule, splits(plan)
    steps_overlap = program_named(plan.program).post_validation
    m, arrive, back = schedule.num_microbatches, 0.0, 0.0
    # For every rank, the seconds of the stages before its first one: of forwards, of backwards;
    # and of backwards up to its last one.
    begin: dict[int, tuple[float, float]] = {}
    turned: dict[int, float] = {}
    forwards: dict[int, list[float]] = {}
    work, weights = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    for rank, (forward, input_, weight) in zip(schedule.stage_rank, passes, strict=True):
        begin.setdefault(rank, (arrive, back))
        forwards.setdefault(rank, []).append(forward)
        work[rank] += m * (forward + input_ + weight)
        weights[rank] += m * weight if split else 0.0
        turn = input_ if split else input_ + weight
        arrive += forward
        back += turn
        turned[rank] = back
    worst = arrive + back + (m - 1) * (forward + turn)
    for rank, (to, fro) in begin.items():
        after = work[rank] - _first_forwards_s(plan, rank, forwards[rank])
        rank_s = max(to + work[rank], arrive + back - turned[rank] + after)
        rank_s -= to if steps_overlap else 0.0
        worst = max(worst, rank_s, to + work[rank] - weights[rank] + fro)
    return worst * (1.0 - _ROUNDING)


def _first_forwards_s(plan: SizedPlan, rank: int, seconds: list[float]) -> float:
    """The most seconds of the forwards that a rank makes before its first backward; ``seconds`` are
    those of one microbatch in each of its chunks."""
    name, m, pp = plan.schedule.name, plan.num_microbatches, plan.layout.pp
    if name in ("1f1b", "zb_h1"):
        return min(m, pp - rank) * seconds[0]
    every, interleaves = m * sum(seconds), name in ("interleaved_1f1b", "interleaved_zb")
    if not interleaves or m % pp:  # groups may be larger
        return every
    last = pp - rank if name == "interleaved_zb" else 2 * (pp - rank) - 1
    return min(every, pp * sum(seconds[:-1]) + last * max(seconds))


def least_step_s(plan: SizedPlan, price: StepTimes, *, any_unit: bool = False) -> float:
    """Seconds that no order can beat, with ``any_unit`` for none of ZeroPP's units: the largest of
    several bounds of every rank.

    A rank starts no sooner than a microbatch has come through the stages before its first one,
    unless steps overlap, and than its first stage is gathered. Its compute takes the time of all
    its microbatches, and its link that of all its gathers and reductions; after its last weight
    gradient come at least the reductions of one stage. Its first backward has come through all
    stages and back, and the number of forwards before it is limited (``_first_forwards_s``). After
    its last input gradient, the gradient still goes back to stage 0, whose rank then makes the
    weight gradient that belongs to it. Where activations are capped, a rank fills and drains slowly
    (``_capped_s``). Compute waits for copies to and from the host (``_waits_s``).
    """
    ranks = range(plan.schedule.num_ranks)
    works = [_work_s(plan, price, stages) for stages in map(plan.schedule.stages_of, ranks)]
    slowed = _slowed(plan, price, works)
    latency = Latency.of(plan, slowed)
    ends = [_Ends.of(plan, price, rank) for rank in ranks]
    last = ends[plan.schedule.stage_rank[0]]
    # The last stage turns all microbatches. The first has come through all stages, and the last
    # goes back through them.
    turned = plan.num_microbatches * (slowed.stages[-1].forward + latency.backward[-1])
    worst = latency.to[-1] + turned + latency.back[-1] + latency.weight[0]
    worst += last.reduced_s + last.updated_s
    for rank, (end, work) in enumerate(zip(ends, works, strict=True)):
        stages = plan.schedule.stages_of(rank)
        first = stages[0]
        beside = sum(price.stages[s].reduce_grad for s in stages) * _reductions(plan)
        beside += sum(price.stages[s].unshard * n for s, n in _gathers(plan, stages))
        copied = sum(price.stages[s].copy_in for s in stages) * _reductions(plan) * work.factor
        start = max(latency.to[first], first_gather_s(plan, price, first))
        # All but a rank's last two chunks, whose microbatches may turn before they are stored.
        stored = sum(slowed.stages[s].store for s in stages[:-2]) * plan.num_microbatches
        worst = max(worst, stored, _sent_s(plan, price, latency, stages, start))
        work_s, phases = work.seconds, None
        if plan.offloaded_stages or (plan.activation_cap and not any_unit):
            phases = _phases(plan, slowed, latency, stages)
            work_s += _waits_s(plan, *phases, any_unit)
        costs = [slowed.stages[s] for s in stages]
        turned_s = latency.first_backward_s(stages[-1])
        turned_s += plan.num_microbatches * sum(cost.compute for cost in costs)
        turned_s -= _first_forwards_s(plan, rank, [cost.forward for cost in costs])
        if price.steps_overlap:
            rank_s = max(work_s + copied, turned_s - latency.to[first])
        else:
            rank_s = max(start + work_s + copied, turned_s)
        worst = max(worst, max(rank_s + end.reduced_s, beside + end.crossed_s) + end.updated_s)
        if first:
            weights = sum(slowed.stages[s].backward_weight for s in stages) * splits(plan)
            at_0 = start + work_s - weights * plan.num_microbatches + latency.back[first]
            worst = max(worst, at_0 + latency.weight[0] + last.reduced_s + last.updated_s)
        if plan.activation_cap:
            busy = _held_s(plan, latency, stages)
            capped = _capped_s(plan, slowed, latency, stages)
            in_turn = _in_turn_s(plan, latency, stages, *phases) if phases and not any_unit else 0.0
            worst = max(worst, max(busy, capped, in_turn) + last.updated_s)
    return worst * (1.0 - _ROUNDING)


def _sent_s(
    plan: SizedPlan, price: StepTimes, latency: Latency, stages: tuple[int, ...], start: float
) -> float:
    """Seconds that a rank's messages of forwards to the next one take at least, which go one after
    the other: between the first forward and what is left to do for the last of them."""
    ranks, costs, m = plan.schedule.stage_rank, price.stages, plan.num_microbatches
    here, first = ranks[stages[0]], stages[0]
    if first + 1 == len(ranks) or (next_one := ranks[first + 1]) == here:
        return 0.0
    on = [s for s in stages if s + 1 < len(ranks) and ranks[s + 1] == next_one]
    sent = m * sum(costs[s].transfer for s in on)
    if price.steps_overlap:
        return sent
    left = latency.turn - latency.to[on[-1] + 1] + latency.backward[-1] + latency.back[-1]
    return start + costs[first].forward + sent + left


def least_of_order_s(
    compute: Schedule, plan: SizedPlan, price: StepTimes, limit_s: float = float("inf")
) -> float:
    """Seconds that the plan's step takes at least if every rank has its compute actions in the
    order of ``compute``, which has no other actions; infinite once they are certainly ``limit_s``
    or more. All actions follow the gather of stage 0."""
    if price.steps_overlap:
        return 0.0
    ranks = range(plan.schedule.num_ranks)
    works = [_work_s(plan, price, stages) for stages in map(plan.schedule.stages_of, ranks)]
    costs = _slowed(plan, price, works).stages
    ends = (_Ends.of(plan, price, rank) for rank in ranks)
    beside = first_gather_s(plan, price, 0) + min(end.reduced_s + end.updated_s for end in ends)
    events = run_within(compute, costs, limit_s - beside)
    return (beside + events.step_s) * (1.0 - _ROUNDING) if events else float("inf")


@dataclass(frozen=True)
class _Ends:
    """The least seconds of a rank after its last weight gradient."""

    reduced_s: float  # over shards and replicas
    crossed_s: float  # over the replicas alone
    updated_s: float  # tied sums, optimizer and ZeRO-1's gather

    @classmethod
    def of(cls, plan: SizedPlan, price: StepTimes, rank: int) -> _Ends:
        stages = plan.schedule.stages_of(rank)
        return cls(
            min(
                cost.reduce_grad / cost.parts + cost.reduce_replicas
                for cost in (price.stages[s] for s in stages)
            ),
            min(price.stages[s].reduce_replicas for s in stages),
            sum(
                cost.reduce_tied + cost.gather_whole + cost.update + cost.gather_updated
                for cost in (price.stages[s] for s in stages)
            ),
        )


def _capped_s(
    plan: SizedPlan, price: StepTimes, latency: Latency, stages: tuple[int, ...]
) -> float:
    """Seconds until rank 0 has its last weight gradient, by the activations that a rank may hold.

    Before its first backward a rank makes forwards alone, and after its last forward only backwards
    of what it still holds; both are no more than the cap. The first backward has come through all
    stages and back, and so has the last forward to go. All work besides is between the two.
    """
    m, costs, most = plan.num_microbatches, price.stages, plan.activation_cap
    if most >= m * len(stages):
        return 0.0  # all forwards may come before the first backward
    tail, last = latency.backward[-1], stages[-1]
    after_forward = latency.turn - latency.to[last] - costs[last].forward + tail + latency.back[-1]
    forwards = max(costs[s].forward for s in stages)
    backwards = max(costs[s].backward_input + costs[s].backward_weight for s in stages)
    between = max(0.0, m * sum(costs[s].compute for s in stages) - most * (forwards + backwards))
    first_backward_s = latency.first_backward_s(last)
    return first_backward_s + between + after_forward + latency.weight[0]


def _held_s(plan: SizedPlan, latency: Latency, stages: tuple[int, ...]) -> float:
    """Seconds of a rank's step by Little's law: activations are held for so long, and no more at a
    time than the cap. While a unit is in the last chunk, all of it is held in the others; with a
    cap of less than two units there, no two units are in the last chunk."""
    m, cap, unit = plan.num_microbatches, plan.activation_cap, plan.schedule.unit
    busy_s = m * sum(map(latency.held_s, stages)) / cap
    others = (len(stages) - 1) * unit
    if others < cap < 2 * others:
        busy_s = max(busy_s, m // unit * unit * latency.held_s(stages[-1]) / (cap - others))
    return busy_s


@dataclass(frozen=True)
class _Phase:
    """A unit's forwards, or its backwards, on one rank, which has one order of each. Lists have one
    entry per chunk, in this order."""

    passes: list[float]  # seconds of one microbatch
    arrive: list[float]  # until the first microbatch is at the next chunk
    # Seconds for which compute waits for a copy longer than the passes beside it: between two
    # microbatches of a chunk, and between one chunk and the next.
    within: list[float]
    between: list[float]

    def waits(self, unit: int) -> float:
        """Seconds for which compute waits for the copies of a unit, if all are passes there."""
        return (unit - 1) * sum(self.within) + sum(self.between)

    def seconds(self, unit: int) -> float:
        """From the first pass of a unit of microbatches to the end of its last, at least."""
        in_turn = self._in_turn(unit) + unit * self.passes[-1]
        return max(in_turn, unit * sum(self.passes) + self.waits(unit))

    def until_last(self, unit: int) -> float:
        """From the first forward of a unit to the begin of its last chunk, at least; what comes
        last in ``between`` may be waited for later."""
        waits = self.waits(unit) - sum(self.between[-1:])
        return max(self._in_turn(unit), unit * sum(self.passes[:-1]) + waits)

    def _in_turn(self, unit: int) -> float:
        """A chunk begins when its first microbatch has come through all ranks, and when the rank
        has the chunk before behind it."""
        chunks = zip(self.passes, self.within, self.arrive, strict=False)
        return sum(max(unit * each + (unit - 1) * wait, way) for each, wait, way in chunks)


def _phases(
    plan: SizedPlan, price: StepTimes, latency: Latency, stages: tuple[int, ...]
) -> tuple[_Phase, _Phase]:
    """A unit's forwards and its backwards.

    Each store ends before the next forward that is stored has its own, with one more pass beside
    it at most; each load is beside the backward before its own. A pass comes with what is copied
    for its collectives.
    """
    costs, back = [price.stages[s] for s in stages], stages[::-1]
    stored = _stored(plan, len(stages))
    moved = [cost.copy_out + cost.copy_in for cost in costs]
    ahead = [cost.forward + more for cost, more in zip(costs, moved, strict=True)]
    behind = [latency.backward[s] + more for s, more in zip(stages, moved, strict=True)]
    sent = [cost.store for cost in costs[:stored]]
    loaded = [cost.load for cost in costs[:stored]]
    unsent = [0.0] * (len(stages) - stored)
    # Two passes may be beside a store if the next chunk stores nothing.
    beside = (
        first + (0.0 if cost.store else max(first, second))
        for cost, first, second in zip(costs[1:], ahead[1:], ahead[2:], strict=False)
    )
    forwards = _Phase(
        [cost.forward for cost in costs],
        [latency.to[after] - latency.to[s] for s, after in pairwise(stages)],
        [*_longer(sent, ahead), *unsent],
        _longer(sent[: max(0, len(stages) - 2)], beside),
    )
    # From the begin of a microbatch's backward to the begin of its next one.
    arrive = [
        latency.back[s] - latency.back[after] - latency.backward[after] + latency.backward[s]
        for s, after in pairwise(back)
    ]
    backwards = _Phase(
        [latency.backward[s] for s in back],
        arrive,
        [*unsent, *_longer(loaded, behind)[::-1]],
        _longer(loaded[: max(0, len(stages) - 2)], behind[1:]),
    )
    return forwards, backwards


def _waits_s(plan: SizedPlan, forwards: _Phase, backwards: _Phase, any_unit: bool) -> float:
    """Seconds for which a rank's compute waits for copies to and from the host, at least: in the
    forwards before its first backward and, if weight gradients do not wait, in the backwards after
    its last forward; with gradient accumulation in all."""
    if plan.schedule.name == "accumulation":
        return plan.num_microbatches * (forwards.waits(1) + backwards.waits(1))
    if plan.schedule.name != "zeropp":
        return 0.0
    unit = min(plan.schedule.unit, plan.num_microbatches)
    first, last = (1, 1) if any_unit else (unit, plan.num_microbatches % unit or unit)
    return forwards.waits(first) + (0.0 if splits(plan) else backwards.waits(last))


def _longer(copies: Iterable[float], passes: Iterable[float]) -> list[float]:
    """The seconds that each copy takes longer than the passes beside it."""
    return [max(0.0, copy - beside) for copy, beside in zip(copies, passes, strict=False)]


def _in_turn_s(
    plan: SizedPlan,
    latency: Latency,
    stages: tuple[int, ...],
    forwards: _Phase,
    backwards: _Phase,
) -> float:
    """Seconds until rank 0 has its last weight gradient, as a rank has one order of forwards and
    one of backwards, in which a unit follows the other: all forwards except the last unit's in the
    last chunk, and that unit's backwards; or the first unit's way to its first backward, and all
    backwards."""
    unit = plan.schedule.unit
    whole, rest = divmod(plan.num_microbatches, unit)
    first, last = stages[0], stages[-1]
    turned = latency.first_backward_s(last) - latency.to[last]
    forwards_s, backwards_s = (
        whole * of.seconds(unit) + (of.seconds(rest) if rest else 0.0)
        for of in (forwards, backwards)
    )
    ahead = forwards_s - forwards.seconds(unit)
    after = ahead + forwards.until_last(rest or unit) + backwards.seconds(rest or unit)
    begun = latency.to[last] - latency.to[first] + backwards_s
    return latency.to[first] + turned + max(after, begun) + latency.back[first] + latency.weight[0]


@dataclass(frozen=True)
class _Work:
    """A rank's compute: its seconds, the factor by which at least collectives slow it, and the
    share of it beside which they run at least."""

    seconds: float
    factor: float
    share: float


def _slowed(plan: SizedPlan, price: StepTimes, works: Sequence[_Work]) -> StepTimes:
    """The price with compute, and copies to and from hosts, that collectives slow."""
    known: dict[tuple[int, int, int], StageCost] = {}  # equal stages of a rank share one object
    costs = []
    for rank, cost, extras in zip(
        plan.schedule.stage_rank, price.stages, price.extras, strict=True
    ):
        key = (rank, id(cost), id(extras))
        if key not in known:
            work, slowed = works[rank], slowed_cost(cost, extras, works[rank].factor)
            if slowed.store:
                left = 1.0 - price.network_share * work.share
                slowed = replace(slowed, store=cost.store / left, load=cost.load / left)
            known[key] = slowed
        costs.append(known[key])
    return replace(price, stages=tuple(costs))


def _work_s(plan: SizedPlan, price: StepTimes, stages: tuple[int, ...]) -> _Work:
    """A rank's compute beside all collectives but the first gather and the last reductions. The
    copies of gathers are part of it; those of reductions are not, as they may come last."""
    m, costs = plan.num_microbatches, [price.stages[s] for s in stages]
    waits = {s: price.extras[s].waits for s in stages}
    gathers = [(price.stages[s], n) for s, n in _gathers(plan, stages)]
    moving = {s: max(0.0, price.stages[s].unshard - waits[s]) for s in stages}
    beside = sum(moving[s] * n for s, n in _gathers(plan, stages)) - max(moving.values())
    reduced = [
        max(0.0, price.stages[s].reduce_grad - waits[s])
        for s in stages
        if not price.stages[s].waits_for_reduction
    ]
    crossings = [c.reduce_replicas for c in costs if not c.waits_for_reduction]
    beside += sum(reduced) * _reductions(plan) - max(reduced, default=0.0)
    beside += sum(crossings) - max(crossings, default=0.0)
    work = sum(cost.compute for cost in costs) * m
    copied = sum(cost.copy_out * n for cost, n in gathers)
    most = work + copied + sum(cost.copy_in for cost in costs) * _reductions(plan)
    share = min(1.0, max(0.0, beside) / (most * price.stragglers))
    slowed = price.stragglers * (1.0 + price.overlap_slowdown * share)
    exposed = sum(price.extras[s].exposed for s in stages) * m
    return _Work((work - exposed + copied) * slowed + exposed, slowed, share)


def _reductions(plan: SizedPlan) -> int:
    return plan.num_units if plan.reduce_every == "unit" else 1


def _gathers(plan: SizedPlan, stages: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(stage, how often it is gathered at least). Each stage of a rank between its first and its
    last is gathered once per unit; with gradient accumulation once, and again after each release.
    The first and the last may stay gathered from one phase to the next, and phases of two units may
    overlap."""
    if plan.layout.shards == 1:
        return
    program, between = program_named(plan.program), plan.num_units
    if plan.schedule.name == "accumulation":
        released = program.reshard_after_forward * between
        between = 1 + released + program.reshard_after_backward * (between - 1)
    yield from ((s, between if 0 < n < len(stages) - 1 else 1) for n, s in enumerate(stages))
