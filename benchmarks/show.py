"""Shows a schedule: prints its grid, and with out=DIR writes PNG, SVG and a Perfetto trace.

    zeropp show schedule name=zeropp ranks=4 chunks=2 microbatches=8

With `--as torch` it prints the schedule as the CSV that torch's pipeline runtime reads
(`compute_comms`) instead, and says on the error stream what it holds.

Sizes: name (of the generator), ranks, chunks, microbatches, unit, cap, prefetch,
reduce_every. Durations, all in the same unit: forward, backward_input,
backward_weight, unshard, reduce_grad, transfer; at the end of a step,
reduce_replicas, reduce_tied, gather_whole, update, gather_updated.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.specification import SpecError
from benchmarks.specification.command import check_writable, command
from zeropp.schedule import ScheduleError, lower, validate
from zeropp.schedule.build import build
from zeropp.schedule.event_loop import EventResult, run
from zeropp.schedule.legality import live_activations, resident_chunks
from zeropp.schedule.passes import with_step_end
from zeropp.schedule.program import Op, Schedule, StageCost, StepEnd, parse_action
from zeropp.schedule.torch_runtime import lower_for_torch
from zeropp.types.layout import most_microbatches
from zeropp.types.timeline import Span, Timeline

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "F": "black on #56B4E9",
    "I": "black on #E69F00",
    "W": "black on #009E73",
    "B": "black on #D55E00",
    "T": "white on #882255",
    "U": "white on #666666",
}
_WORDS = {
    "F": "forward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "B": "full backward",
    "T": "sum of tied gradients",
    "U": "update",
}
_LETTERS = {Op.REDUCE_TIED: "T", Op.UPDATE: "U"}  # for others, their own abbreviations
_COSTS = tuple(field.name for field in fields(StageCost) if field.type == "float")
_COMPUTE = ("forward", "backward_input", "backward_weight")
_MOST = 100.0  # longest duration, over the shortest compute action (one column of the grid)
_MANIFEST = ".timeline.json"  # names the files that this has written into a folder
_PIXELS_PER_INCH = 200
_LOG_WIDTH = 120  # columns of a line where there is no terminal


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to show; the fields are the keys of the command line."""

    name: str = "zeropp"
    ranks: int = 4
    chunks: int = 1
    microbatches: int = 8
    unit: int | None = None  # None: the generator's default
    cap: int | None = None  # None: the generator's default
    prefetch: int = 1
    reduce_every: str = "unit"
    out: str = ""


def split_form(words: Sequence[str]) -> tuple[list[str], bool]:
    """The ``key=value`` words, and whether ``--as torch`` is among the words. Raises ValueError for
    another form."""
    if "--as" not in words:
        return list(words), False
    place = list(words).index("--as")
    if (form := " ".join(words[place + 1 : place + 2])) != "torch":
        raise ValueError(f"--as {form}: use torch")
    return [*words[:place], *words[place + 2 :]], True


def parse(words: Sequence[str]) -> tuple[Request, StageCost]:
    """Read ``key=value`` words; raises ValueError, in one line, for an unknown key or bad value."""
    kinds = {
        field.name: str if isinstance(field.default, str) else int for field in fields(Request)
    }
    values: dict[str, str | int] = {}
    costs: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in kinds and key not in _COSTS:
            known = [*kinds, *sorted(_COSTS)]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"{word}: unknown key ({hint})")
        try:
            if key in _COSTS:
                costs[key] = float(value)
            else:
                values[key] = int(value) if kinds[key] is int else value
        except ValueError:
            raise ValueError(f"{word}: needs a number") from None
    request = Request(**values)  # type: ignore[arg-type]
    cost = StageCost(**costs)
    _check(request, cost)
    return request, cost


