"""What ``parallelize`` refuses before it looks at the layers, and without a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from zeropp.engine.settings import Settings
from zeropp.types.layout import InfeasibleError

CONFIGURATIONS = [
    {"kind": "SGD"},
    {"lr": -1.0},
    {"clip_norm": -1.0},
    {"clip_norm": "1"},
    {"beta2": 1.0},
    {"eps": float("nan")},
]


@pytest.mark.parametrize("wrong", CONFIGURATIONS, ids=str)
def test_an_optimizer_configuration_is_checked(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*: must be ") as error:
        zeropp.OptimizerConfig(**wrong)
    assert "\n" not in str(error.value)


def never() -> nn.Module:
    raise AssertionError("a layer was built")


def raised(knobs: dict[str, Any]) -> Exception:
    with pytest.raises((InfeasibleError, TypeError)) as error:
        Settings(**{"sample": torch.zeros(1, 2), "global_batch": 4, **knobs})
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("field", "value", "way_out"),
    [
        ("prefetch", -3, "at least 0"),
        ("reduce_every", "bogus", "must be one of 'unit', 'step'"),
        ("chunks", 0, "at least 1"),
        ("chunks", True, "must be a whole number"),
        ("pp", 1.5, "must be a whole number"),
        ("replicate_zero", 2, "must be one of 0, 1"),
        ("compile", "yes", "must be True or False"),
        ("tied", (0, 4), "must be tuple[tuple[int, str], tuple[int, str]]"),
        ("mesh", "pp", "must be a DeviceMesh"),
        ("global_batch", 2.5, "must be a whole number"),
    ],
)
def test_no_value_is_ignored(field: str, value: object, way_out: str) -> None:
    error = raised({field: value})
    assert isinstance(error, InfeasibleError)
    assert str(error).startswith(f"{field}={value!r}: ")
    assert way_out in str(error)


@pytest.mark.parametrize("field", ["tp", "sequence_parallel", "schedule", "stage_style"])
def test_an_argument_that_there_is_not_is_a_type_error(field: str) -> None:
    error = raised({field: 2})
    assert isinstance(error, TypeError)
    assert f"unexpected keyword argument {field!r}" in str(error)


def test_no_process_group_is_said() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        zeropp.parallelize(
            [never] * 4, lambda y, _: y.sum(), sample=torch.zeros(1, 2), global_batch=4
        )
