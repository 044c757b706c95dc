"""Labels for the keys of contenders, models and clusters, and the rounding of every number.

Tables and figures use the same functions, so that they show the same digits. Everywhere else
contenders and models are named by their keys (``deepspeed_3d``, ``gpt_14_6b``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.specification.contenders import ROWS

Form = Callable[[float], str]

_FAMILIES = {"gpt": "GPT", "llama": "Llama"}
_STATUS = {"oom": "OOM", "ok": "–"}


def contender_label(name: str) -> str:
    """The label of a contender, or of a row of the verdict, in tables and figures: ``DeepSpeed 3D``
    for ``deepspeed_3d``."""
    return ROWS[name].label if name in ROWS else name


def model_label(name: str) -> str:
    """The label of a model in tables and figures: ``GPT 14.6B`` for ``gpt_14_6b``, and
    ``Llama 8B 32k`` for ``llama_8b_32k``."""
    family, _, size = name.partition("_")
    if family not in _FAMILIES or not size:
        return name
    if number := re.match(r"(\d+)(_\d+)?([bm])(?![a-z0-9])", size):
        size = number[0].replace("_", ".").upper() + size[number.end() :]
    return f"{_FAMILIES[family]} {size.replace('_', ' ')}"


def cluster_label(name: str) -> str:
    """The label of a cluster in tables and figures: ``A800`` for ``a800``."""
    if name == "cpu_gloo":
        return "CPU (gloo)"
    preset, comma, network = name.partition(",")
    device, _, variant = preset.partition("_")
    upper = device.upper() if re.fullmatch(r"[a-z]+\d+", device) else device
    words = {"": upper, "one_nic": f"{upper}, a card per node", "40gb": f"{upper} 40 GB"}
    return f"{words.get(variant, preset)}{comma}{network}"


def status_label(status: str) -> str:
    """What a table shows instead of a number: ``OOM`` for ``oom``, a dash for ``ok``, and any other
    status itself."""
    return _STATUS.get(status, status)


def varied(rows: pd.DataFrame) -> list[str]:
    """The columns of settings that differ between rows, as ``frame.latest_ok`` adds them; their
    names are those of a command line, or begin with
    ``machine.`` or ``environment.``."""
    return [str(name) for name in rows.columns if "." in str(name) or name == "seed"]


def told_apart(rows: pd.DataFrame) -> list[str]:
    """Those of ``varied`` in which these rows themselves differ."""
    return [name for name in varied(rows) if rows[name].nunique(dropna=False) > 1]


def setting_label(name: str) -> str:
    """The head of such a column: ``layers`` for ``model.layers``."""
    return re.sub(r"^(model|cluster|machine|environment)\.", "", name)


def setting_words(row: Mapping[Any, Any] | pd.Series, names: Iterable[str]) -> str:
    """The settings of a row among ``names`` in words, each after a comma: ``, layers 4``."""
    known = ((name, row[name]) for name in names if not is_missing(row[name]))
    return "".join(f", {setting_label(name)} {value_text(value)}" for name, value in known)


def value_text(value: object) -> str:
    """A setting as text: numbers without a fraction as whole ones."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def worker_word(rows: pd.DataFrame) -> str:
    """``GPU``, or ``rank`` if some rows ran on CPUs."""
    return "rank" if rows["on_cpu"].any() else "GPU"


def unsettled(reasons: Iterable[str]) -> str:
    """What the mark ``~`` says before numbers with these reasons for doubt. Each may be empty;
    the result is empty if all are."""
    told = " ".join(reasons)
    kinds = {
        "interval": "an interval that includes 1",
        "spread": "a spread over 10 %",
        "step": "fewer than 5 steps",
    }
    found = [words for kind, words in kinds.items() if kind in told]
    return f"~ unsettled: {' or '.join(found)}" if found else ""


def unchecked_note(rows: pd.DataFrame) -> str:
    """The sentence on rows that were not compared with one process as usual; empty if all were."""
    if "unchecked" not in rows or not (marked := rows[rows["unchecked"].fillna("") != ""]).size:
        return ""
    runs = marked.groupby("unchecked")["contender"].unique()
    words = [f"{', '.join(map(contender_label, names))} ({why})" for why, names in runs.items()]
    return f"NOT COMPARED with one process as usual: {'; '.join(words)}."


tokens: Form = "{:,.0f}".format  # tokens per second and GPU


@dataclass(frozen=True)
class Unit:
    """The unit of a whole column or axis, so that its numbers are neither tiny nor long."""

    name: str
    scale: float  # what a number in the column's own unit (GiB, TFLOP/s) is multiplied by
    digits: Form  # how a number in this unit is written

    def form(self, value: float) -> str:
        """The text of a number that is in the column's own unit."""
        return self.digits(self.scale * value)


def memory_unit(gib: Iterable[float]) -> Unit:
    """GiB, or MiB if all values (GiB, NaN if not known) are below 1 GiB."""
    return Unit("GiB", 1.0, _gib) if _reaches_one(gib) else Unit("MiB", 1024.0, _mib)


def flops_unit(tflops: Iterable[float]) -> Unit:
    """TFLOP/s, or GFLOP/s if all values (TFLOP/s, NaN if not known) are below 1 TFLOP/s."""
    name, scale = ("TFLOP/s", 1.0) if _reaches_one(tflops) else ("GFLOP/s", 1000.0)
    return Unit(name, scale, _rounded)


def _reaches_one(values: Iterable[float]) -> bool:
    known = [value for value in values if not math.isnan(value)]
    return not known or max(known) >= 1.0


def _rounded(value: float) -> str:
    """One decimal from 10 up, three significant digits below."""
    return f"{value:.1f}" if value >= 10 else f"{value:#.3g}"


def share(value: float) -> str:
    """A share as a percentage with one decimal, or with two digits where that would be none."""
    return f"{100 * value:.1f} %" if value >= 0.0005 else f"{100 * value:.2g} %"


def _gib(value: float) -> str:
    """One decimal from 10 up, three decimals below 1, two between."""
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"


def _mib(value: float) -> str:
    """Whole MiB with commas from 10 up, one decimal below."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


ratio: Form = "{:.2f}".format  # a speed-up, or a ratio of peaks
seconds: Form = "{:.3f}".format
count: Form = "{:.0f}".format  # a whole number without commas


def is_missing(value: object) -> bool:
    """Whether a value is not known: None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))