def _check(request: Request, cost: StageCost) -> None:
    """Raise ValueError for a value out of its range, more actions than a plan may have, and a unit
    larger than a step."""
    stages = request.ranks * request.chunks
    if request.reduce_every not in ("unit", "step"):
        raise ValueError(f"reduce_every={request.reduce_every}: use unit or step")
    least = {"ranks": 1, "chunks": 1, "microbatches": 1, "unit": 1, "cap": 1, "prefetch": 0}
    for name, low in least.items():
        value = getattr(request, name)
        if value is not None and value < low:
            raise ValueError(f"{name}={value}: must be at least {low}")
        if value is not None and name in ("unit", "cap") and request.name != "zeropp":
            raise ValueError(f"{name}={value}: only name=zeropp has it")
    if request.microbatches > (most := most_microbatches(stages)):
        raise ValueError(
            f"microbatches={request.microbatches}: {stages} stages take at most {most} "
            "microbatches (use fewer)"
        )
    if request.unit is not None and request.unit > request.microbatches:
        raise ValueError(
            f"unit={request.unit}: must be at most microbatches={request.microbatches}"
        )
    for name in _COMPUTE:
        if not getattr(cost, name) > 0:
            raise ValueError(f"{name}={getattr(cost, name):g}: must be more than 0")
    longest = _MOST * min(getattr(cost, name) for name in _COMPUTE)
    for name in _COSTS:
        duration = getattr(cost, name)
        if not 0 <= duration <= longest:
            raise ValueError(
                f"{name}={duration:g}: must be from 0 to {longest:g} ({_MOST:g} times the shortest "
                "compute action)"
            )


def _compute(request: Request, cost: StageCost) -> tuple[Schedule, list[StageCost]]:
    """The compute actions asked for, and the durations of every stage."""
    costs = [cost] * (request.ranks * request.chunks)
    compute = build(
        request.name,
        num_ranks=request.ranks,
        chunks=request.chunks,
        num_microbatches=request.microbatches,
        unit=request.unit,
        activation_cap=request.cap,
        costs=costs,
    )
    return compute, costs


def show(request: Request, cost: StageCost, console: Console) -> Timeline:
    """Print the grid and its key numbers, and write files if ``out`` is given."""
    compute, costs = _compute(request, cost)
    schedule = lower(
        compute,
        gather=True,
        prefetch=request.prefetch,
        reduce_every="unit" if request.reduce_every == "unit" else "step",
    )
    tied = (0, compute.num_stages - 1) if cost.reduce_tied and compute.num_stages > 1 else ()
    schedule = with_step_end(
        schedule,
        StepEnd(cost.reduce_replicas > 0, tied, cost.gather_updated > 0, cost.gather_whole > 0),
    )
    validate(schedule)
    result = run(schedule, costs)
    print_grid(result, cost, console)
    ranks = range(request.ranks)
    peak = max(max(live_activations(schedule, rank)) for rank in ranks)
    resident = max(max(resident_chunks(schedule, rank)) for rank in ranks)
    console.print(f"step over ideal                 {result.over_ideal:.4f}")
    console.print(f"peak live chunk-activations     {peak}")
    console.print(f"gathered chunks resident        {resident}")
    title = f"{request.name}: pp={request.ranks} m={request.microbatches} V={request.chunks}"
    if request.name == "zeropp":
        title += f" U={schedule.unit}"
    title += f": step over ideal {result.over_ideal:.3f}"
    timeline = Timeline(title, "simulated", result.spans())
    if request.out:
        write(timeline, Path(request.out), console)
    return timeline


def show_for_torch(request: Request, cost: StageCost, out: TextIO, notes: Console) -> None:
    """Write the CSV that torch's runtime reads as ``compute_comms``, with what it keeps gathered
    beside what the engine would. Raises ValueError for a request that the form cannot keep."""
    if request.reduce_every != "unit" or request.out:
        raise ValueError(
            "--as torch: takes neither reduce_every=step nor out (redirect its output)"
        )
    compute, costs = _compute(request, cost)
    schedule = lower_for_torch(compute, prefetch=request.prefetch)
    engine = lower(compute, gather=True, prefetch=request.prefetch)
    ranks = range(request.ranks)
    gathered, least = (max(max(resident_chunks(s, r)) for r in ranks) for s in (schedule, engine))
    peak = max(max(live_activations(schedule, rank)) for rank in ranks)
    gathers = max(Counter(a for p in schedule.programs for a in p if a.op is Op.UNSHARD).values())
    out.write(schedule.to_csv())
    notes.print(f"step over ideal                 {run(schedule, costs).over_ideal:.4f}")
    notes.print(f"peak live chunk-activations     {peak}")
    notes.print(f"gathered chunks resident        {gathered} (ZeroPP's engine: {least})")
    notes.print(f"gathers of a stage per step     at most {gathers}")


