"""torchtitan 0.3 itself: its configurations are read, it takes the answer, and it trains in
ZeroPP's order. Training needs the torch that it wants. Triton, which torch's CPU build comes
without, is imported for the kernels of one communication of experts alone, so that this module is
left out where there is no Triton."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks import CHECKOUT
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import written_as
from zeropp.choose.task import Candidate

pytest.importorskip("torchtitan")
WORDS = "--parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 4"
WORDS += " --parallelism.pipeline_parallel_schedule Interleaved1F1B --training.local_batch_size 8"
WORDS += " --parallelism.context_parallel_degree 2 --training.disable_cuda_graphs"
GIVEN = ["num_gpus=64", "cluster=h100"]


@pytest.fixture
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:
        kernels = "torchtitan.distributed.minimal_async_ep.kernels"
        monkeypatch.setitem(sys.modules, kernels, MagicMock())


def asked_with(words: list[str]) -> Question:
    """A configuration of torchtitan's own, with more words."""
    return ask(["llama3:llama3_8b"], GIVEN, words)


@pytest.mark.usefixtures("_without_triton")
def test_its_configuration_is_read_and_takes_the_answer() -> None:
    asked = asked_with([*WORDS.split(), "activation-checkpoint:full"])
    knobs = {
        name: getattr(asked.knobs, name) for name in ("tp", "pp", "context", "shard", "chunks")
    }
    assert knobs == {"tp": 2, "pp": 4, "context": 2, "shard": 4, "chunks": 2}
    plan = asked.contender.size(asked.task, asked.knobs, asked.microbatch_size)
    words = written_as("torchtitan", plan, Candidate(asked.knobs, plan.microbatch_size)).split()
    again = asked_with(words)  # torchtitan's ConfigManager makes its job configuration of them
    assert (again.knobs, again.task) == (asked.knobs, asked.task)
    assert again.reading.traits == asked.reading.traits
    assert asked.reading.named == asked_with([]).reading.named == []  # nothing is unknown


def test_it_trains_in_zeropps_order(tmp_path: Path) -> None:
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    takes_microbatches = "arg_mbs" in signature(schedules.PipelineScheduleMulti.step).parameters
    if not takes_microbatches or hasattr(schedules, "WAIT_REDUCE_GRAD"):
        pytest.skip("torchtitan 0.3 needs torch 2.14, and the file is not for 2.15")
    command = ["bash", "scripts/examples/torchtitan/run.sh", str(tmp_path)]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": "."}
    run = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    own, torchs = run.stdout.split("torchtitan's Interleaved1F1B:\n")
    assert own.splitlines()[1:] == torchs.splitlines()
    assert "step:  4" in torchs
