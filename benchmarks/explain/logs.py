"""Reads how long a step took: a number with its unit, or a trainer's log.

What a log says of a step is found by its form, so nothing has to be said about the trainer. The
first half of what was found is left out, because it has compilation and warm-up, and the median of
the rest counts, because steps with a checkpoint are not of interest. Where a log says a global
batch, only steps with the configuration's count. Colours, and prefixes of ranks and times, do not
matter; a terminal's line breaks are undone where no line fits as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median, quantiles

from benchmarks.specification import SpecError

_NUMBER = r"([0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?[KM]?)"
# Colours and movements of the cursor, also as text that has lost its escape.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[[0-9;]+m")
_BATCH = re.compile(
    rf"(?:\bglobal[ _]batch[ _]size|Total train batch size .{{,60}}?)[ :=]+{_NUMBER}"
)
GPUS = re.compile(r"using world size: (\d+)")  # of Megatron-LM
# Peaks of a rank's memory in GiB: what the number is of, how a log has it, and its unit in bytes.
_PEAKS = tuple(
    (kind, re.compile(pattern), unit)
    for kind, pattern, unit in (
        ("reserved", rf"step:\s*\d+ .{{,300}}?\bmemory: *{_NUMBER}GiB", 2**30),  # torchtitan
        ("reserved", rf"\bmax reserved: *{_NUMBER}", 2**20),  # Megatron-LM
        ("reserved", rf"Peak reserved: {_NUMBER}MiB", 2**20),  # nanotron
        ("reserved", rf"peak_memory_reserved:{_NUMBER}", 2**30),  # torchtune
        ("reserved", rf"'memory\(GiB\)': '?{_NUMBER}", 2**30),  # swift
        ("reserved", rf"reserved memory: {_NUMBER}", 1),  # fms-fsdp
        ("reserved", rf"\bMax_CA {_NUMBER} GB", 2**30),  # DeepSpeed
        ("allocated", rf"\bMaxMemAllocated={_NUMBER}GB", 2**30),  # DeepSpeed's timer
        ("reserved", rf"\bmax_memory_reserved: {_NUMBER}", 1),  # NeMo
        ("reserved", rf"GPU reserved mem \(GiB\)={_NUMBER}", 2**30),  # OLMo-core
        ("allocated", rf"\bmem {_NUMBER} GiB", 2**30),  # NeMo AutoModel
    )
)
GROWTH = 0.05  # of a step within a log, from which on it is a symptom of its own
_SAME = 0.01  # two batches: nanotron rounds them to three digits


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
    "tokens/s/gpu": lambda number, step: step.global_batch * step.seq / step.num_gpus / number,
    "samples/s": lambda number, step: step.global_batch / number,
    "steps/s": lambda number, step: 1 / number,
}


@dataclass(frozen=True)
class _Form:
    """Lines of one program, in which ``pattern`` finds a number of the unit."""

    program: str
    pattern: re.Pattern[str]
    unit: str


# The forms, read in logs and sources of torchtitan of 2024 (wps) to 0.3, Megatron-LM, GPT-NeoX and
# Megatron-Bridge of 2021 to 2026, NeMo 1 and 2, NeMo AutoModel, nanotron 0.4 and 0.5, DeepSpeed 0.1
# to 0.19, fms-fsdp, InternEvo, Composer, OLMo and OLMo-core, nanoGPT, nanochat, MaxText, torchtune
# and ms-swift, whose number is a mean since the start. Where a log fits several, the first
# counts. Titan's lines of validation are no steps.
_FORMS = tuple(
    _Form(program, re.compile(pattern), unit)
    for program, pattern, unit in (
        (
            "torchtitan",
            rf"(?<!validate )step:\s*\d+ .{{,300}}?\b[tw]ps: *{_NUMBER}",
            "tokens/s/gpu",
        ),
        ("nanotron", rf"elapsed_time_per_iteration_ms: {_NUMBER}", "ms"),
        ("Megatron-LM", rf"elapsed time per iteration \(ms\): *{_NUMBER}", "ms"),
        ("Megatron-LM", rf"elapsed time per iteration \(s\): *{_NUMBER}", "s"),
        ("Megatron-Bridge", rf"Step Time ?: {_NUMBER} ?s\b", "s"),
        ("NeMo", rf"train_step_timing in s\"?[=:] ?{_NUMBER}", "s"),
        ("NeMo AutoModel", rf"\btps {_NUMBER}\([\d.]+/gpu\)", "tokens/s"),
        ("DeepSpeed's pipeline engine", rf"steps?: +\d+ .{{,300}}?iter time \(s\): {_NUMBER}", "s"),
        ("DeepSpeed", rf"CurrSamplesPerSec={_NUMBER}", "samples/s"),
        ("DeepSpeed", rf"\bSamplesPerSec={_NUMBER}", "samples/s"),
        ("fms-fsdp", rf"current step time: {_NUMBER}", "s"),
        ("InternEvo", rf"tgs \(tokens/gpu/second\)={_NUMBER}", "tokens/s/gpu"),
        (
            "Composer or OLMo",
            rf"throughput/device/(?:tokens_per_sec(?:ond)?|TPS)[=:] *{_NUMBER}",
            "tokens/s/gpu",
        ),
        ("nanoGPT", rf"iter \d+: loss [\d.naif]+, time {_NUMBER}ms", "ms"),
        ("nanochat", rf"\bdt: {_NUMBER}ms", "ms"),
        ("MaxText", rf"completed step: \d+, seconds: {_NUMBER}", "s"),
        ("torchtune", rf"tokens_per_second_per_gpu:{_NUMBER}", "tokens/s/gpu"),
        ("swift of Megatron", rf"elapsed_time_per_iteration['\"]: '?{_NUMBER}", "s"),
        ("swift, a mean with warm-up", rf"train_speed\(iter/s\)['\"]: '?{_NUMBER}", "steps/s"),
        ("swift, a mean with warm-up", rf"train_speed\(s/it\)['\"]: '?{_NUMBER}", "s"),
        (
            "Hugging Face's Trainer, the mean with warm-up",
            rf"train_samples_per_second['\"]? *[:=] *'?{_NUMBER}",
            "samples/s",
        ),
    )
)


@dataclass(frozen=True)
class Measurement:
    """The seconds of a measured step; of the ``lines`` of a log the median, and the share of it
    that lies between their quartiles. ``grown``: the medians of the second and of the last quarter
    of all steps, where the last is longer by more than ``GROWTH``. ``peak``: GiB at the most, and
    whether torch's allocator had them reserved or allocated."""

    step_s: float
    source: str
    lines: int = 0
    spread: float = 0.0
    grown: tuple[float, float] | None = None
    peak: tuple[float, str] | None = None


