"""The tables of a comparison, and their forms: terminal, Markdown, CSV, LaTeX, Parquet."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from benchmarks.records.stats import paired_ratio, ratio_of_medians
from benchmarks.report.evidence import evidence_distances
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.report.headline import REFERENCE, doubts, ratio_text
from benchmarks.report.lone import lone_table
from benchmarks.report.published import published_table

MAX_PRINTED = 60  # rows in the terminal; the files have all
_WIDTH = 118
CELL_HEADS = {
    "model": "model",
    "cluster": "cluster",
    "num_gpus": "GPUs",
    "global_batch": "batch",
    "evidence": "evidence",
}


def comparison_tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of ``latest_ok`` rows, formatted as text. A row's index names the records behind
    it, a speed-up's and a distance's the reference's after its own."""
    return {
        "throughput": throughput_table(rows),
        "memory": memory_table(rows),
        "speedup": speedup_table(rows),
        "evidence": evidence_table(rows),
        "published": published_table(rows),
        "lone_ranks": lone_table(rows),
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
    return table.set_axis(rows["record_id"])


def memory_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Peak memory of the fullest rank, which kind of peak it is, and, where records know it,
    what the cost model predicts for the plan: tensors alone."""
    rows = rows[rows["peak_gib"].notna()]
    table = _heads(rows)
    table["contender"] = rows["contender"]
    table["layout"] = rows["layout"]
    table["peak of the fullest rank [GiB]"] = _numbers(rows, "peak_gib", ".3f")
    table["kind of peak"] = rows["memory_kind"]
    if rows["predicted_gib"].notna().any():
        table["tensors by the cost model [GiB]"] = _numbers(rows, "predicted_gib", ".3f")
    table["device limit [GiB]"] = _numbers(rows, "memory_limit_gib", "g")
    return table.set_axis(rows["record_id"])


def speedup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Speed-ups of the fastest configurations over DeepSpeed 3D's in the same cell, and, a kind of
    evidence and cluster, their geometric mean over cells."""
    pairs = paired_speedups(rows)
    if pairs.empty:
        return pairs
    table = _heads(pairs)
    table["contender"] = pairs["contender"]
    table["against"] = REFERENCE
    table["speed-up"] = pairs["speedup_text"]
    table["peak memory ratio"] = _numbers(pairs, "memory_ratio", ".2f")
    table["note"] = pairs["note"]
    means = [
        dict(zip(("evidence", "cluster", "contender"), keys, strict=True)) | _mean_line(group)
        for keys, group in pairs.groupby(["evidence", "cluster", "contender"], sort=True)
        if len(group) > 1
    ]
    table = table.set_axis(pairs["records"])
    return pd.concat([table, pd.DataFrame(means, columns=table.columns, index=[""] * len(means))])


def paired_speedups(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a cell and contender but DeepSpeed 3D: ``speedup`` (ratio of median step times), the
    same with its interval as text, ``memory_ratio``, and ``unsure`` where there are ``doubts``."""
    best = best_configuration(rows)
    if best.empty:
        return best
    base = best[best["contender"] == REFERENCE]
    others = best[best["contender"] != REFERENCE]
    both = others.merge(base, on=CELL, suffixes=("", "_base"))
    shown = [*CELL, "contender"]
    return pd.DataFrame(
        [{key: row[key] for key in shown} | _pair(row) for row in both.to_dict("records")]
    )


def evidence_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Where one configuration has several kinds of evidence: how far they are from each other."""
    distances = evidence_distances(rows)
    if distances.empty:
        return distances
    heads = {key: head for key, head in CELL_HEADS.items() if key not in ("cluster", "evidence")}
    table = distances[list(heads)].rename(columns=heads)
    table["contender"], table["layout"] = distances["contender"], distances["layout"]
    table["quantity"] = distances["quantity"]
    table["this"] = [f"{r.value:.4g} {r.kind}" for r in distances.itertuples()]
    table["reference"] = [f"{r.reference:.4g} {r.reference_kind}" for r in distances.itertuples()]
    table["distance"] = [f"{error:+.1%}" for error in distances["error"]]
    return table.set_axis(distances["records"])


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


def wide_console() -> Console:
    """A console as wide as the tables: a narrower terminal wraps their lines, not their words."""
    return Console(width=max(Console().width, _WIDTH))


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
    return rows[list(CELL_HEADS)].rename(columns=CELL_HEADS).astype(str)


def _pair(row: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Speed-up of one merged row, in which the reference's columns end in ``_base``."""
    ratio = ratio_of_medians(row["samples_step_s_base"], row["samples_step_s"])
    measured = row["evidence"] == "measured"
    notes = doubts(ratio) if measured else []
    comparable = row["memory_kind"] == row["memory_kind_base"] and pd.notna(row["peak_gib_base"])
    return {
        "speedup": ratio.median,
        "speedup_text": ratio_text(ratio, measured=measured),
        "memory_ratio": row["peak_gib"] / row["peak_gib_base"] if comparable else None,
        "unsure": bool(notes),
        "note": "; ".join(notes),
        "records": f"{row['record_id']} {row['record_id_base']}",
    }


def _mean_line(group: pd.DataFrame) -> dict[str, object]:
    mean, unsure = paired_ratio(list(group["speedup"])), int(group["unsure"].sum())
    mark = "~" if 2 * unsure > len(group) else ""
    return {
        "model": f"{len(group)} cells",
        "GPUs": "all",
        "batch": "all",
        "against": REFERENCE,
        "speed-up": f"{mark}{mean.median:.2f} [{mean.low:.2f}, {mean.high:.2f}]",
        "peak memory ratio": "-",
        "note": "geometric mean of the pairs, interval over the pairs"
        + (f"; {unsure} of them unsure" if unsure else ""),
    }


def _numbers(rows: pd.DataFrame, name: str, form: str) -> Sequence[str]:
    return ["-" if pd.isna(value) else format(value, form) for value in rows[name]]


def _interval(row: pd.Series, name: str, digits: int) -> str:
    """Median to ``digits`` decimals, with its interval where it was measured."""
    if name not in row.index or pd.isna(row[name]):
        return "-"
    if row["evidence"] != "measured":
        return f"{row[name]:,.{digits}f}"
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
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "\\": "/"}
    escapes = str.maketrans(special)

    def escape(value: object) -> str:
        return str(value).translate(escapes)

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
