"""The tables and sentences of README and docs/verdict.md, from the judged cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.report import display
from benchmarks.report.evidence import published_errors
from benchmarks.report.table import markdown_table
from benchmarks.verdict.assumptions import ASSUMPTIONS
from benchmarks.verdict.cells import CELL
from benchmarks.verdict.judge import (
    BASELINES,
    BOUND,
    CLAIM,
    COMPARABLE,
    EQUAL,
    JUDGED,
    LABELS,
    MODES,
    OPPONENTS,
    OWN,
    behind,
    bound_note,
    by_batch,
    reached,
    unfit,
)
from benchmarks.verdict.on_a_gpu import on_a_gpu
from benchmarks.verdict.uncertainty import (
    ERRORS,
    SEED,
    ErrorKind,
    Interval,
    Uncertainty,
    judged,
    kempnerforge_replays,
    program_errors,
    published,
    published_pairs,
    under_other_errors,
)

Key = tuple[str, str, int, int, float]  # model, cluster, GPUs, global batch, bandwidth

# The rows of the headline: the claim's opponent and the same program as it runs fastest, and those
# with which a reader would compare.
_HEADLINE = (
    *("deepspeed_3d", "deepspeed_best"),
    *("megatron_core", "torchtitan", "fsdp", "megatron_fsdp", BOUND),
)
NOTHING = "No cell has been priced in this setting."


def page_tables(
    plans: pd.DataFrame,
    repriced: pd.DataFrame,
    configured: Collection[Key],
) -> dict[str, str]:
    """Markdown by name: a number (``num_own``), sentences (``short``, ``unseen``, ``on_a_gpu``,
    ``own``, ``errors``, ``bound``, ``missing``, ``pipelines``) and tables
    (``rows``, ``answer``, ``headline``, ``headline_own``, ``ranges``, ``assumptions``, ``cells``,
    ``best``, ``limit``, ``behind``, ``memory``, ``network``, ``equal``, ``paper``).
    ``plans`` are the rows, ``repriced`` those of ``assumptions.csv``, and ``configured`` the keys
    of all cells that the study's configuration has.
    """
    verdicts, uncertainty = judged(plans, repriced)
    own = verdicts[verdicts.bandwidth == 1.0]
    best, equal, paper = (own[own["mode"] == mode] for mode in MODES)
    of_own = own[own["mode"] == OWN]
    own_types = Uncertainty(of_own, repriced, program_errors())
    ours = plans[(plans["contender"] == "zeropp") & (plans["mode"] == "best")]
    ours = ours[(ours["bandwidth"] == 1.0) & ours["step_s"].notna()]
    return {
        "short": short(best, uncertainty),
        "rows": _rows(best, uncertainty),
        "unseen": _unseen(),
        "on_a_gpu": on_a_gpu(uncertainty.medians, CHECKOUT / "results/reference/one_gpu"),
        "own": _own(own_types),
        "headline_own": _headline(of_own, own_types),
        "ranges": _ranges(under_other_errors(best, repriced)),
        "num_own": str(len(best)),
        "errors": _errors(),
        "headline": _headline(best, uncertainty),
        "answer": _answer(best, uncertainty),
        "pipelines": _pipelines(ours),
        "assumptions": _assumptions(uncertainty),
        "bound": bound_note(plans),
        "missing": _missing(plans, configured),
        "cells": _cells(best),
        "behind": behind(best, plans),
        "best": _spread(best, list(BASELINES), "speedup_over_{}", "ZeroPP over"),
        "limit": _spread(best, ["zeropp", *BASELINES], "{}_share_of_limit", "row"),
        "memory": _memory({"best plans": best, "equal degrees": equal, "paper's setting": paper}),
        "network": _network(verdicts[verdicts["mode"] == "best"]),
        "equal": _describe_setting(equal),
        "paper": _describe_setting(paper),
    }


def short(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """ZeroPP against Megatron-Core in one sentence, whose words follow the intervals."""
    core = list(uncertainty.medians["megatron_core"].values())
    core_1, core_4 = (f"**{i.value:.2f}** {_ends(i)}" for i in core)
    return (
        f"In simulation, {_compared('Megatron-Core', core)}: over {len(best)} cells the median of "
        f"ZeroPP's speed over its is {core_1} with one sequence per GPU and step, and {core_4} "
        "with four or more."
    )


def _rows(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """ZeroPP's speed over that of whom people ask for first."""
    lines = []
    for name in ("megatron_core", "fsdp", "deepspeed_best", "deepspeed_3d"):
        medians = [f"**{i.value:.2f}** {_ends(i)}" for i in uncertainty.medians[name].values()]
        lines.append([BASELINES[name], *medians, str(reached(best, name)[0])])
    heads = ["ZeroPP's speed over", "1 sequence per GPU and step", "4 or more"]
    return markdown_table([*heads, f"cells at {CLAIM} or above, of {len(best)}"], lines)


