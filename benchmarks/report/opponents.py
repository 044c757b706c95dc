"""The charter of opponents: which settings each opponent has, and what becomes of them here.

In: ``docs/opponents.csv``, one line per setting, and ``docs/opponents.yaml``, which says where each
program has its settings. Out: the tables of ``docs/opponents.md``. A test reads the installed
packages' configurations as text, so that a setting that a new release adds is classified or fails
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd
import yaml

from benchmarks import CHECKOUT
from benchmarks.report.table import markdown_table
from benchmarks.specification.contenders import COMPARED

CHARTER = CHECKOUT / "docs" / "opponents.csv"
KINDS = ("searched", "fixed at ", "against it", "cannot act")  # how ``here`` begins


@dataclass(frozen=True)
class Section:
    """One place where an opponent's settings stand, as ``docs/opponents.yaml`` says."""

    name: str
    program: str
    path: str
    owners: list[str]


SETUP = yaml.safe_load(CHARTER.with_suffix(".yaml").read_text(encoding="utf-8"))
SECTIONS = tuple(Section(**values) for values in SETUP["sections"])


@cache
def charter() -> pd.DataFrame:
    """The lines of ``docs/opponents.csv``, all of them text."""
    return pd.read_csv(CHARTER, dtype=str, keep_default_na=False)


def opponents_table(program: str) -> str:
    """The settings of a program as markdown: a table of those that can act, and the others by the
    reason why they cannot."""
    lines = charter()
    own = lines[lines["section"].isin([s.name for s in SECTIONS if s.program == program])]
    acts, cannot = [], dict[str, list[str]]()
    for row in own.to_dict("records"):
        if row["here"] == KINDS[-1]:
            cannot.setdefault(row["why"], []).append(f"`{row['field']}`")
            continue
        name, default = f"`{row['section']}` `{row['field']}`", f"`{row['default']}`"
        here = ": ".join(filter(None, (f"**{row['here']}**", row["why"])))
        acts.append([name, default * (default != "``"), row["guide"], here])
    heads = ["setting", "default", "its guide, its examples", "here"]
    others = [[why, ", ".join(fields)] for why, fields in cannot.items()]
    acting = markdown_table(heads, acts)
    return f"{acting}\n\n{markdown_table(['cannot act here: why', 'settings'], others)}"


def moved_table(variants: Path, plans: Path) -> str:
    """How far each searched variant moves the median of ZeroPP's speed over its row's, with one
    sequence per GPU and with four or more, from the tables of ``benchmarks.evidence.variants`` and
    of the verdict."""
    cell = ["model", "cluster", "num_gpus", "global_batch"]
    best = pd.read_csv(plans).query("mode == 'best' and bandwidth == 1")
    steps = {str(name): rows.set_index(cell)["step_s"] for name, rows in best.groupby("contender")}
    lines = []
    for key, rows in pd.read_csv(variants).groupby(["variant", "contender"], sort=False):
        name, row = map(str, key)
        medians = [
            f"{before:.3f} → {after:.3f}"
            for before, after in zip(
                _medians(steps[row] / steps["zeropp"]),
                _medians(rows.set_index(cell)["step_s"] / steps["zeropp"]),
                strict=True,
            )
        ]
        lines.append([COMPARED[row].label, name, *medians])
    return markdown_table(["ZeroPP over", "with", "1 sequence per GPU", "4 or more"], lines)


def _medians(ratios: pd.Series) -> tuple[float, float]:
    index = ratios.dropna().index
    one = index.get_level_values("global_batch") == index.get_level_values("num_gpus")
    return float(ratios.dropna()[one].median()), float(ratios.dropna()[~one].median())
