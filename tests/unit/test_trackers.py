"""Records as runs of TensorBoard and Weights & Biases, through stand-ins of their libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.report.trackers import to_tensorboard, to_wandb
from benchmarks.specification import SpecError
from tests.unit.synthetic_records import make_record, write_records


class Run:
    """What wandb.init gives: it keeps what it is told."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.summary: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged[step] = values

    def finish(self) -> None:
        self.finished = True


def test_every_record_is_a_run_with_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    norms = [1.0 / step for step in range(1, 9)]
    record = make_record(step_s=[2.0] * 6, fields={"warmup_s": [5.0] * 2, "grad_norms": norms})
    write_records([record, make_record("deepspeed_3d")], tmp_path)
    torn = tmp_path / "torn" / "record.json"
    torn.parent.mkdir()
    torn.write_text("{")
    started: list[tuple[dict[str, Any], Run]] = []

    def init(**options: Any) -> Run:
        started.append((options, Run()))
        return started[-1][1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert to_wandb([tmp_path], "mine") == 2
    options, run = next(pair for pair in started if pair[0]["name"] == record.record_id)
    assert (options["project"], options["config"]) == ("mine", record.spec)
    assert [values["step_s"] for values in run.logged.values() if "step_s" in values] == (
        [5.0] * 2 + [2.0] * 6
    )
    assert [values["loss"] for values in run.logged.values()] == record.losses
    assert [run.logged[step]["grad_norm"] for step in range(1, 9)] == norms
    assert run.logged[3]["tokens_per_s_per_gpu"] == run.summary["tokens_per_s_per_gpu"]
    assert run.summary["step_s"] == 2.0
    assert "mfu" not in run.summary  # a CPU has no known peak
    assert run.finished
    assert f"{torn}: not readable as JSON" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_library_that_is_not_there_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # an import of it raises ImportError
    with pytest.raises(SpecError, match=f"--{name}: {name} is not installed .pip install {name}."):
        to_wandb([tmp_path], "mine") if name == "wandb" else to_tensorboard([tmp_path], tmp_path)
