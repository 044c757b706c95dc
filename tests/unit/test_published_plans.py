"""What was measured beats what was searched: every published plan of a program is tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.report import searches
from benchmarks.report.ratio_errors import priced_runs
from benchmarks.report.searches import best_of, published_plans
from benchmarks.specification.contenders import PRICED, ROWS
from benchmarks.validation.rows import METRICS, SPEEDS, PublishedRow, read_rows, training_tables
from benchmarks.validation.stated import preset_of
from zeropp.choose.bounds import least_bytes
from zeropp.choose.outcome import Outcome
from zeropp.choose.search import _Search
from zeropp.choose.task import Candidate, Task
from zeropp.price.programs import program_named

Run = tuple[str, Task, PublishedRow, str]


@cache
def runs() -> list[Run]:
    """The contender and the task of every published run in 16 bits that ``tune`` can be asked for,
    on GPUs as the preset has them; Megatron pads its vocabulary."""
    rows = {line.place: line.row for path in training_tables() for line in read_rows(path)}
    found = []
    for run in priced_runs():
        row = rows[run["place"]]
        assert row is not None
        if row.dtype not in ("bf16", "fp16") or METRICS[run["metric"]].kind not in SPEEDS:
            continue
        cluster = preset_of(row.device)
        memory_gib = cluster.device.memory_gib
        if row.device == "stated" or abs((row.memory_gib or memory_gib) / memory_gib - 1) > 0.05:
            continue
        padded = -(-row.shape.vocab // (128 * row.tp)) * 128 * row.tp
        task = Task(
            shape=replace(row.shape, vocab=padded),
            cluster=cluster,
            num_gpus=row.num_gpus,
            global_batch=row.global_batch,
        )
        found += [
            (name, task, row, run["place"])
            for name, of in PRICED.items()
            if row.program in of.published_as and has_such_plans(name, row)
        ]
    return found


def own_plan(run: Run) -> Candidate[Any] | None:
    """The run's plan among those that are tried for its task."""
    name, task, row, place = run
    types = PRICED[name].types_as("users", "bf16")
    for candidate, other in published_plans(task, PRICED[name], types):
        if other["place"] == place:
            own = [getattr(candidate.knobs, axis, 1) for axis in ("tp", "pp", "context")]
            assert own == [row.tp, row.pp, row.cp]
            return candidate
    return None


def has_such_plans(name: str, row: PublishedRow) -> bool:
    """FSDP2 has no tensor parallelism, and DeepSpeed 3D always has it."""
    three = row.tp > 1 and row.pp > 1
    return {"fsdp": row.tp * row.pp == 1 and row.zero == 3, "deepspeed_3d": three}.get(name, True)


def known_alone(
    task: Task, contender: Any, asked: Any, size: Any, *, known: Iterable[Any], **_: Any
) -> Outcome[Any]:
    """A search whose budget is over once the known plans have been tried."""
    tuning = _Search(task, contender, asked, False)
    tuning.begin(known)
    return tuning.outcome


def test_programs_of_published_rows_are_in_the_registry() -> None:
    for contender in PRICED.values():
        assert all(program_named(name).name == name for name in contender.published_as)


def test_every_published_plan_is_in_the_space_of_its_program() -> None:
    missing = [(run[0], run[3]) for run in runs() if own_plan(run) is None]
    assert missing == []
    assert len(runs()) > 500


def slower_than_published(chosen: Iterable[Run]) -> list[tuple[str, str]]:
    """The runs whose own plan, as priced, is faster than the best one that a search gives that
    begins with published plans, and finds nothing else."""
    found = []
    for run in chosen:
        name, task, _, place = run
        best, own = best_of(task, ROWS[name]).winner, own_plan(run)
        assert own is not None
        own_s = PRICED[name].simulated(task, own).step_s
        if best is None or best.step_s > own_s:
            found.append((name, place))
    return found


def fullest(count: int) -> list[Run]:
    """Of every program the runs with the most bytes for their device."""

    def share(run: Run) -> float:
        name, task, *_ = run
        contender, own = PRICED[name], own_plan(run)
        assert own is not None
        plan = contender.size(task, own.knobs, own.microbatch_size)
        held = contender.prices.memory(plan, task.cluster)
        return least_bytes(plan, held) / task.cluster.device.usable_bytes

    by_name: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs():
        by_name[run[0]].append(run)
    return [run for own in by_name.values() for run in sorted(own, key=share)[-count:]]


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "search", known_alone)


def test_the_best_plan_is_not_slower_than_a_published_one() -> None:
    chosen = fullest(4) + runs()[::40]
    assert slower_than_published(chosen) == []


def test_with_the_margin_of_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_margin = [run for run in fullest(4) if run[0] == "megatron_core"]
    monkeypatch.setattr(searches, "_ran", lambda *_: False)
    found = best_of
    monkeypatch.setitem(globals(), "best_of", lambda *given: found(*given, memory_margin=0.19))
    assert slower_than_published(with_margin) != []


@pytest.mark.evidence
@pytest.mark.parametrize("part", range(8))
def test_no_best_plan_is_slower_than_a_published_one(part: int) -> None:
    assert slower_than_published(runs()[part::8]) == []
