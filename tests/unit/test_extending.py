"""docs/extending.md: its worked example of a contender is executed as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
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

PAGE = (CHECKOUT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## A contender\n")[2].partition("\n## ")[0]
# Where tests go through all contenders, and which of them are asked of the example; another is in
# tests/gloo/test_gate.py.
TESTS = {
    "test_auto.py": "gpipe",
    "test_offers.py": "test_some_blocks or test_every_contender",
    "test_one_price.py": "gpipe",
    "test_predicted_memory.py": "gpipe",
    "test_programs.py": "test_tuner_and_contenders",
    "test_tune.py": "gpipe",
    "test_tune_bounds.py": "gpipe",
    "test_verdict.py": "gpipe",
}


def blocks(language: str) -> list[str]:
    """The page's blocks of code for a contender."""
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def contender_file() -> str:
    parts = blocks("python")
    assert len(parts) == 5
    return "\n\n".join(parts)


def registered_example(monkeypatch: pytest.MonkeyPatch) -> Contender[Any]:
    """The example's contender, which is registered until a test ends."""
    module = ModuleType("gpipe_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(contender_file(), "docs/extending.md", "exec"), vars(module))
    contender: Contender[Any] = module.GPIPE
    monkeypatch.setitem(CONTENDERS, contender.name, contender)
    return contender


gpipe = pytest.fixture(registered_example)


def spec_of(**knobs: object) -> Any:
    return spec_from_mapping(spec_values() | {"contender": {"name": "gpipe", **knobs}})


def test_a_point_of_it_is_planned_and_simulated(gpipe: Contender[Any]) -> None:
    spec = spec_of(pp=2, shard=1)
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


def extended(root: Path) -> None:
    """Make a copy of the checkout to which the page's steps were applied."""
    for name in ("baselines", "benchmarks", "conf", "tests", "zeropp"):
        shutil.copytree(CHECKOUT / name, root / name)
    for name in ("docs", "pyproject.toml", "results"):
        (root / name).symlink_to(CHECKOUT / name)
    folder = root / "baselines" / "gpipe"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""GPipe."""\n', encoding="utf-8")
    (folder / "contender.py").write_text(contender_file(), encoding="utf-8")
    (knobs,), (diff,) = blocks("yaml"), blocks("diff")
    (root / "conf" / "contender" / "gpipe.yaml").write_text(knobs, encoding="utf-8")
    file = root / "benchmarks" / "specification" / "contenders.py"
    text, before = file.read_text(encoding="utf-8"), ""
    for line in diff.splitlines():
        if line.startswith("+"):
            assert text.count(before) == 1, before
            text = text.replace(before, f"{before}{line[1:]}\n")
        before = f"{line[1:]}\n"
    file.write_text(text, encoding="utf-8")


def test_with_it_the_tests_of_all_contenders_pass(tmp_path: Path) -> None:
    extended(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    files = [f"tests/unit/{name}" for name in TESTS]
    chosen = " or ".join(f"({Path(name).stem} and ({words}))" for name, words in TESTS.items())
    python = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*python, *files, "-k", chosen], cwd=tmp_path, env=environment, capture_output=True
    )
    printed = ran.stdout.decode()
    assert ran.returncode == 0, printed[-3000:]
    found = re.search(r"(\d+) passed", printed)
    assert found is not None
    assert int(found[1]) >= 13, printed[-300:]
