"""Labels for the keys of contenders, models and clusters, and the rounding of every number.

Tables and figures use the same functions, so that they show the same digits. Everywhere else
contenders and models are named by their keys (``deepspeed_3d``, ``gpt_14_6b``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pandas as pd

from benchmarks.specification.contenders import COMPARED, PRICED

Form = Callable[[float], str]

_FAMILIES = {"gpt": "GPT", "llama": "Llama"}
_STATUS = {"oom": "OOM", "ok": "–"}


def contender_label(name: str) -> str:
    """The label of a contender, or of a row of the verdict, in tables and figures: ``DeepSpeed 3D``
    for ``deepspeed_3d``."""
    known = PRICED.get(name) or COMPARED.get(name)
    return known.label if known else name


def model_label(name: str) -> str:
    """The label of a model in tables and figures: ``GPT 14.6B`` for ``gpt_14_6b``."""
    family, _, size = name.partition("_")
    if family not in _FAMILIES or not size:
        return name
    if re.fullmatch(r"\d+(_\d+)?[bm]", size):
        size = size.replace("_", ".").upper()
    return f"{_FAMILIES[family]} {size.replace('_', ' ')}"


def cluster_label(name: str) -> str:
    """The label of a cluster in tables and figures: ``A800`` for ``a800``."""
    if name == "cpu_gloo":
        return "CPU (gloo)"
    return name.upper() if re.fullmatch(r"[a-z]+\d+", name) else name


def status_label(status: str) -> str:
    """What a table shows instead of a number: ``OOM`` for ``oom``, a dash for ``ok``, and any other
    status itself."""
    return _STATUS.get(status, status)


def worker_word(rows: pd.DataFrame) -> str:
    """``GPU``, or ``rank`` if all rows ran on CPUs."""
    return "rank" if len(rows) and bool(rows["on_cpu"].all()) else "GPU"


def unchecked_note(rows: pd.DataFrame) -> str:
    """The sentence on rows that were not compared with one process as usual; empty if all were."""
    if "unchecked" not in rows or not (marked := rows[rows["unchecked"].fillna("") != ""]).size:
        return ""
    runs = marked.groupby("unchecked")["contender"].unique()
    words = [f"{', '.join(map(contender_label, names))} ({why})" for why, names in runs.items()]
    return f"NOT COMPARED with one process as usual: {'; '.join(words)}."


def tokens(value: float) -> str:
    """Tokens per second and GPU: whole tokens with commas."""
    return f"{value:,.0f}"


def tflops(value: float) -> str:
    """TFLOP/s per GPU: one decimal from 10 up, three significant digits below."""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def share(value: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def gib(value: float) -> str:
    """GiB: one decimal from 10 up, three decimals below 1, two between."""
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"


def ratio(value: float) -> str:
    """A speed-up or a ratio of peaks: two decimals."""
    return f"{value:.2f}"


def seconds(value: float) -> str:
    """Seconds: three decimals."""
    return f"{value:.3f}"


def count(value: float) -> str:
    """A whole number without commas."""
    return f"{value:.0f}"


def is_missing(value: object) -> bool:
    """Whether a value is not known: None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))
