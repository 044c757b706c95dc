"""The spelling of cells in published tables: one per type, and all others are refused."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field

from benchmarks.specification.run_spec import validated
from zeropp.contender.knobs import ZeroppKnobs

_WHOLE = re.compile(r"[0-9]{1,15}")
# ZeroPP's knobs that no other column says.
_OWN_KNOBS = (
    "unit", "activation_cap", "replicate_zero", "reduce_every", "replicate_every", "prefetch",
    "keep", "stage_style", "split_blocks", "split_backward", "placement",
)  # fmt: skip
_DECIMAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]+)?(?:e[-+]?[0-9]{1,2})?")


def _whole(cell: Any) -> int:
    if isinstance(cell, str) and _WHOLE.fullmatch(cell):
        return int(cell)
    raise ValueError("must be a whole number in digits only, for example 8192")


def _decimal(cell: Any) -> float:
    if isinstance(cell, str) and _DECIMAL.fullmatch(cell) and math.isfinite(float(cell)):
        return float(cell)
    raise ValueError("must be a number in digits with at most a point, for example 41.5")


def _yes_or_no(cell: Any) -> bool:
    if cell in ("yes", "no"):
        return bool(cell == "yes")
    raise ValueError("must be yes or no")


def _not_blank(cell: Any) -> str:
    if isinstance(cell, str) and cell.strip():
        return cell
    raise ValueError("must not be blank")


def _stage_cuts(cell: Any) -> tuple[float, ...]:
    """The places at which stages begin, and the end of the last one."""
    words = str(cell).split(" ")
    if all(re.fullmatch(r"[0-9]{1,6}(\.5)?", word) for word in words):
        return tuple(map(float, words))
    raise ValueError("must be numbers of pieces with one space between them, such as 0 13.5 26")


def _own_knobs(cell: Any) -> ZeroppKnobs:
    """The knobs that a cell states, all others at their defaults."""
    stated = [word.partition("=")[::2] for word in str(cell).split()]
    for name, value in stated:
        if name not in _OWN_KNOBS or not value:
            raise ValueError(f"{name!r} must be one of {', '.join(_OWN_KNOBS)}, with its value")
    return validated(ZeroppKnobs, OmegaConf.to_container(OmegaConf.from_dotlist(cell.split())))


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Decimal = Annotated[float, BeforeValidator(_decimal), Field(gt=0)]
YesNo = Annotated[bool, BeforeValidator(_yes_or_no)]
Text = Annotated[str, BeforeValidator(_not_blank)]
StageCuts = Annotated[tuple[float, ...], BeforeValidator(_stage_cuts)]
OwnKnobs = Annotated[ZeroppKnobs, BeforeValidator(_own_knobs)]
