"""Reads how long a step took: a number with its unit, or a trainer's log.

Lines of a log are found by their form, so nothing has to be said about the trainer. The first half
of the lines is left out, because it has compilation and warm-up, and the median of the others
counts, because steps with a checkpoint are not of interest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median, quantiles

from benchmarks.specification import SpecError

_NUMBER = r"([0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"


@dataclass(frozen=True)
class Step:
    """What a step of a run is: sequences, tokens per sequence, and GPUs."""

    global_batch: int
    seq: int
    num_gpus: int


# The seconds of a step that a number says, by the number's unit.
_UNITS: dict[str, Callable[[float, Step], float]] = {
    "s": lambda number, step: number,
    "ms": lambda number, step: number / 1e3,
    "tokens/s": lambda number, step: step.global_batch * step.seq / number,
    "tokens/s/GPU": lambda number, step: step.global_batch * step.seq / step.num_gpus / number,
    "samples/s": lambda number, step: step.global_batch / number,
}


@dataclass(frozen=True)
class _Form:
    """Lines of one program, in which ``pattern`` finds a number of the unit."""

    program: str
    pattern: re.Pattern[str]
    unit: str


# The forms, read in logs and sources of torchtitan 0.2 and 0.3, Megatron-LM and Megatron-Bridge of
# 2024 to 2026, NeMo 1 and 2, nanotron 0.4 and 0.5, DeepSpeed 0.6 to 0.19. Where a line fits
# several, the first counts.
_FORMS = tuple(
    _Form(program, re.compile(pattern), unit)
    for program, pattern, unit in (
        ("torchtitan", rf"step:\s*\d+.*\btps: {_NUMBER}", "tokens/s/GPU"),
        ("nanotron", rf"elapsed_time_per_iteration_ms: {_NUMBER}(?![.\dKMG])", "ms"),
        ("nanotron", rf"elapsed_time_per_iteration_ms: {_NUMBER}K", "s"),
        ("Megatron-LM", rf"elapsed time per iteration \(ms\): {_NUMBER}", "ms"),
        ("Megatron-LM", rf"elapsed time per iteration \(s\): {_NUMBER}", "s"),
        ("Megatron-Bridge", rf"Step Time ?: {_NUMBER} ?s\b", "s"),
        ("NeMo", rf"train_step_timing in s[=:] ?{_NUMBER}", "s"),
        ("DeepSpeed's pipeline engine", rf"steps: \d+ .*iter time \(s\): {_NUMBER}", "s"),
        ("DeepSpeed", rf"CurrSamplesPerSec={_NUMBER}", "samples/s"),
        ("DeepSpeed", rf"\bSamplesPerSec={_NUMBER}", "samples/s"),
    )
)


@dataclass(frozen=True)
class Measurement:
    """The seconds of a measured step; of a log's steps the median, and the share of it that lies
    between their quartiles."""

    step_s: float
    source: str
    steps: int = 1
    spread: float = 0.0


def measurement(text: str, step: Step) -> Measurement:
    """What ``843ms``, ``10456tokens/s/GPU`` or the name of a log says; raises SpecError, in one
    line, where it says no time."""
    match = re.fullmatch(rf"{_NUMBER} ?([A-Za-z/]+)", text)
    if match and match[2] in _UNITS and (number := _value(match[1])):
        if not 0 < (step_s := _UNITS[match[2]](number, step)) < inf:
            raise SpecError(
                f"--measured {text}: a step of {step_s:g} s: must be finite and above 0 (give the "
                "number as the trainer prints it, with its unit)"
            )
        return Measurement(step_s, text)
    path = Path(text)
    if not path.is_file():
        raise SpecError(
            f"--measured {text}: must be a log, or a number with its unit, such as 843ms or "
            f"10456tokens/s/GPU (units: {', '.join(_UNITS)})"
        )
    return _of_log(path, path.read_text(encoding="utf-8", errors="replace"), step)


def _of_log(path: Path, text: str, step: Step) -> Measurement:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    for form in _FORMS:
        numbers = [_value(match[1]) for line in lines if (match := form.pattern.search(line))]
        if later := [number for number in numbers[len(numbers) // 2 :] if 0 < number < inf]:
            seconds = [_UNITS[form.unit](number, step) for number in later]
            middle = median(seconds)
            low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (middle,) * 3
            source = f"{path.name}, a log of {form.program}"
            return Measurement(middle, source, len(seconds), (high - low) / middle)
    programs = ", ".join(dict.fromkeys(form.program for form in _FORMS))
    raise SpecError(
        f"--measured {path}: no line says how long a step took (known: logs of {programs}; or give "
        "a number with its unit, such as 843ms)"
    )


def _value(text: str) -> float:
    return float(text.replace(",", ""))
