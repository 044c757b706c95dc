"""Prints an answer on one screen, or its plan as arguments of another program.

The table of plans and the words about lost time are also those of ``zeropp tune``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from benchmarks.explain import megatron, torchtitan
from benchmarks.explain.answer import BEST_TOLERANCE, Answer, mfu
from benchmarks.explain.need import need_lines
from benchmarks.report import ratio_errors
from benchmarks.report.network import network_words
from benchmarks.report.searches import Best
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import ATLAS, program_label
from zeropp.choose.contender import describe, overrides
from zeropp.choose.outcome import Evaluated
from zeropp.choose.task import MEMORY_MARGIN, Candidate, Task
from zeropp.price.memory import reserved_bytes
from zeropp.price.programs import program_named
from zeropp.price.simulator import SimResult
from zeropp.schedule.plan import SizedPlan

# Who writes a dialect, and the contenders whose plans its program runs.
_WRITERS = {
    "megatron": (megatron.written, ("megatron_core", "megatron_core_local")),
    "torchtitan": (torchtitan.written, ("torchtitan", "torch_pp", "fsdp")),
}
_MOST_RANKS = 16  # rows of the table of memory; of more ranks only the fullest and the emptiest

_LEAST_HOST = 0.02  # of a step, from which on the host's share is said

PLAN_WORDS = (
    "In plans: degrees (tp: tensor parallelism; shard: ZeRO-3; replicate: plain data parallelism; "
    "context: of a sequence, whose ranks exchange heads or form a ring), b sequences per "
    "microbatch, m microbatches per step, the order of the pipeline, V stages per rank, zero1 "
    "(optimizer states split over the replicas), sp (sequence parallelism), sums and sent (types "
    "of gradients); in elements bucket (of gradients), of DeepSpeed live and together (gathered "
    "ahead and at once), persistent (tensors up to it stay), and hpz (ranks of a second copy); of "
    "ZeroPP, U microbatches per gather, cap (activations kept), and reduce (gradients every so "
    "often)."
)


def written_as(dialect: str, plan: SizedPlan, candidate: Candidate[Any]) -> str:
    """The plan in a program's own words. Raises SpecError if it is another program's plan, which
    has none there."""
    if dialect == "overrides":
        return " ".join(overrides(candidate))
    written, programs = _WRITERS[dialect]
    if plan.contender not in programs:
        raise SpecError(
            f"--as {dialect}: {plan.contender}'s plans are not {dialect}'s (use overrides)"
        )
    return written(plan)


def show(answer: Answer, console: Console, *, verbose: bool) -> None:
    """Print what was understood, and the answers to: will it fit, and why is it slow."""
    question, result = answer.question, answer.asked.result
    task, reading, contender = question.task, question.reading, question.contender
    console.print(
        f"{contender.label}: {task.shape.name} on {task.num_gpus} x {task.cluster.name}, "
        f"global batch {task.global_batch}, sequence {task.shape.seq}, {task.precision}",
        style="bold",
    )
    console.print(f"Plan as understood: {describe(result.plan)}")
    for line in reading.named:
        indented(f"beware: {line}", console, style="yellow")
    for line in reading.derived:
        indented(f"derived: {line}", console, style="dim")
    given, taken = (
        {**vars(of.knobs), "microbatch_size": of.microbatch_size}
        for of in (question, answer.asked.candidate)
    )
    searched = [
        f"{name}={value}" for name, value in taken.items() if given[name] == "auto" != value
    ]
    if searched:
        indented(f"searched, since nothing says it: {', '.join(searched)}", console, style="dim")
    if verbose:
        indented(f"changes nothing: {', '.join(reading.harmless)}", console, style="dim")
    console.print(_speed(answer))
    errors = ratio_errors.error_text(contender.name, contender.label)
    indented(f"simulated; {errors}", console)
    if answer.network_s:
        indented(network_words(answer.network_s), console)
    console.print(memory_text(answer.asked, task))
    console.print(_memory(answer))
    alone = seconds_by_kind(result)["limit"] / result.step_s
    console.print(
        f"Time: the model's kernels alone {100 * alone:.1f} %; lost to {lost(result, 0.005)}."
    )
    if answer.host_s >= _LEAST_HOST * result.step_s:
        console.print(
            f"The host is a limit: with a host that is never late the step is "
            f"{100 * answer.host_s / result.step_s:.0f} % shorter. Larger microbatches"
            f"{'' if result.plan.compile else ', torch.compile'} or CUDA graphs help."
        )


def indented(words: str, console: Console, style: str = "") -> None:
    """Print a line below another one; where it is wrapped, all of it is indented."""
    console.print(Padding(words, (0, 0, 0, 2), expand=False), style=style)


def _speed(answer: Answer) -> str:
    result = answer.asked.result
    share = mfu(result, answer.question)
    words = f"Step {result.step_s:.3f} s, {result.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    words += "" if share is None else f", MFU {100 * share:.1f} %"
    return f"{words}." if answer.fits else f"It does not fit. If it did: {words}."


def memory_text(plan: Evaluated[Any], task: Task) -> str:
    """Whether a plan fits: the GiB of its fullest pipeline rank, of those that the device has for
    tensors, what most of them are, their error, and what torch's allocator reserves."""
    has, program = task.cluster.device.usable_bytes, program_named(plan.plan.program)
    rank, memory = max(enumerate(plan.result.memory), key=lambda rank: rank[1].total)
    kinds = {kind: size for kind, size in asdict(memory).items() if kind != "host"}
    kind, most = max(kinds.items(), key=itemgetter(1))
    likely = (1 + MEMORY_MARGIN) * plan.peak_bytes
    reserved = reserved_bytes(plan.peak_bytes, program)
    verdict = "It fits" if likely <= has else "It may fit" if plan.peak_bytes <= has else "Too much"
    host, may = max(m.host for m in plan.result.memory), plan.result.price.host_limit
    if host > may:
        verdict = f"Too much for the host ({_gib(host)} of {_gib(may)} GiB per GPU)"
    who = f"pipeline rank {rank}" if len(plan.result.memory) > 1 else "every rank"
    text = (
        f"{verdict}: {who} allocates {_gib(memory.total)} of {_gib(has)} GiB, {_gib(most)} of them "
        f"{kind}. Nine in ten published runs took at most {1 + MEMORY_MARGIN:.2f} times their "
        f"simulated memory, here {_gib(likely)} GiB; torch reserves about {_gib(reserved)} GiB"
    )
    if plan.peak_bytes <= has < max(likely, reserved):
        text += ": near the limit its allocator frees and retries, which takes time (see "
        text += 'torch.cuda.memory_stats()["num_alloc_retries"])'
    if task.limit_bytes < plan.peak_bytes <= has:
        text += f". Best plans below leave {task.memory_margin:.0%} of their simulated memory"
    return f"{text}."


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def spare(plan: Evaluated[Any], task: Task) -> str:
    """What a plan's peak leaves of the device's memory for tensors, as ``9.5 of 76.0 GiB``."""
    has = task.cluster.device.usable_bytes
    return f"{_gib(has - plan.peak_bytes)} of {_gib(has)} GiB"


