"""What a planner refuses: knobs that its contender lacks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from zeropp.plan import Settings
from zeropp.planner.zeropp_plan import refuse

_ZEROPP_ALONE = (
    "unit",
    "activation_cap",
    "activation_cap_gib",
    "replicate_every",
    "reduce_dtype",
    "keep",
)


def refuse_knobs(
    settings: Settings, contender: str, refusals: Mapping[str, tuple[bool, str]]
) -> None:
    """Refuse what ``refusals`` say (see ``zeropp.planner.refuse``), and ZeroPP's own knobs."""
    own = {field.name: field.default for field in fields(Settings) if field.name in _ZEROPP_ALONE}
    alone = {
        name: (getattr(settings, name) != default, f"a knob of zeropp's alone (use {default})")
        for name, default in own.items()
    }
    refuse(settings, {**refusals, **alone}, contender)