def _compared(label: str, intervals: Sequence[Interval]) -> str:
    """Who is faster, where all of the intervals say so."""
    if all(interval.low > 1 for interval in intervals):
        return f"ZeroPP is faster than {label}"
    if all(interval.high < 1 for interval in intervals):
        return f"{label} is faster than ZeroPP"
    if all(interval.low <= 1 <= interval.high for interval in intervals):
        return f"ZeroPP and {label} cannot be told apart"
    return f"ZeroPP and {label} are compared"


def _ends(interval: Interval) -> str:
    return f"({interval.low:.2f} to {interval.high:.2f})"


def _own(uncertainty: Uncertainty) -> str:
    """The medians where every program has the types of gradients that its users may choose."""
    if uncertainty.is_empty:
        return NOTHING
    texts = []
    for name in OPPONENTS:
        one, more = (f"{i.value:.2f} {_ends(i)}" for i in uncertainty.medians[name].values())
        texts.append(f"over {BASELINES[name]} {one} and {more}")
    return (
        "Where every program may sum and send gradients in 16 bits, if its own configuration has "
        f"that, the medians with one and with four or more sequences are {'; '.join(texts)}."
    )


def _unseen() -> str:
    """What published runs that are near to ZeroPP's layout, or were priced blind, say of its
    price."""
    errors = published_errors()
    errors = errors[(errors["program"] == "kempnerforge") & (errors["quantity"] == "speed")]
    devices = ", ".join(display.cluster_label(name) for name in errors["device"].unique())
    replayed = kempnerforge_replays()
    blind = np.abs(np.expm1(published("blind")["error"]))
    return (
        f"No run of ZeroPP's layout has been published. The nearest, {len(errors)} of "
        f"KempnerForge's PP × ZeRO-3 on {devices}, gather per microbatch and have tensor "
        f"parallelism, too: as described they are priced {_from_to(errors['error'])} too fast, "
        f"and as replays of their code {_from_to(pd.Series(replayed))}, which the ranges here "
        f"have. When the simulator first priced programs that it had not seen, {len(blind)} runs, "
        f"it was {np.median(blind):.0%} off in the median and {np.quantile(blind, 0.9):.0%} at the "
        "90th percentile; all errors are of speed."
    )


def _from_to(errors: pd.Series) -> str:
    return f"{errors.min():.0%} to {errors.max():.0%}"


def _ranges(kinds: Mapping[ErrorKind, Uncertainty]) -> str:
    """Where 90 % of draws leave the medians over three rows, by the errors that are drawn."""
    groups = list(next(iter(kinds.values())).medians[OPPONENTS[0]])
    rows = [
        [
            ERRORS[kind],
            *(_ends(of.medians[name][group])[1:-1] for name in OPPONENTS for group in groups),
        ]
        for kind, of in kinds.items()
    ]
    heads = [f"{BASELINES[name]}, {group}" for name in OPPONENTS for group in groups]
    return markdown_table(["errors of programs", *heads], rows)


