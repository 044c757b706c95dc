"""The charter of opponents: which settings each opponent has, and what becomes of them here.

In: ``docs/opponents.csv``, one line per setting; ``docs/opponents.yaml``, which says where each
program has its settings; and the installed packages, whose configurations are read as text. Out:
the tables of ``docs/opponents.md``. A test holds the lines against the packages, so that a setting
that a new release adds is classified or fails it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
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

    @property
    def is_installed(self) -> bool:
        """Whether the package is installed."""
        return importlib.util.find_spec(self.path.split("/")[0]) is not None


SETUP = yaml.safe_load(CHARTER.with_suffix(".yaml").read_text(encoding="utf-8"))
SECTIONS = tuple(Section(**values) for values in SETUP["sections"])


def fields_of(section: Section) -> dict[str, str]:
    """The settings of a section in the installed package, with their defaults as they are written
    there. Raises ValueError if none is found, as the package has moved them."""
    spec = importlib.util.find_spec(section.path.split("/")[0])
    places = list(spec.submodule_search_locations or ()) if spec else []
    root, found = Path(*section.path.split("/")[1:]), dict[str, str]()
    for place in places:
        tree = ast.parse((Path(place) / root).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            name = getattr(node, "name", "")
            if isinstance(node, ast.ClassDef) and name in section.owners:
                lines = (line for line in node.body if isinstance(line, ast.AnnAssign))
                found |= {ast.unparse(line.target): _short(line.value) for line in lines}
            elif isinstance(node, ast.FunctionDef) and name in section.owners:
                arguments, defaults = node.args.kwonlyargs, node.args.kw_defaults
                found |= {a.arg: _short(d) for a, d in zip(arguments, defaults, strict=True)}
            elif isinstance(node, ast.FunctionDef) and f"{name}()" in section.owners:
                found |= dict(_assigned(node))
    if not found:
        raise ValueError(f"{section.path}: has no {', '.join(section.owners)}")
    return found


def _assigned(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for line in ast.walk(node):
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Attribute):
            yield line.targets[0].attr, ""
        elif isinstance(line, ast.Dict):
            for key, value in zip(line.keys, line.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), _short(value)


def _short(value: ast.expr | None) -> str:
    """A default as text; of a call that declares a field, the default in it."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field", "pp_int"):
        given = [*value.args, *(k.value for k in value.keywords if k.arg in _DEFAULTS)]
        return _short(given[0]) if given else ""
    return ast.unparse(value)


_DEFAULTS = ("default", "default_factory")


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
    of the verdict; a sentence if there is no such table."""
    if not variants.exists():
        return "Not searched yet."
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
