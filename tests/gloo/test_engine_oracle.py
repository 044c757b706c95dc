"""Our programs in text form, run by torch's own pipeline runtime: the same gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from baselines.model import build_piece
from baselines.torch_pp.private_names import Runtime, load_programs
from tests.gloo.cases import SEED, Case, loss_function, train, worst_error
from tests.gloo.world import World
from zeropp.schedule.program import Op
from zeropp.types.training import OptimizerConfig

SGD = OptimizerConfig(kind="sgd", lr=0.1)


class Stage(nn.Module):
    """Pieces of one stage, called one after another."""

    def __init__(self, case: Case, pieces: range) -> None:
        super().__init__()
        self.pieces = nn.ModuleDict({str(i): build_piece(case.shape, i, SEED) for i in pieces})

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces.values():
            x = piece(x)
        return x


def run_by_torch(case: Case, programs: Path) -> dict[str, Tensor]:
    """Gradients of this rank's stages after one step of torch's runtime."""
    plan, rank = case.plan(), dist.get_rank()
    count = plan.schedule.num_stages
    modules = {s: Stage(case, plan.pieces_of(s)) for s in plan.schedule.stages_of(rank)}
    stages = [PipelineStage(m, s, count, torch.device("cpu")) for s, m in modules.items()]
    count_m = plan.num_microbatches
    runtime = Runtime(stages, count_m, loss_fn=loss_function)  # type: ignore[no-untyped-call]
    load_programs(runtime, programs)
    inputs, targets = case.data(0)
    arguments = (inputs,) if rank == 0 else ()
    last = plan.schedule.stage_rank[-1] == rank
    runtime.step(*arguments, target=targets if last else None)
    return {
        name.removeprefix("pieces."): parameter.grad
        for module in modules.values()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, chunks=2, unit=2, batch=6),
        Case(pp=2, chunks=3, unit=4, batch=8, layers=6, cap=9),
        Case(pp=4, chunks=2, unit=4, batch=8, layers=8),
    ],
    ids=["2x2", "2x3", "4x2"],
)
def test_torch_runs_our_program_to_the_same_gradients(
    case: Case, world: World, tmp_path: Path
) -> None:
    schedule = case.plan().schedule
    compute = [tuple(a for a in program if a.op.is_compute) for program in schedule.programs]
    assert any(a.op is Op.BACKWARD_WEIGHT for a in compute[0])
    path = tmp_path / "programs.csv"
    path.write_text(replace(schedule, programs=tuple(compute)).to_csv())
    ours = world.run(train, case, torch.float32, 1, SGD, size=case.pp)
    theirs = world.run(run_by_torch, case, path, size=case.pp)
    for found, expected in zip(ours, theirs, strict=True):
        assert set(found.gradients) == set(expected)
        assert worst_error(found.gradients, expected) < 1e-5