def has_steps(text: str) -> bool:
    """Whether a text has lines in which a trainer says how long a step took."""
    return any(form.pattern.search(text) for form in _FORMS)


def measurement(text: str, step: Step) -> Measurement:
    """What ``843ms``, ``10456tokens/s/GPU`` or the name of a log says; raises SpecError, in one
    line, where it says no time."""
    match = re.fullmatch(rf"{_NUMBER} ?([A-Za-z/]+)", text)
    unit = match[2].lower().replace("/sec", "/s") if match else ""
    if match and unit in _UNITS and (number := _value(match[1])):
        if not 0 < (step_s := _UNITS[unit](number, step)) < inf:
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
    plain = _ESCAPES.sub("", text)
    gpus = [int(number) for number in GPUS.findall(plain)]
    if gpus and gpus[-1] != step.num_gpus:
        raise SpecError(
            f"--measured {path}: ran on {gpus[-1]} GPUs and the configuration has {step.num_gpus} "
            f'(give --measured "{path} num_gpus={gpus[-1]}")'
        )
    for said in (plain, *(re.sub(r"\r?\n", blank, plain) for blank in ("", " "))):
        for form in _FORMS:
            numbers = _of_batch(path, form, said, step)
            if later := [number for number in numbers[len(numbers) // 2 :] if 0 < number < inf]:
                seconds = [_UNITS[form.unit](number, step) for number in later]
                middle = median(seconds)
                low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (middle,) * 3
                whole = [_UNITS[form.unit](number, step) for number in numbers if number > 0]
                quarter = max(1, len(whole) // 4)  # the first has compilation and warm-up
                ends = median(whole[quarter : 2 * quarter] or whole), median(whole[-quarter:])
                return Measurement(
                    middle,
                    f"{path.name} of {form.program}",
                    lines=len(seconds),
                    spread=(high - low) / middle,
                    grown=ends if ends[1] > (1 + GROWTH) * ends[0] else None,
                    peak=_peak_of(plain),
                )
    programs = ", ".join(dict.fromkeys(form.program for form in _FORMS))
    raise SpecError(
        f"--measured {path}: no line of a known form says how long a step took (known: logs of "
        f"{programs}; of LLaMA-Factory its train_results.json; or give a number with its unit, "
        "such as 843ms)"
    )


def _peak_of(text: str) -> tuple[float, str] | None:
    """The largest peak that a log says, in GiB, and its kind."""
    for kind, pattern, unit in _PEAKS:
        if found := pattern.findall(text):
            return max(map(_value, found)) * unit / 2**30, kind
    return None


def _of_batch(path: Path, form: _Form, text: str, step: Step) -> list[float]:
    """The numbers of a form's steps whose batch, as far as the text says it, is the
    configuration's; raises SpecError if all are of another batch."""
    matches = list(form.pattern.finditer(text))
    numbers, batch = [], None
    owns = (step.global_batch, step.global_batch * step.seq)  # OLMo-core's batch is of tokens
    for i, match in enumerate(matches):
        end = matches[i + 1].start() if i + 1 < len(matches) else len(text)
        before = _BATCH.findall(text[: match.start()]) if i == 0 else []
        if stated := _BATCH.findall(text[match.end() : end])[:1] or before:
            batch = _value(stated[-1])
        if batch is None or any(abs(batch / own - 1) <= _SAME for own in owns):
            numbers.append(_value(match[1]))
    if matches and not numbers:
        raise SpecError(
            f"--measured {path}: its steps have {batch:g} sequences and the configuration "
            f'{step.global_batch} (give --measured "{path} global_batch={batch:g}")'
        )
    return numbers


def _value(text: str) -> float:
    thousands = {"K": 1e3, "M": 1e6}.get(text[-1], 1.0)
    return float(text.rstrip("KM").replace(",", "")) * thousands
