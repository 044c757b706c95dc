"""A rank alone, and ranks that are more than the GPUs of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

from benchmarks.launch import local
from benchmarks.launch.options import LocalOptions
from benchmarks.launch.points import plan_point
from benchmarks.specification import SpecError
from tests.unit.toy_spec import SWEEP, spec_of
from zeropp.emulate.world import fake_world
from zeropp.engine.ranks import collectives


def test_a_lone_rank_reads_nothing_that_was_never_written() -> None:
    """What torch's fake group of 2.11 leaves as it was allocated."""
    sent = torch.arange(8.0)
    with fake_world(rank=1, size=4):
        part = torch.full((2,), torch.nan)
        collectives.reduce_scatter_single(part, sent)
        assert part.tolist() == [2.0, 3.0]
        collectives.reduce_scatter_single(output=part.fill_(torch.nan), input=sent, group=None)
        assert part.tolist() == [2.0, 3.0]
        world = dist.group.WORLD
        assert world is not None
        functional = functional_collectives.reduce_scatter_tensor(sent, "sum", 0, world)
        assert functional.tolist() == [2.0, 3.0]
        taken = torch.full((10,), torch.nan)
        dist.all_to_all_single(taken, sent, [4, 2, 2, 2], [2, 2, 2, 2])
        assert bool(taken.isfinite().all())


def test_more_ranks_than_gpus_are_refused_unless_they_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = plan_point(spec_of())
    monkeypatch.setattr(local, "_gpus", lambda: [Path("/dev/nvidia0")])
    with pytest.raises(SpecError, match=r"^num_gpus=4: this machine has 1 \(launcher.share_gpu="):
        local.check([point], LocalOptions(), SWEEP)
    local.check([point], LocalOptions(share_gpu=True), SWEEP)
