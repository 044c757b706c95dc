"""The example scripts on four ranks, with the losses that one rank alone has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.gloo.world import World

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
TEXT = Path(__file__).parents[2] / "benchmarks" / "data" / "kjv_genesis_psalms.txt"


def run_example(name: str, arguments: list[str]) -> list[float]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses: list[float] = module.main([*arguments, "--steps", "4"])
    return losses


@pytest.mark.parametrize(
    ("name", "arguments"), [("train_gpt", [str(TEXT)]), ("train_hf_llama", [])]
)
def test_losses_are_those_of_one_process(name: str, arguments: list[str], world: World) -> None:
    alone = [*arguments, "--pp", "1", "--shard", "1"]
    (expected,) = world.run(run_example, name, alone, size=1, timeout_s=120)
    for losses in world.run(run_example, name, arguments, size=4, timeout_s=120):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
