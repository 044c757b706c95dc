"""A replay runs one of the ranks that do the same: another shard, replica or tensor-parallel rank
of a stage issues what the first one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.specification.contenders import CONTENDERS
from tests.gloo.cases import request
from zeropp.emulate.log import Issued
from zeropp.emulate.trace import trace_ranks
from zeropp.types.training import OptimizerConfig

ASKED = [
    {"name": "zeropp", "pp": 2, "shard": 2, "replicate": 2, "replicate_zero": 1, "chunks": 2},
    {"name": "torch_pp", "pp": 2, "tp": 2, "shard": 2, "schedule": "1f1b"},
]


def last_step(log: Sequence[Issued]) -> list[Issued]:
    """What a rank issues in the step that a replay is of."""
    places = [index for index, issued in enumerate(log) if issued.kind == "place"]
    return list(log[places[-2] : places[-1]])


def shape_of(log: Sequence[Issued]) -> list[object]:
    """The last step of a log without the names of ranks: streams and events are numbered as they
    appear."""
    numbers: dict[object, int] = {}
    return [
        (
            one.kind,
            numbers.setdefault(one.stream, len(numbers)),
            numbers.setdefault(one.event, len(numbers)),
            [(part.ranks, part.content, part.moved) for part in one.parts],
            one.kernel,
        )
        for one in last_step(log)
    ]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked["name"])
def test_ranks_of_one_stage_issue_the_same(asked: dict[str, Any]) -> None:
    plan = request(8, asked).plan()
    place = plan.layout.coordinates(0)
    alike = [r for r in range(8) if plan.layout.coordinates(r)["pp"] == place["pp"]]
    ranks = [alike[0], alike[-1]]  # which differ on every other axis
    program = CONTENDERS[plan.contender]
    first, last = trace_ranks(plan, ranks, optimizer=OptimizerConfig(), program=program, steps=2)
    assert len(shape_of(first.log)) > 100
    assert shape_of(first.log) == shape_of(last.log)
