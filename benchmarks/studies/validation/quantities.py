"""What a row measured: a number in a unit, or whether the run fitted into memory.

Rules. A unit is the row's, else what follows the number (``45%``), else a word of the metric
(``iteration_time_ms``, ``peak_memory_gib``); ``per second per GPU``, ``/s/GPU`` and ``/gpu/sec``
are one. MFU without a unit is a percentage above 1.5, else a fraction. ``tps``, ``wps`` and
``TGS`` are tokens per second *a GPU*, as torchtitan and InternEvo print them. A run was out of
memory where the value, metric or unit says so, or where there is no value and a note says so; a
metric that asks (``oom``, ``status``, ``fits``) is answered by yes or no.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.studies.validation.rows import Row, UnpredictableError

_NUMBER = re.compile(r"[~≈<>≤≥]?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([^\d\s].*)?")
_BLANK = ("", "-", "--", "n/a", "na", "nan", "none", "null", "x", "/", "failed", "fail", "crash")
_OOM = re.compile(r"(?<!no )\boom\b|out[ -]?of[ -]?memory|\bexceeds? (?:the )?memory\b")
_FITS = re.compile(r"\bfits?\b")
_YES, _NO = ("1", "true", "yes", "y"), ("0", "false", "no", "n")
_RAN = ("ok", "okay", "ran", "runs", "success", "pass", "passed", "fits", "fit", "no oom", "done")


@dataclass(frozen=True)
class Reading:
    """``value`` in ``unit``; or, for a row of memory's limit alone, whether it was exceeded."""

    value: float | None
    unit: str  # normalised: lower case, ``tok/s/gpu``, ``ms``, ``gib``, ``%``
    ran_out: bool | None = None


def reading_of(row: Row) -> Reading:
    """Understand value and unit; raises UnpredictableError where there is neither a number nor a
    word of memory."""
    text = row.get("value", "").strip().lower().replace(",", "")
    metric = row.get("metric", "").lower().replace("_", " ")
    unit = row.get("unit", "").lower()
    status = _status(text, metric, unit, row.get("notes", "").lower())
    if status is not None:
        return Reading(None, "", status)
    found = _NUMBER.fullmatch(text)
    if text in _BLANK:
        raise UnpredictableError(f"value={row.get('value', '')!r}: nothing was measured")
    if not found or re.match(r"-|–|to\b", found[2] or ""):
        raise UnpredictableError(f"value={row.get('value', '')!r} is not a number")
    after = found[2] or ""
    thousands = after == "k"
    number = float(found[1]) * (1e3 if thousands else 1.0)
    return Reading(number, _unit(unit or ("" if thousands else after), metric))


def _status(text: str, metric: str, unit: str, notes: str) -> bool | None:
    """Whether the run was out of memory; None where the row is of something else."""
    asks = re.search(r"\bstatus\b|\bresult\b|\boutcome\b|\bfeasible\b", metric) or _FITS.search(
        metric
    )
    if _OOM.search(metric) or _OOM.search(unit):
        return text not in (*_NO, *_RAN)
    if _OOM.search(text) and text not in _RAN:
        return True
    if asks and text in (*_RAN, *_YES):
        return False
    if asks and text in _NO:
        return True
    if (text in _BLANK or text in ("0", "0.0")) and _OOM.search(notes):
        return True
    return None


def _unit(text: str, metric: str) -> str:
    """One spelling of a unit."""
    unit = text.strip().replace("·", "/").replace("*", "/")
    unit = re.sub(r"\bper\b|\ba\b(?= gpu)", "/", unit)
    unit = re.sub(r"\s*/\s*", "/", unit)
    unit = re.sub(r"\b(?:seconds?|secs?)\b", "s", unit)
    unit = re.sub(r"\b(?:milliseconds?|msec)\b", "ms", unit)
    unit = re.sub(r"\b(?:minutes?|mins?)\b", "min", unit)
    unit = re.sub(r"\b(?:iterations?|iters?|steps?|batch(?:es)?)\b", "it", unit)
    unit = re.sub(r"\b(?:gpus?|devices?|chips?|cards?|accelerators?|rank)\b", "gpu", unit)
    unit = re.sub(r"^(tps|wps|tgs)(/gpu)?$", "tok/s/gpu", unit)
    if not unit:
        unit = _unit_of_metric(metric)
    return unit


def _unit_of_metric(metric: str) -> str:
    if re.search(r"\b(?:tps|wps|tgs)\b", metric):
        return "tok/s/gpu"
    found = re.search(r"\b(ms|us|s|gib|gb|mib|mb|pct|percent)\b", metric)
    unit = found[1] if found else ""
    return "%" if unit in ("pct", "percent") else unit