def _memory(answer: Answer) -> Table:
    """Bytes by kind of every pipeline rank at its peak, and what is left."""
    limit = answer.question.task.cluster.device.usable_bytes
    table = table_of("GiB of each pipeline rank at its peak")
    table.padding, table.show_edge = 0, False  # whole headings in 80 columns
    ranks = list(enumerate(answer.asked.result.memory))
    if len(ranks) > _MOST_RANKS:
        by_total = sorted(ranks, key=lambda rank: rank[1].total)
        ranks = sorted({*by_total[:2], *by_total[-6:]}, key=itemgetter(0))
        table.title = f"{table.title} (the fullest six and the emptiest two)"
    kinds = [kind for kind in asdict(ranks[0][1]) if kind != "host"]
    for heading in ("rank", *kinds, "total", "left"):
        table.add_column(heading, justify="right")
    for rank, memory in ranks:
        values = [getattr(memory, kind) for kind in kinds]
        values += [memory.total, limit - memory.total]
        style = "red" if memory.total > limit else ""
        table.add_row(str(rank), *(f"{value / 2**30:.1f}" for value in values), style=style)
    return table


def lost(result: SimResult, least: float) -> str:
    """The shares of a step that are lost against the compute limit, by cause and the largest first;
    those below ``least`` of the step are left out."""
    kinds, layout = seconds_by_kind(result), result.plan.layout
    degrees = {"tensor": layout.tp, "context": layout.context}
    divided = " and ".join(name for name, degree in degrees.items() if degree > 1)
    kinds |= {f"{divided} parallelism": kinds.pop("tensor")}
    del kinds["limit"]
    return ", ".join(
        f"{kind.replace('_', ' ')} {100 * seconds / result.step_s:.1f} %"
        for kind, seconds in sorted(kinds.items(), key=itemgetter(1), reverse=True)
        if seconds >= least * result.step_s
    )


