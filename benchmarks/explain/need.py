"""Whether a case needs tensor parallelism: the last lines of ``zeropp tune`` and ``explain``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log, nan

from benchmarks.report.ratio_errors import NONE_WITH_TP, factor, need_text, priced_runs, ratio_text
from benchmarks.report.searches import MOST_GAP, Best
from benchmarks.specification import DTYPES
from benchmarks.specification.contenders import program_label
from zeropp.choose.contender import describe
from zeropp.choose.task import Task

_CASE = ("layers", "hidden", "heads", "kv_heads", "ffn", "seq")
_NODE = ("gpus_per_node", "nics_per_node")
_WITH = {False: "without tensor parallelism", True: "with it"}


def need_lines(task: Task, bests: Sequence[Best], missing: Sequence[str] = ()) -> Iterator[str]:
    """The lines: the fastest plan without tensor parallelism and the fastest with it, their ratio
    and that question's error, each program's own ratio, memory with its error, the published runs
    that are nearest to the case, and the answer. ``bests`` are rows on one side each
    (``contenders.sides``), or whole programs; ``missing`` are the labels of those whose searches
    were stopped."""
    sides: dict[bool, list[Best]] = {False: [], True: []}
    for best in bests:
        if best.winner is not None:
            sides[best.winner.plan.layout.tp > 1].append(best)
    fastest = {tensor: min(found, key=_step_s) for tensor, found in sides.items() if found}
    for tensor, best in fastest.items():
        yield f"Fastest {_WITH[tensor]}: {best.label}, {_numbers(best)}."
    left = [best for best in bests if _may_win(best, fastest)]
    cut = [*missing, *(best.label for best in left)]
    if len(fastest) == 2 and not cut:
        ratio = _step_s(fastest[True]) / _step_s(fastest[False])
        one = len({program_label(best.name) for best in fastest.values()}) == 1
        words = ratio_text(ratio, one_program=one, tensor=True)
        yield (
            f"Speed without over with: {words}; in brackets, where nine in ten published pairs "
            f"without and with it are, of {'one program' if one else 'two programs'}."
        )
    if told := ", ".join(_own_ratios(sides)):
        yield f"Of one program, without over with: {told}."
    yield from _published(task)
    answer = _answer(fastest, cut)
    if bests and not any(best.outcome.contender.space.tensor for best in bests):
        answer = NONE_WITH_TP
    memory = "For memory, no. For speed: " if False in fastest else ""
    yield f"Do you need tensor parallelism here? {memory}{answer}"


def _may_win(best: Best, fastest: Mapping[bool, Best]) -> bool:
    """Whether what a search left may be the fastest plan of its side by more than ``MOST_GAP``."""
    own = (False, True) if best.winner is None else (best.winner.plan.layout.tp > 1,)
    slowest_s = max(_step_s(fastest[side]) if side in fastest else float("inf") for side in own)
    return best.gap > 0 and best.least_s < (1.0 - MOST_GAP) * slowest_s


def _step_s(best: Best) -> float:
    assert best.winner is not None
    return best.winner.step_s


def _numbers(best: Best) -> str:
    winner = best.winner
    assert winner is not None
    device = best.outcome.task.cluster.device
    most = winner.peak_bytes * (1 + best.room.share) / 2**30
    gap = f", gap {best.gap:.1%}" if best.gap else ""
    held = max(memory.host for memory in winner.result.memory)
    limit = winner.result.price.host_limit
    host = f", and {held / 2**30:.0f} of {limit / 2**30:.0f} GiB of its host" * (held > 0)
    return (
        f"{winner.step_s:.3g} s, {winner.result.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{gap} "
        f"({describe(winner.plan)}); {winner.peak_bytes / 2**30:.1f} GiB, or {most:.1f} with "
        f"{best.room.words}, of {device.usable_bytes / 2**30:.1f} GiB ({device.memory_gib:g} less "
        f"{device.reserved_gib:g} for CUDA){host} per GPU"
    )


def _own_ratios(sides: dict[bool, list[Best]]) -> Iterator[str]:
    """Per program, the ratio of its fastest plans of both sides, which is the faster one beyond the
    error, and whether a search was cut."""
    fastest: defaultdict[str, dict[bool, Best]] = defaultdict(dict)
    for tensor, found in sides.items():
        for best in sorted(found, key=_step_s, reverse=True):
            fastest[program_label(best.name)][tensor] = best
    for label, of in fastest.items():
        if len(of) == 2:
            ratio = _step_s(of[True]) / _step_s(of[False])
            is_cut = any(best.gap > MOST_GAP for best in of.values())
            words = ratio_text(ratio, one_program=True, tensor=True)
            if max(ratio, 1 / ratio) > factor(one_program=True, tensor=True):
                words += f" (faster with{'out' * (ratio > 1)} it)"
            yield f"{label} {f'{ratio:.2f} (a search was cut)' if is_cut else words}"


def _published(task: Task) -> Iterator[str]:
    """The published runs of the case's model, precision and nodes whose number of GPUs is the
    nearest, and of these whose batch is, with tensor parallelism and without: a line per plan, with
    its fastest run and its price."""
    found: dict[bool, dict[tuple[float, ...], dict[str, tuple[float, str]]]] = {False: {}, True: {}}
    for run in priced_runs():
        same = all(int(run[name]) == getattr(task.shape, name) for name in _CASE)
        same &= run["device"] == task.cluster.device.name and run["dtype"] in DTYPES[task.precision]
        if not same:
            continue
        # These take a tenth of the time of all imports, and not every model was published.
        from benchmarks.validation.rows import COLUMNS, METRICS, SPEEDS, PublishedRow
        from benchmarks.validation.stated import cluster_of, measured_s

        if METRICS[run["metric"]].kind not in SPEEDS:
            continue
        stated = {name: cell for name, cell in run.items() if name in COLUMNS and cell}
        row = PublishedRow.model_validate(stated | {"url": run["place"], "table": run["place"]})
        own = cluster_of(row)
        if any(getattr(own, name) != getattr(task.cluster, name) for name in _NODE):
            continue
        tokens = row.global_batch * row.seq / row.num_gpus
        reached = tokens / measured_s(row, own.device)
        error = float(run["predicted"]) / row.measured
        simulated = reached * (1 / error if row.measure.kind == "time" else error)
        degrees = " ".join(f"{name}={getattr(row, name)}" for name in ("tp", "pp", "cp"))
        sizes = row.num_gpus / task.num_gpus, row.global_batch / task.global_batch
        away = tuple(abs(log(size)) for size in sizes)
        near = f"Nearest published run ({row.num_gpus} GPUs, batch {row.global_batch})"
        case = near if any(away) else "Published run of this case"
        plan = f"{case}: {row.program} {degrees} zero{row.zero}"
        words = f"{reached:,.0f} tokens/s/GPU measured, {simulated:,.0f} simulated ({row.source})."
        plans = found[row.tp > 1].setdefault(away, {})
        plans[plan] = max(plans.get(plan, (0.0, "")), (reached, words))
    nearest = [min(of.items()) for of in found.values() if of]
    for _, plans in nearest:
        yield from (f"{plan}, {words}" for plan, (_, words) in plans.items())
    if len(nearest) == 2 and nearest[0][0] != nearest[1][0]:
        yield "These runs without tensor parallelism and with it are no pair: their sizes differ."


def _answer(fastest: dict[bool, Best], cut: Sequence[str]) -> str:
    """Yes, no, or that it cannot be told, and why."""
    steps = {tensor: _step_s(best) for tensor, best in fastest.items()}
    ratio = steps.get(True, float("inf")) / steps.get(False, float("inf"))
    one = len({program_label(best.name) for best in fastest.values()}) == 1
    # Where a search was cut, a side may not have found a plan of its fastest program.
    text = need_text(nan if cut else ratio, one_program=one, is_cut=bool(cut))
    more = (
        f" Cut: {'; '.join(cut)} (with a larger budget= zeropp tune searches longer, and ends as "
        "soon as nothing faster is left)."
    )
    return text + more * bool(cut)
