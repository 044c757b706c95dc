"""What ``parallelize`` refuses, before anything is built and with no process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from zeropp.layout import InfeasibleError


def never() -> nn.Module:
    raise AssertionError("a layer was built")


def refused(knobs: dict[str, Any]) -> str:
    with pytest.raises(InfeasibleError) as error:
        zeropp.parallelize(
            [never] * 4, lambda y, _: y.sum(), sample=torch.zeros(1, 2), global_batch=4, **knobs
        )
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("field", "value", "way_out"),
    [
        ("tp", 2, "no such knob (known: pp, shard"),
        ("sequence_parallel", True, "no such knob"),
        ("schedule", "1f1b", "no such knob"),
        ("activation_cap_gib", 0.0001, "no such knob"),
        ("keep", -1, "at least 0"),
        ("prefetch", -3, "at least 0"),
        ("replicate_every", "bogus", "must be one of 'unit', 'step'"),
        ("chunks", 0, "at least 1"),
        ("chunks", True, "must be a whole number"),
        ("pp", "auto", "must be a whole number"),
        ("replicate_zero", 2, "must be one of 0, 1"),
        ("compile", "yes", "must be one of False, True"),
    ],
)
def test_no_knob_is_ignored(field: str, value: object, way_out: str) -> None:
    message = refused({field: value})
    assert message.startswith(f"{field}={value!r}: ")
    assert way_out in message


def test_a_cap_too_small_for_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    assert refused({"chunks": 2, "unit": 4, "activation_cap": 3}).startswith(
        "activation_cap=3: a unit of 4 microbatches in 2 chunks needs at least 5"
    )