def seconds_by_kind(result: SimResult) -> dict[str, float]:
    """The seconds of a step by kind, none below 0: where a plan's own kernels are faster than those
    of the limit, they are the limit."""
    kinds = result.breakdown.by_kind()
    faster = min(0.0, kinds["small_kernels"])
    return kinds | {
        "limit": kinds["limit"] + faster,
        "small_kernels": kinds["small_kernels"] - faster,
    }


def table_of(title: str) -> Table:
    """An empty table in the look of all screens."""
    return Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)


class PlanLine(NamedTuple):
    """A line of a table of plans: ``plan`` is None where none fits, ``gain`` is its speed over
    another plan's, and ``style`` is rich's."""

    name: str
    plan: Evaluated[Any] | None
    gain: str = ""
    style: str = ""


_QUANTITIES: dict[str, Callable[[Evaluated[Any]], str]] = {
    "plan": lambda plan: describe(plan.plan),
    "step s": lambda plan: f"{plan.step_s:.3f}",
    "tokens/s/GPU": lambda plan: f"{plan.result.tokens_per_s_per_gpu:,.0f}",
    "of limit": lambda plan: f"{100 * plan.result.limit_share:.1f} %",
    "peak GiB": lambda plan: f"{plan.peak_bytes / 2**30:.1f}",
}


def table_of_plans(title: str, heads: Sequence[str], lines: Iterable[PlanLine]) -> Table:
    """Plans beside each other. The first column has their names, one with a head that is none of
    ``_QUANTITIES`` their gains."""
    table = table_of(title)
    for head in heads:
        table.add_column(head, justify="left" if head in (heads[0], "plan") else "right")
    for name, plan, gain, style in lines:
        if plan is None:
            cells = ["none found" if head == "plan" else "-" for head in heads[1:]]
        else:
            cells = [_QUANTITIES[head](plan) if head in _QUANTITIES else gain for head in heads[1:]]
        table.add_row(name, *cells, style=style)
    return table


_COMPARED = ("plan", "step s", "times as fast", "peak GiB")


def _gain(answer: Answer, plan: Evaluated[Any] | None, *, one_program: bool = True) -> str:
    if plan is None or not answer.fits:
        return "-"
    return ratio_errors.ratio_text(answer.asked.step_s / plan.step_s, one_program=one_program)


def show_changes(answer: Answer, changes: Mapping[str, Evaluated[Any]], console: Console) -> None:
    """Print the three best changes of one knob (``answer.changes_of``)."""
    lines = [PlanLine(knob, plan, _gain(answer, plan)) for knob, plan in changes.items()][:3]
    if lines:
        title = "Changes of one knob that gain most"
        console.print(table_of_plans(title, ("knob", *_COMPARED), lines))
    else:
        console.print("No change of a single knob is faster and fits.")


def show_best(answer: Answer, best: Sequence[Best], console: Console) -> None:
    """Print the best plans of all programs on the same GPUs, and what they answer."""
    name, plans = program_label(answer.question.contender.name), []
    for of in best:
        gain = _gain(answer, of.winner, one_program=program_label(of.name) == name)
        label = of.label + ("" if of.is_complete else f" (search cut, gap {of.gap:.1%})")
        plans.append(PlanLine(label, of.winner, gain))
    console.print(table_of_plans("Best plans on the same GPUs", ("program", *_COMPARED), plans))
    if answer.fits:
        console.print(ratio_errors.NOTE, style="dim")
    console.print(
        f"Plans that are faster by less than {BEST_TOLERANCE:.0%} may be missed: zeropp tune "
        "searches closer.",
        style="dim",
    )
    found = {of.name for of in best}
    missing = [row.label for row_name, row in ATLAS.items() if row_name not in found]
    for line in need_lines(answer.question.task, best, missing):
        console.print(line)
    console.print(PLAN_WORDS, style="dim")


def show_training(tokens: float, answer: Answer, console: Console) -> None:
    """Print how long the question's plan takes for this many tokens, and the boards' energy if
    their nominal power is known."""
    task = answer.question.task
    seconds = tokens / (task.global_batch * task.shape.seq) * answer.asked.step_s
    gpu_hours, power_w = seconds / 3600 * task.num_gpus, task.cluster.device.power_w
    words = f"For {tokens / 1e9:,g} billion tokens: {seconds / 86400:,.1f} days, "
    words += f"{gpu_hours:,.0f} GPU-hours"
    if power_w is not None:
        megawatt_hours = power_w * gpu_hours / 1e6
        words += f", {megawatt_hours:,.1f} MWh at the boards' nominal power, hosts left out"
    console.print(f"{words}.")
