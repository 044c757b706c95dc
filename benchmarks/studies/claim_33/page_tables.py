"""Makes the tables of docs/verdict.md from the judged cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from benchmarks.report import words
from benchmarks.studies.claim_33.judge import BASELINES, CLAIM, EQUAL, JUDGED, MODES, unfit

_LABELS = {"zeropp": "ZeroPP", **BASELINES}

_REPRODUCED = [
    *("model", "cluster", "num_gpus", "global_batch"),
    *(f"speedup_over_{name}" for name in JUDGED),
    *("zeropp_peak_gib", "deepspeed_3d_peak_gib"),
]


def page_tables(verdicts: pd.DataFrame) -> dict[str, str]:
    """Markdown by name: ``answer`` (one sentence per baseline), and the tables ``best``, ``limit``,
    ``reproduced``, ``memory``, ``network``, ``equal``, ``paper``."""
    own = verdicts[verdicts.bandwidth == 1.0]
    best, equal, paper = (own[own["mode"] == mode] for mode in MODES)
    return {
        "answer": _answer(best),
        "best": _spread(best, list(BASELINES), "speedup_over_{}", "ZeroPP over"),
        "limit": _spread(best, ["zeropp", *BASELINES], "{}_share_of_limit", "contender"),
        "reproduced": _reproduced(best),
        "memory": _memory({"best plans": best, "equal degrees": equal, "paper's setting": paper}),
        "network": _network(verdicts[verdicts["mode"] == "best"]),
        "equal": _spread(equal, list(EQUAL), "speedup_over_{}", "ZeroPP over"),
        "paper": _spread(paper, list(EQUAL), "speedup_over_{}", "ZeroPP over"),
    }


def _answer(best: pd.DataFrame) -> str:
    """What the cells say of the claim, with one sentence per judged contender."""
    told = []
    for name in JUDGED:
        speedups = best[f"speedup_over_{name}"].dropna()
        reached = int((speedups >= CLAIM).sum())
        told.append(
            f"Over {BASELINES[name]}, ZeroPP at its best plan reaches {CLAIM} times the speed in "
            f"{reached} of {len(speedups)} cells (median {words.ratio(speedups.median())}, from "
            f"{words.ratio(speedups.min())} to {words.ratio(speedups.max())})." + unfit(best, name)
        )
    return " ".join(told)


def _spread(cells: pd.DataFrame, names: list[str], column: str, head: str) -> str:
    """The median, lowest and highest value of a column per contender and sequences per GPU."""
    if cells.empty:
        return "No cell has been priced in this setting."
    batches = dict(list(cells.groupby("sequences_per_gpu")))
    rows = []
    for name in names:
        row = [_LABELS[name]]
        for group in batches.values():
            values = group[column.format(name)].dropna()
            spread = f"{values.median():.2f} ({values.min():.2f} to {values.max():.2f})"
            row.append(spread if len(values) else "nothing fits")
        rows.append(row)
    return _markdown([head, *(f"{float(str(batch)):g} per GPU" for batch in batches)], rows)


def _reproduced(cells: pd.DataFrame) -> str:
    found = cells[cells.speedup_over_deepspeed_3d >= CLAIM].sort_values(_REPRODUCED[:4])
    rows = [
        [
            *(words.model_label(row[0]), words.cluster_label(row[1]), *map(str, row[2:4])),
            *(words.ratio(value) for value in row[4:7]),
            *(f"{value:.0f}" for value in row[7:]),
        ]
        for row in found[_REPRODUCED].itertuples(index=False, name=None)
    ]
    heads = ["model", "cluster", "GPUs", "batch", *(f"over {_LABELS[name]}" for name in JUDGED)]
    return _markdown([*heads, "ZeroPP GiB", "DeepSpeed GiB"], rows)


def _memory(bases: Mapping[str, pd.DataFrame]) -> str:
    """ZeroPP's peak memory divided by that of each judged contender, per basis of comparison."""
    rows = []
    for label, cells in bases.items():
        for name in JUDGED:
            ratios = (cells["zeropp_peak_gib"] / cells[f"{name}_peak_gib"]).dropna()
            if ratios.empty:  # not compared on this basis
                continue
            values = (ratios.min(), ratios.median(), ratios.max())
            rows.append([label, BASELINES[name], *(f"{value:.2f}" for value in values)])
    return _markdown(["plans", "peak over that of", "lowest", "median", "highest"], rows)


def _network(best: pd.DataFrame) -> str:
    """The speed-up per inter-node bandwidth, for the cells in which that was varied."""
    keys = ["model", "cluster", "num_gpus"]
    varied = best[best.groupby([*keys, "global_batch"])["bandwidth"].transform("nunique") > 1]
    factors = sorted(varied.bandwidth.unique())
    rows = [
        [BASELINES[name], f"{sequences:g}", *_by_factor(group, name, factors)]
        for name in JUDGED
        for sequences, group in varied.groupby("sequences_per_gpu")
    ]
    return _markdown(["over", "sequences per GPU", *(f"{factor:g}×" for factor in factors)], rows)


def _by_factor(group: pd.DataFrame, name: str, factors: list[float]) -> Iterator[str]:
    speedups = group.set_index("bandwidth")[f"speedup_over_{name}"]
    return (f"{speedups[factor]:.2f}" for factor in factors)


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table in which columns of numbers are aligned to the right."""
    rules = ["---:" if _is_numeric([row[i] for row in rows]) else "---" for i in range(len(heads))]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join(rules) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _is_numeric(texts: list[str]) -> bool:
    return bool(texts) and all(text.replace(".", "", 1).isdigit() for text in texts)