def _headline(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """Per row the median by sequences per GPU, with its error and the range over cells, and how
    many cells reach the claim."""
    if best.empty:
        return NOTHING
    groups = by_batch(best)
    rows = []
    for name in _HEADLINE:
        if best[f"speedup_over_{name}"].isna().all():
            continue  # no plan of it fits, or none has been searched
        line = [LABELS[name]]
        for words, cells in groups.items():
            median, ratios = uncertainty.medians[name][words], best[f"speedup_over_{name}"][cells]
            spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
            line += [f"**{median.value:.2f}**", f"{median.low:.2f} to {median.high:.2f}", spread]
        count = uncertainty.reached(name)
        line.append(f"{count.value:.0f} ({count.low:.0f} to {count.high:.0f})")
        line.append(str(uncertainty.surely_reached(name)))
        rows.append(line)
    heads = [
        head
        for words in groups
        for head in (f"{words}: median", "its error (90 %)", "single cells")
    ]
    heads += [f"cells at {CLAIM} or more (90 %)", f"cells whose low end is {CLAIM} or more"]
    return markdown_table(["ZeroPP over", *heads], rows)


def _errors() -> str:
    """From how many programs and runs errors are drawn, and how large they are beside those of
    published pairs."""
    errors, rng = program_errors(), np.random.default_rng(SEED)
    drawn = np.abs(np.expm1(errors.draw(rng, 1) - errors.draw(rng, 1)))
    pairs = np.abs(np.expm1(published_pairs()))
    sizes = (
        f"{np.median(each):.1%} in the median and {np.quantile(each, 0.9):.1%} in the 90th "
        "percentile"
        for each in (drawn, pairs)
    )
    return (
        f"Errors of programs are drawn from {sum(map(len, errors.rest))} published runs, "
        f"{len(errors.rest)} times a program by a source, each priced without its source. The "
        f"ratio of two programs drawn so is off by {next(sizes)}; {len(pairs)} pairs of "
        "published runs of two programs with one model, batch and number of devices are off by "
        f"{next(sizes)}."
    )


def _pipelines(ours: pd.DataFrame) -> str:
    """In how many cells ZeroPP's best plan has no pipeline."""
    without = int((~ours["plan"].str.contains(r"(?<!\S)pp=")).sum())
    return (
        f"In {without} of {len(ours)} cells ZeroPP's best plan has one pipeline rank: there it is "
        "FSDP with units."
    )


def _assumptions(uncertainty: Uncertainty) -> str:
    """The median over three rows at both ends of the range of every assumption."""
    moved = {name: uncertainty.moved_medians(name) for name in OPPONENTS}
    groups = list(moved[OPPONENTS[0]])
    rows = []
    for number, assumption in enumerate(ASSUMPTIONS):
        ends = [moved[name][group][number] for name in OPPONENTS for group in groups]
        moves = f"× {assumption.low:g} to {assumption.high:g}"
        words = [assumption.label, assumption.why, moves]
        rows.append([*words, *(f"{low:.2f} to {high:.2f}" for low, high in ends)])
    heads = [f"{BASELINES[name]}, {group}" for name in OPPONENTS for group in groups]
    return markdown_table(["constant", "from", "range", *heads], rows)


def _answer(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """In how many cells ZeroPP reaches the claim over each judged row, and with which memory."""
    lines = []
    for name in JUDGED:
        fast, comparable = reached(best, name)
        count = uncertainty.reached(name)
        interval = f"{count.low:.0f} to {count.high:.0f}"
        cells = len(best[f"speedup_over_{name}"].dropna())
        lines.append([BASELINES[name], f"{fast} of {cells}", interval, str(comparable)])
    heads = ["ZeroPP over", f"cells at {CLAIM} or more", "90 %"]
    return markdown_table([*heads, f"of these with at most {COMPARABLE} times the memory"], lines)


def _reached(cells: pd.DataFrame, name: str) -> str:
    """The rest of a sentence on how often ZeroPP reaches the claim over a contender, and with how
    much memory."""
    speedups = cells[f"speedup_over_{name}"].dropna()
    fast, comparable = reached(cells, name)
    memory = f", in {comparable} of them with at most {COMPARABLE} times the memory" if fast else ""
    return (
        f"reaches {CLAIM} times the speed in {fast} of {len(speedups)} cells{memory} (median "
        f"{display.ratio(speedups.median())}, cells from {display.ratio(speedups.min())} to "
        f"{display.ratio(speedups.max())})." + unfit(cells, name)
    )


def _describe_setting(cells: pd.DataFrame) -> str:
    """Speed-ups in a given setting, and how often they come at comparable memory."""
    spread = _spread(cells, list(EQUAL), "speedup_over_{}", "ZeroPP over")
    if cells.empty:
        return spread
    sentences = (f"Over {BASELINES[name]}, ZeroPP {_reached(cells, name)}" for name in EQUAL)
    peaks = (
        f"Its peak is at most {COMPARABLE} times that of {BASELINES[name]} in "
        f"{int((cells.zeropp_peak_gib <= COMPARABLE * cells[f'{name}_peak_gib']).sum())} of "
        f"{len(cells)} cells."
        for name in EQUAL
    )
    return "\n\n".join([spread, " ".join([*sentences, *peaks])])


def _missing(plans: pd.DataFrame, configured: Collection[Key]) -> str:
    """Which configured cells have no rows."""
    missing = sorted(set(configured) - set(plans[CELL].itertuples(index=False, name=None)))
    if not missing:
        return "Every cell that the study's configuration asks for is among the rows."
    texts = [
        f"{display.model_label(model)} on {gpus} {display.cluster_label(cluster)}, "
        f"{batch / gpus:g} per GPU" + ("" if factor == 1.0 else f", {factor:g}× the bandwidth")
        for model, cluster, gpus, batch, factor in missing
    ]
    return "Configured, but not among the rows: " + "; ".join(texts) + "."


def _cells(best: pd.DataFrame) -> str:
    """Which batches were compared, per model, cluster and number of GPUs."""
    rows = []
    for (model, cluster, gpus), group in best.groupby(["model", "cluster", "num_gpus"]):
        batches = ", ".join(f"{batch:g}" for batch in sorted(group.sequences_per_gpu))
        names = [display.model_label(str(model)), display.cluster_label(str(cluster))]
        rows.append([*names, str(gpus), batches])
    return markdown_table(["model", "cluster", "GPUs", "sequences per GPU and step"], rows)


def _spread(cells: pd.DataFrame, names: list[str], column: str, head: str) -> str:
    """The median, lowest and highest value of a column per contender and sequences per GPU."""
    if cells.empty:
        return NOTHING
    batches = dict(list(cells.groupby("sequences_per_gpu")))
    rows = []
    for name in names:
        row = [LABELS[name]]
        for group in batches.values():
            values = group[column.format(name)].dropna()
            spread = f"{values.median():.2f} ({values.min():.2f} to {values.max():.2f})"
            row.append(spread if len(values) else "nothing fits")
        rows.append(row)
    return markdown_table([head, *(f"{float(str(batch)):g} per GPU" for batch in batches)], rows)


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
    return markdown_table(["plans", "peak over that of", "lowest", "median", "highest"], rows)


def _network(best: pd.DataFrame) -> str:
    """The speed-up per inter-node bandwidth, for the cells in which that was varied."""
    keys = ["model", "cluster", "num_gpus"]
    varied = best[best.groupby([*keys, "global_batch"])["bandwidth"].transform("nunique") > 1]
    factors = sorted(varied.bandwidth.unique())
    rows = [
        [BASELINES[name], f"{sequences:g}", *(f"{speedups[factor]:.2f}" for factor in factors)]
        for name in JUDGED
        for sequences, group in varied.groupby("sequences_per_gpu")
        for speedups in [group.set_index("bandwidth")[f"speedup_over_{name}"]]
    ]
    return markdown_table(
        ["over", "sequences per GPU", *(f"{factor:g}×" for factor in factors)], rows
    )
