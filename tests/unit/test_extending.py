"""docs/extending.md: its worked example of a contender is executed as it stands there."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.simulated_task import task
from tests.unit.synthetic_records import spec_values
from zeropp.choose.contender import Contender, any_auto
from zeropp.choose.search import search
from zeropp.price.simulator import simulate


@pytest.fixture
def gpipe(monkeypatch: pytest.MonkeyPatch) -> Contender[Any]:
    """The example's contender, registered."""
    page = (CHECKOUT / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    module = ModuleType("gpipe_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for block in blocks:
        exec(compile(block, "docs/extending.md", "exec"), vars(module))
    contender: Contender[Any] = module.GPIPE
    monkeypatch.setitem(CONTENDERS, contender.name, contender)
    return contender


def spec_of(**knobs: object) -> Any:
    return spec_from_mapping(spec_values() | {"contender": {"name": "gpipe", **knobs}})


def test_a_point_of_it_is_planned_and_simulated(gpipe: Contender[Any]) -> None:
    spec = spec_of(pp=2)
    plan = spec.plan()
    assert (plan.layout.pp, plan.layout.replicate) == (2, spec.num_gpus // 2)
    assert plan.schedule.name == "gpipe"
    result = simulate(plan, spec.cluster)
    assert result.step_s > 0.0
    assert 0.0 < result.bubble < 1.0
    assert spec_from_mapping(spec.to_dict()) == spec


def test_it_is_tuned_like_the_others(gpipe: Contender[Any]) -> None:
    what = task(16, 64)
    winner = search(what, gpipe, runner_up=False).winner
    assert winner is not None
    assert winner.step_s == gpipe.simulated(what, winner.candidate).step_s
    assert not any_auto(winner.candidate.knobs)


def test_its_knobs_are_checked(gpipe: Contender[Any]) -> None:
    with pytest.raises(SpecError, match=r"contender.pp=0: must be at least 1"):
        spec_of(pp=0)
    with pytest.raises(SpecError, match=r"has no such knob \(did you mean contender.recompute"):
        spec_of(recomputed="full")