def print_grid(result: EventResult, cost: StageCost, console: Console) -> None:
    """Print one line per rank and one column per time slot, as long as the shortest compute action.

    A dot means idle. If the actions' names do not fit into a line, their kinds alone are printed,
    in blocks below each other where these do not fit either.
    """
    from rich.text import Text

    slot = min(cost.forward, cost.backward_input, cost.backward_weight)
    compute = [span for span in result.spans() if span.lane == "compute"]
    ranks = range(len(result.programs))
    wide = max((len(_name(span)) for span in compute), default=1)
    rows = [_cells([span for span in compute if span.rank == r], slot, wide) for r in ranks]
    gap, width = " ", console.width if console.is_terminal else _LOG_WIDTH
    if 8 + max(map(len, rows)) * (wide + 1) > width:
        rows, gap = [_cells([s for s in compute if s.rank == r], slot, 1) for r in ranks], ""
    most = max(map(len, rows))
    fitting = most if gap else max(width - 8, 1)
    for first in range(0, most, fitting):
        if most > fitting:
            last = min(first + fitting, most)
            console.print(f"columns {first + 1} to {last} of {most}", style="dim", highlight=False)
        for rank, cells in enumerate(rows):
            shown = Text(gap).join(Text(*cell) for cell in cells[first : first + fitting])
            line = Text(f"rank {rank:<3}").append(shown)
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
    kinds = {_letter(span) for span in compute}
    legend = Text("       ")
    for kind in sorted(kinds, key=list(_WORDS).index):
        legend.append(f" {kind} ", _STYLES[kind]).append(f" {_WORDS[kind]}  ")
    console.print(legend.append("·", "dim").append(" idle"))
    if gap:
        console.print("       2F0: forward of stage 2 for microbatch 0", highlight=False)


def _cells(spans: Sequence[Span], slot: float, wide: int) -> list[tuple[str, str]]:
    """One rank's cells of ``wide`` characters each, with their styles: an action's name, or its
    kind if ``wide`` is 1."""
    cells: list[tuple[str, str]] = []
    for span in spans:
        idle = max(0, round(span.start_s / slot) - len(cells))
        cells += [("·".center(wide), "dim")] * idle
        kind = _letter(span)
        name = _name(span) if wide > 1 else kind
        length = max(1, round((span.end_s - span.start_s) / slot))
        cells.append((name.ljust(wide), _STYLES[kind]))
        cells += [(" " * wide, _STYLES[kind])] * (length - 1)
    return cells


def _letter(span: Span) -> str:
    """The kind of an action as one letter."""
    op = parse_action(span.action).op
    return _LETTERS.get(op, op.value)


def _name(span: Span) -> str:
    action = parse_action(span.action)
    return f"{action.stage}{_LETTERS[action.op]}" if action.op in _LETTERS else span.action


def write(timeline: Timeline, out: Path, console: Console) -> None:
    """Write ``timeline.png``, ``timeline.svg`` and ``timeline.json`` into a folder; raises
    SpecError where that would replace a file that no report has written."""
    from benchmarks.report.timelines import timeline_figure
    from benchmarks.report.write import report_folder

    check_writable("out", out)
    figure = timeline_figure([timeline], time_unit="one forward of a chunk")
    with report_folder(out, _MANIFEST) as folder:
        for kind in ("png", "svg"):
            figure.savefig(folder / f"timeline.{kind}", dpi=_PIXELS_PER_INCH)
        timeline.write_chrome(folder / "timeline.json")
    console.print(f"wrote {out}/timeline.png, .svg and .json (for ui.perfetto.dev)", soft_wrap=True)


@command
def main() -> int:
    """Run the command line; the exit status is 2, with one line why, if nothing can be shown."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    from rich.console import Console

    try:
        if not words or words[0] != "schedule":
            raise ValueError("what to show? zeropp show schedule [key=value ...] (see --help)")
        words, for_torch = split_form(words[1:])
        if for_torch:
            show_for_torch(*parse(words), sys.stdout, Console(stderr=True))
        else:
            show(*parse(words), Console())
    except (ScheduleError, BrokenPipeError):
        raise  # a generator at fault, not the request; a reader that has gone
    except (ValueError, OSError) as error:
        raise SpecError(str(error)) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
