"""The three tables of a comparison, and their forms: terminal, Markdown, CSV, LaTeX, Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from benchmarks.report.frame import CELL, latest_ok
from benchmarks.stats import ratio_of_medians

_CELL_HEADS = {
    "model": "model",
    "cluster": "cluster",
    "num_gpus": "GPUs",
    "global_batch": "batch",
    "evidence": "evidence",
}
_REFERENCE = "DeepSpeed 3D"


def comparison_tables(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """``throughput``, ``memory`` and ``speedup`` of the latest successes, formatted as text."""
    rows = latest_ok(frame)
    return {
        "throughput": throughput_table(rows),
        "memory": memory_table(rows),
        "speedup": speedup_table(rows),
    }


def throughput_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Median step time and throughput with 95 % intervals; failures with their reason."""
    table = _heads(rows)
    table["contender"] = rows["contender"]
    table["layout"] = rows["layout"]
    table["step [s]"] = [
        _interval(row, "step_s", 3) if row["status"] == "ok" else row["status"]
        for _, row in rows.iterrows()
    ]
    table["tokens/s/GPU"] = [
        _interval(row, "tokens_per_s_per_gpu", 0) for _, row in rows.iterrows()
    ]
    table["model TFLOP/s/GPU"] = _numbers(rows, "model_tflops_per_gpu", ".4g")
    table["MFU"] = _numbers(rows, "mfu", ".1%")
    table["note"] = [_note(row) for _, row in rows.iterrows()]
    return table


def memory_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Peak memory of the fullest rank, and which kind of peak it is."""
    table = _heads(rows)
    table["contender"] = rows["contender"]
    table["layout"] = rows["layout"]
    table["peak of the fullest rank [GiB]"] = _numbers(rows, "peak_gib", ".3f")
    table["kind of peak"] = _column(rows, "memory_kind").fillna("-")
    return table


def speedup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Throughput over DeepSpeed 3D's in the same cell, with a bootstrap interval, and peak memory
    over its. A ratio whose samples spread too far says so."""
    lines = []
    for _, cell in rows.groupby(CELL, sort=True):
        fine = cell[cell["status"] == "ok"]
        reference = fine[fine["contender"] == _REFERENCE]
        if reference.empty:
            continue
        base = reference.iloc[-1]
        for _, row in fine[fine["contender"] != _REFERENCE].iterrows():
            lines.append(_speedup_line(row, base))
    return pd.DataFrame(lines)


def write_tables(tables: dict[str, pd.DataFrame], out: Path) -> list[Path]:
    """Write every table as CSV, LaTeX (booktabs) and Parquet, and all as one Markdown file."""
    paths = []
    for name, table in tables.items():
        csv, tex, parquet = (out / f"{name}.{suffix}" for suffix in ("csv", "tex", "parquet"))
        table.to_csv(csv, index=False)
        table.to_parquet(parquet, index=False)
        tex.write_text(_latex(table))
        paths += [csv, tex, parquet]
    markdown = out / "tables.md"
    markdown.write_text(
        "\n".join(f"## {name.capitalize()}\n\n{to_markdown(t)}\n" for name, t in tables.items())
    )
    return [markdown, *paths]


def to_markdown(table: pd.DataFrame) -> str:
    """A GitHub-flavoured Markdown table."""
    if table.empty:
        return "(no rows)"
    lines = [list(map(str, table.columns)), ["---"] * len(table.columns)]
    lines += [[str(value).replace("|", "\\|") for value in row] for row in table.to_numpy()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_tables(tables: dict[str, pd.DataFrame], console: Console) -> None:
    """Show the tables in the terminal."""
    for name, frame in tables.items():
        if frame.empty:
            continue
        table = Table(title=name.capitalize(), title_justify="left", header_style="bold")
        for column in frame.columns:
            right = pd.api.types.is_numeric_dtype(frame[column]) or "[" in column or "/" in column
            table.add_column(str(column).replace("[", "\\["), justify="right" if right else "left")
        for row in frame.to_numpy():
            table.add_row(*map(str, row))
        console.print(table)


def _heads(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[list(_CELL_HEADS)].rename(columns=_CELL_HEADS).copy()


def _speedup_line(row: pd.Series, base: pd.Series) -> dict[str, object]:
    ratio = ratio_of_medians(base["samples_step_s"], row["samples_step_s"])
    line: dict[str, object] = {head: row[key] for key, head in _CELL_HEADS.items()}
    line["contender"] = row["contender"]
    line["against"] = base["contender"]
    line["speed-up"] = f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    line["peak memory ratio"] = "-"
    if {"peak_gib"} <= set(row.index) and base["peak_gib"] > 0:
        line["peak memory ratio"] = f"{row['peak_gib'] / base['peak_gib']:.2f}"
    shaky = ratio.unstable and row["evidence"] == "measured"
    line["note"] = f"unstable: spread {ratio.spread:.0%}, n={ratio.count}" if shaky else ""
    return line


def _column(rows: pd.DataFrame, name: str) -> pd.Series:
    """A column, all missing where no row has it."""
    if name in rows:
        return rows[name]
    return pd.Series([None] * len(rows), index=rows.index, dtype=object)


def _numbers(rows: pd.DataFrame, name: str, form: str) -> Sequence[str]:
    return ["-" if pd.isna(value) else format(value, form) for value in _column(rows, name)]


def _interval(row: pd.Series, name: str, digits: int) -> str:
    """Median with its interval, to ``digits`` decimals."""
    if name not in row.index or pd.isna(row[name]):
        return "-"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def _note(row: pd.Series) -> str:
    if row["status"] != "ok":
        return str(row["reason"])
    if row.get("unstable") is True:
        return f"unstable: spread {row['spread']:.0%}, n={len(row['samples_step_s'])}"
    return ""


def _latex(table: pd.DataFrame) -> str:
    """A booktabs tabular; cells are escaped by hand because pandas' writer needs jinja's style."""
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}"}

    def escape(value: object) -> str:
        return "".join(special.get(c, c) for c in str(value).replace("\\", "/"))

    body = [" & ".join(map(escape, row)) + r" \\" for row in table.to_numpy()]
    return "\n".join(
        [
            r"\begin{tabular}{" + "l" * len(table.columns) + "}",
            r"\toprule",
            " & ".join(map(escape, table.columns)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
