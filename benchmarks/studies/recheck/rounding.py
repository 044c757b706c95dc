"""Whether two texts of a cell are equal except for rounding, and what changed in a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation

from benchmarks.studies.recheck.again import Computed, Row

_SLACK = 1.01  # units in the last digit: a half per side, and a little for binary fractions


def differences(stored: Row, computed: Computed) -> dict[str, tuple[str, str]]:
    """The columns in which a stored row differs from what was computed, as (stored, computed)."""
    return {
        name: (stored.get(name, ""), _text(value))
        for name, value in computed.items()
        if not same(stored.get(name, ""), _text(value))
    }


def same(stored: str, computed: str) -> bool:
    """Whether two texts are equal, or are numbers that agree to the last digit of the coarser
    one."""
    if stored == computed:
        return True
    a, b = _number(stored), _number(computed)
    if a is None or b is None:
        return False
    unit = max(_last_place(a), _last_place(b))
    return abs(a - b) <= unit * Decimal(_SLACK)


def moved(old: Sequence[Row], new: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    """Lines that say how many rows were added or removed and, for every column, how many rows
    changed and by how much at most, relative to the old number."""
    before, after = ({tuple(r.get(k, "") for k in keys): r for r in rows} for rows in (old, new))
    gone, come = len(before.keys() - after.keys()), len(after.keys() - before.keys())
    if gone or come:
        yield f"{gone} rows removed, {come} added"
    columns: dict[str, list[float]] = {}
    for key in before.keys() & after.keys():
        for name, (a, b) in differences(before[key], after[key]).items():
            columns.setdefault(name, []).append(_relative(a, b))
    for name, moves in columns.items():
        known = [move for move in moves if math.isfinite(move)]
        by = f", by {max(known):.2%} at most" if known else ""
        yield f"{name}: {len(moves)} of {len(after)} rows differ{by}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _last_place(number: Decimal) -> Decimal:
    """One unit in the last digit of a number; 0 for a whole number without a decimal point."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return Decimal(1).scaleb(exponent) if exponent else Decimal(0)


def _relative(old: str, new: str) -> float:
    a, b = _number(old), _number(new)
    if a is None or b is None or not a:
        return math.inf
    return float(abs(b / a - 1))
