"""The tuner: its bounds hold, its search finds what brute force finds, its command line is kind."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.tune import main
from tests.unit.simulated_task import task
from zeropp.tune.bound import least_bytes, least_step_s, work_s
from zeropp.tune.search import OOM, result_of, search
from zeropp.tune.sized_plans import sized_plan
from zeropp.tune.space import SPACES, Candidate, Task, families, members

SMALL = replace(
    task(8, 16), shape=replace(task().shape, layers=8, hidden=2048, heads=16, kv_heads=16, ffn=8192)
)


def everything(name: str, what: Task) -> list[Candidate]:
    space = SPACES[name]
    found = families(what, space, Counter())
    return [member for family in found for member in members(space, family)]


@pytest.mark.parametrize("name", list(SPACES))
def test_bounds_hold_and_the_winner_is_the_best_of_all(name: str) -> None:
    best = float("inf")
    for candidate in everything(name, SMALL):
        result = result_of(SMALL, candidate)
        price, peak, step = result.price, result.peak_bytes, result.step_s
        assert least_bytes(sized_plan(SMALL, candidate), price, candidate) <= peak, candidate
        assert least_step_s(sized_plan(SMALL, candidate), price) <= step * (1 + 1e-9), candidate
        assert work_s(SMALL, candidate) <= step * (1 + 1e-9), candidate
        if peak <= SMALL.cluster.device.usable_bytes:
            best = min(best, step)
    winner = search(SMALL, SPACES[name], tolerance=0.0).winner
    assert winner is not None
    assert winner.step_s == pytest.approx(best)


def test_winner_fits_and_runner_up_is_another_plan_and_no_faster() -> None:
    outcome = search(task(), SPACES["deepspeed_3d"])
    assert outcome.winner is not None
    assert outcome.runner_up is not None
    assert outcome.winner.peak_bytes <= task().cluster.device.usable_bytes
    assert outcome.winner.step_s <= outcome.runner_up.step_s
    assert outcome.winner.degrees != outcome.runner_up.degrees
    assert outcome.fallen[OOM] > 0


def test_what_no_planner_would_plan_is_not_tried() -> None:
    fallen: Counter[str] = Counter()
    many = task(8, 8 * 2**18)
    found = [*families(many, SPACES["zeropp"], fallen)]
    assert fallen["more microbatches than can be planned"] > 0
    assert all(f.num_microbatches * f.layout.pp * f.layout.chunks <= 2**18 for f in found)


def test_nothing_fits_on_too_few_gpus() -> None:
    four = task(4, 8)
    device = replace(four.cluster.device, memory_gib=32)
    small = replace(four, cluster=replace(four.cluster, device=device))
    outcome = search(small, SPACES["zeropp"])
    assert outcome.winner is None
    assert outcome.fallen[OOM] > 0


def test_the_baseline_may_use_all_that_its_software_has() -> None:
    layouts = [c.layout for c in everything("best_3d", task(16, 32))]
    assert {layout.tp for layout in layouts} == {1, 2, 4, 8}
    assert any(layout.sequence_parallel for layout in layouts)
    assert any(layout.replicate_zero for layout in layouts)
    assert {c.schedule for c in everything("deepspeed_3d", task(16, 32))} == {"1f1b"}


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ("num_gpus=x", "num_gpus"),
        ("contenders=[abc]", "contenders"),
        ("contenders=[]", "contenders=[]: must be some of"),
        ("model.heads=7", "model.heads=7: must divide model.hidden"),
        ("cluster.group_shares=[0,0]", "cluster.group_shares=0.0: must be more than 0"),
        ("foo=1", "foo"),
        ("cluster=cpu_gloo", "cpu_gloo"),
    ],
)
def test_bad_input_ends_with_2_and_one_line(
    argument: str, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.tune", argument])
    assert main() == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert printed.out == ""
