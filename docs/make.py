"""Fill the tables of README and documentation, and draw their pictures: ``python -m docs.make``.

Tables and sentences stand between ``<!-- table: KIND WHERE -->`` and ``<!-- end of table -->``, and
numbers in a sentence between ``<!-- value: KIND WHERE -->`` and ``<!-- end of value -->``. They
come from the records in ``results/reference`` alone; a test holds the pages to them. The schedules
drawn are the suite's own programs, priced by its event loop; no clock is involved.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from functools import cache
from io import StringIO
from itertools import pairwise
from math import expm1, log, log1p
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from PIL import Image
from rich.console import Console

from benchmarks.explain.answer import answer, best_plans, changes_of
from benchmarks.explain.measured import measured_run, show_measured
from benchmarks.explain.question import Question, ask
from benchmarks.explain.screen import show, show_best, show_changes
from benchmarks.records.simulated import TABLE
from benchmarks.report.atlas_page import write_page
from benchmarks.report.charts import say_what_it_shows, throughput_bars
from benchmarks.report.display import cluster_label, contender_label, model_label
from benchmarks.report.frame import best_configuration, latest_ok, load_frame
from benchmarks.report.one_gpu import one_gpu_tables
from benchmarks.report.opponents import moved_table, opponents_table
from benchmarks.report.ratio_errors import (
    FEWEST_RUNS,
    factor,
    measured_over_priced,
    pairs,
    stranger_runs,
)
from benchmarks.report.speedup import headline_table
from benchmarks.report.table import markdown, markdown_table
from benchmarks.report.tables import as_table
from benchmarks.report.timelines import timeline_figure
from benchmarks.specification import DTYPES, SpecError
from benchmarks.specification.contenders import ROWS
from benchmarks.verdict.assumptions import REPRICED
from benchmarks.verdict.atlas import COMMITTED, atlas_tables
from benchmarks.verdict.measured_pairs import (
    pairs_figure,
    pairs_of_case,
    pairs_range,
    pairs_table,
)
from benchmarks.verdict.pages import page_tables
from benchmarks.verdict.pictures import pictures_of
from benchmarks.verdict.uncertainty import judged
from zeropp.engine.settings import Settings
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.event_loop import run
from zeropp.schedule.program import Schedule, StageCost
from zeropp.types.timeline import Timeline
from zeropp.types.training import OptimizerConfig

_DOCS = Path(__file__).parent
_IMAGES = _DOCS / "images"
_REFERENCE = _DOCS.parent / "results" / "reference"
PAGES = (_DOCS.parent / "README.md", *sorted(_DOCS.glob("*.md")))
_TABLE = re.compile(
    r"(<!-- table: (\w+) (\S+) -->\n)(?:.*?\n)??(<!-- end of table -->)", flags=re.DOTALL
)
_VALUE = re.compile(r"(<!-- value: (\w+) (\S+) -->).*?(<!-- end of value -->)", flags=re.DOTALL)
_RANKS, _MICROBATCHES = 4, 8
_APART = 0.02  # two runs whose speeds differ by less have no known order
_TIMES = ("4900tokens/s/GPU", "5150tokens/s/GPU num_gpus=64 global_batch=256")  # on docs/explain.md


def filled(text: str) -> str:
    """A page with its tables and numbers as the records say."""
    text = _TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3])}\n{m[4]}", text)
    return _VALUE.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3])}{m[4]}", text)


def _comparison(records: str) -> str:
    """The headline table of a folder of records."""
    frame, skipped = load_frame([_REFERENCE / records])
    assert not skipped, skipped
    return markdown(headline_table(latest_ok(frame)).grid()).strip()


def _across(records: str) -> str:
    """Tokens per second and rank of every contender's fastest configuration in a folder of records,
    a column per model and number of ranks; of repeated runs the median and where the next is."""
    frame, skipped = load_frame([_REFERENCE / records])
    assert not skipped, skipped
    best = best_configuration(latest_ok(frame))
    cells = list(dict.fromkeys(zip(best["model"], best["num_gpus"], strict=True)))
    lines = []
    for name, rows in best.groupby("contender", sort=False):
        of = rows.set_index(["model", "num_gpus"])
        lines.append([contender_label(str(name)), *(_rate(of.loc[cell]) for cell in cells)])
    heads = [f"{model_label(model)}, {ranks} ranks" for model, ranks in cells]
    return markdown_table(["tokens/s/rank", *heads], lines)


def _rate(row: pd.Series) -> str:
    low, high = row["tokens_per_s_per_gpu_low"], row["tokens_per_s_per_gpu_high"]
    interval = f" [{low:.0f}, {high:.0f}]" if row["runs"] > 1 else ""
    return f"{row['tokens_per_s_per_gpu']:.0f}{interval}"


def _verdict(name: str) -> str:
    return _verdict_tables()[name]


@cache
def _verdict_tables() -> dict[str, str]:
    return page_tables(*_verdict_records())


def _verdict_records() -> list[pd.DataFrame]:
    return [pd.read_csv(_REFERENCE / "claim_33" / name) for name in (TABLE, REPRICED)]


def _accuracy(_: str) -> str:
    """How far the simulator is from published measurements, in sample and as strangers: of a run,
    and of the ratio of two runs with one model, batch and devices."""
    frame = pd.read_csv(_REFERENCE / "validation" / "strangers.csv")
    frame = frame.query("source == 'all sources'").set_index("quantity")
    lines = []
    for name, label in (("speed", "speed of a run"), ("memory", "memory of the fullest rank")):
        row = frame.loc[name]
        shares = [f"{row[of]:.1%}" for of in ("median_in_sample", "p90_in_sample", "median", "p90")]
        inside = f"{row['inside']:.0%} in {row['low']:+.0%} to {row['high']:+.0%}"
        lines.append([label, f"{row['runs']:,}", *shares, f"{row['bias']:+.1%}", inside, ""])
    for one_program, of in ((True, "one program"), (False, "two programs")):
        shares = []
        for error in ("in_sample", "stranger"):
            found = pd.DataFrame(pairs(one_program=one_program, error=error))
            shares += [f"{found[1].abs().map(expm1).quantile(q):.1%}" for q in (0.5, 0.9)]
        apart = found[found[2].abs() > log1p(_APART)]  # of strangers
        named = ((apart[1] + apart[2]) * apart[2] > 0).mean()
        inside = f"90% in ± {factor(one_program=one_program) - 1:.0%}"
        order = f"{named:.0%} of {len(apart):,}"
        lines.append([f"ratio of two runs of {of}", f"{len(found):,}", *shares, "", inside, order])
    heads = ["what", "runs or pairs", "in sample: median error", "90th percentile"]
    heads += ["as strangers: median error", "90th percentile", "bias", "inside the interval"]
    return markdown_table([*heads, "the faster one is named"], lines)


def _all_errors() -> pd.DataFrame:
    return pd.read_csv(_REFERENCE / "validation" / "errors.csv")


def _p90(row: pd.Series | dict[Any, Any], name: str = "p90") -> str:
    """A 90th percentile; nothing if it is of so few runs that one of them decides it."""
    return f"{row[name]:.1%}" if row["runs"] >= FEWEST_RUNS else ""


def _strangers(quantity: str) -> str:
    """The errors of every source in sample, and of its runs as strangers, for speed or memory."""
    folder = _REFERENCE / "validation"
    frame = pd.read_csv(folder / "strangers.csv").query("quantity == @quantity")
    before = pd.read_csv(folder / "strangers_before.csv").query("quantity == @quantity")
    medians = before.set_index("source")["median"]
    lines = []
    for _, row in frame.iterrows():
        texts = [f"{row['median_in_sample']:.1%}", _p90(row, "p90_in_sample")]
        texts += [f"{row['median']:.1%}", _p90(row)]
        texts += [f"{row['bias']:+.1%}", f"{row['inside']:.0%}"]
        texts.append(f"{row['low']:+.0%} to {row['high']:+.0%}")
        texts.append(f"{medians[row['source']]:.1%}" if row["source"] in medians else "")
        lines.append([row["source"], f"{row['runs']:,}", *texts])
    heads = ["source left out", "runs", "in sample: median", "90th percentile"]
    heads += ["as a stranger: median", "90th percentile", "bias", "inside the interval"]
    return markdown_table([*heads, "interval", "median before"], lines)


def _errors(kind: str) -> str:
    """Errors of the simulator by source and by device."""
    lines = []
    for row in _all_errors().query("kind == @kind").to_dict("records"):
        shares = [f"{row['median']:.1%}", _p90(row), f"{row['bias']:+.1%}"]
        lines.append([*(str(row[name]) for name in ("source", "role", "rows", "runs")), *shares])
    return markdown_table(["source", "role", "rows", "runs", "median", "p90", "bias"], lines)


_CAUSES = {  # of a source's worst run, by its model
    (
        "Modalities scaling experiments",
        "GPT 2.7B",
    ): "all-reduces of hybrid sharding take longer than trees and less than rings",
    ("InternEvo train_performance", "InternLM 7B"): "about the whole reduction of gradients",
    (
        "torchtitan benchmarks",
        "Llama 3.1 8B",
    ): "half of it: all slices of asynchronous TP except the first count as hidden",
}


def _worst(count: str) -> str:
    """The run with the largest error of speed as a stranger, of each of the ``count`` sources
    that have the largest."""
    runs = pd.DataFrame(stranger_runs()).query("quantity == 'speed'")
    runs = runs.assign(speed=1 + runs["stranger"].astype(float))
    order = runs["speed"].map(log).abs().sort_values(ascending=False).index
    lines = []
    for row in runs.loc[order].drop_duplicates("source").head(int(count)).to_dict("records"):
        said = [str(row[name]) for name in ("source", "model", "device", "num_gpus", "tp", "pp")]
        cause = _CAUSES.get((row["source"], row["model"]), "none found")
        lines.append([*said, f"{row['speed']:.2f}", cause])
    heads = ["source", "model", "device", "GPUs", "TP", "PP", "simulated over measured speed"]
    return markdown_table([*heads, "cause"], lines)


def _eight_bits(_: str) -> str:
    """What 8 bits gain over 16, where a source published a run of both, by the hidden size."""
    runs = pd.DataFrame(stranger_runs()).query("quantity == 'speed'")
    power = runs["metric"].str.contains("time").map({True: -1, False: 1})
    runs = runs.assign(
        measured=runs["value"].astype(float) ** power,
        simulated=runs["value"].astype(float) ** power * (1 + runs["in_sample"].astype(float)),
        hidden=runs["hidden"].astype(float),
    )
    same = ["source", "model", "device", "num_gpus", "tp", "pp", "cp", "seq", "micro_batch"]
    same += ["global_batch", "recompute", "compiled", "metric", "hidden"]
    eight, half = (runs[runs["dtype"].isin(DTYPES[name])] for name in ("fp8", "bf16"))
    both = eight.merge(half, on=same).drop_duplicates("place_x")
    gains = {name: both[f"{name}_x"] / both[f"{name}_y"] for name in ("measured", "simulated")}
    both = both.assign(**gains, error=gains["simulated"] / gains["measured"] - 1)
    lines = []
    for low, high in pairwise((0, 2048, 4096, 8192, 20480)):
        of = both[both["hidden"].between(low + 1, high)]
        medians = [f"{of[name].median():.2f}" for name in gains]
        sizes = [f"{of['error'].median():+.1%}", f"{of['error'].abs().quantile(0.9):.1%}"]
        counts = [str(len(of)), str(of["source"].nunique())]
        lines.append([f"{low + 1:,} to {high:,}", *counts, *medians, *sizes])
    heads = ["hidden size", "pairs", "sources", "measured gain", "simulated gain"]
    return markdown_table([*heads, "error: median", "90th percentile of its size"], lines)


def _fits(column: str) -> str:
    """How often the simulator is right on whether a run fits into memory, by a column."""
    frame = pd.read_csv(_REFERENCE / "validation" / "validation.csv", low_memory=False)
    frame = frame[frame["fits"].notna()]
    too_large = frame["fits"] == "no"
    ran_out = (frame["metric"] == "ran_out_of_memory") & (frame["value"] == "yes")
    lines = []
    groups = {**frame.groupby(column).groups, f"all {column}s": frame.index}
    for name, rows in groups.items():
        out, large = ran_out.loc[rows], too_large.loc[rows]
        counts = (out.sum(), (out & large).sum(), (~out).sum(), (~out & large).sum())
        lines.append([str(name), *(f"{count:,}" for count in counts)])
    heads = [column, "ran out of memory", "of these predicted to", "ran", "predicted not to fit"]
    return markdown_table(heads, lines)


def _priced(what: str) -> str:
    """How many published rows have a price, or what ordinary runs are measured to have of it."""
    if what == "ordinary":
        return "{:.2f} to {:.2f}".format(*measured_over_priced())
    frame = pd.read_csv(_REFERENCE / "validation" / "validation.csv", usecols=["predicted"])
    priced = frame["predicted"].notna()
    return {"share": f"{priced.mean():.0%}", "counts": f"{priced.sum():,} of {len(priced):,}"}[what]


def _whole_blocks(contender: str) -> str:
    """How much longer a contender's best plan takes if stages do not end inside a block."""
    frame = pd.read_csv(_REFERENCE / "claim_33" / "whole_blocks.csv")
    longer = frame[frame["contender"] == contender]["longer"]
    return f"{longer.median():.1%} longer in the median and {longer.max():.1%} at most"


def _number(name: str) -> str:
    """A number of a sentence that stands in no table of its page."""
    orders = json.loads((_REFERENCE / "schedule_orders.json").read_text())
    sums = load_frame([_REFERENCE / "sums"])[0]["losses"]
    eight = pd.read_csv(_REFERENCE / "eight_bits.csv")
    weak = pd.read_csv(_REFERENCE / "scaling" / "weak_scaling.csv").query("parameters_b >= 39")
    ahead = (weak["zeropp"] / weak["megatron_core"]).groupby(weak["cluster"])
    return {
        **{f"pairs_{n}": pairs_range("65B to 70B", "H100", f"{n} bits") for n in ("16", "8")},
        "orders_sizes": f"{orders['bound']['sizes']:,}",
        "orders_plans": f"{orders['durations']['plans']}",
        "orders_gain": f"{orders['durations']['mean_gain']:.1%}",
        "sums": f"{max(abs(a / b - 1) for a, b in zip(*sums, strict=True)):.3%}",
        "eight_bits": f"{(eight['fp8'] / eight['bf16'] - 1).abs().max():.1%}",
        **{f"ahead_{of}": f"{each.min():.2f} to {each.max():.2f}" for of, each in ahead},
    }[name]


def _traced(column: str) -> str:
    """Simulated memory against traced, by a column of their table."""
    frame = pd.read_csv(_REFERENCE / "memory" / "traced_vs_simulated.csv")
    frame["error"] = frame["relative_error"].abs()
    lines = []
    for name, rows in frame.groupby(column, sort=False):
        plans = len(rows[["model", "plan"]].drop_duplicates())
        shares = [f"{rows['error'].median():.1%}", f"{rows['error'].max():.1%}"]
        lines.append([str(name), str(plans), str(len(rows)), *shares])
    return markdown_table([column, "plans", "ranks", "median", "largest"], lines)


def _configurations(folder: str) -> str:
    """What ``zeropp explain`` reads in the files of a folder of docs/examples."""
    place = _DOCS / "examples" / folder
    lines = []
    for line in yaml.safe_load((place / "index.yaml").read_text(encoding="utf-8")):
        words = line.split()
        files = [str(place / word) for word in words if "=" not in word]
        given = [word for word in words if "=" in word]
        try:
            said, named = _as_read(ask(files, ["cluster=h100", *given], []))
        except SpecError as error:
            said, named = "refused", [str(error).replace(f"{place}/", "")]
        lines.append([f"`{line}`", said, "; ".join(named).replace("|", "\\|")])
    return markdown_table(["files and words", "read as", "named, or why"], lines)


def _as_read(question: Question) -> tuple[str, list[str]]:
    """A question's program, model and degrees in a line, and what has no price."""
    task, knobs = question.task, vars(question.knobs)
    words = [question.contender.label, task.shape.name]
    words += [f"{task.num_gpus} GPUs", f"sequence {task.shape.seq}", f"batch {task.global_batch}"]
    size = question.microbatch_size
    words += [task.precision] if size == "auto" else [f"microbatch {size}", task.precision]
    degrees: dict[str, object] = {
        key: knobs[key] for key in ("tp", "pp", "context", "shard", "replicate") if key in knobs
    }
    degrees |= {"chunks": knobs.get("chunks", 1)}
    words += [f"{key}={value}" for key, value in degrees.items() if value not in (1, "auto")]
    words += [f"zero{knobs['replicate_zero']}"] if knobs.get("replicate_zero", 0) in (1, 2) else []
    words += ["sequence parallel"] if knobs.get("sequence_parallel") is True else []
    recompute = knobs["recompute"]
    words += [f"{recompute} recompute"] if recompute not in ("none", "auto") else []
    words += ["the rest is searched"] if "auto" in degrees.values() else []
    return ", ".join(words), question.reading.named


def _replays(name: str) -> str:
    """Replayed steps over described ones, by contender."""
    rows = pd.read_csv(_REFERENCE / f"{name}.csv")
    rows["compute"] = rows["replayed_compute_s"] / rows["described_compute_s"]
    rows["peak"] = rows["replayed_peak_gib"] / rows["described_peak_gib"]
    lines = []
    for contender, own in rows.groupby("contender"):
        cells = [contender_label(str(contender)), str(len(own))]
        for column in ("ratio", "compute", "peak"):
            low, middle, high = own[column].quantile([0.0, 0.5, 1.0])
            ends = f" ({low:.3f} to {high:.3f})" * (len(own) > 1)
            cells.append(f"{middle:.3f}{ends}")
        waits = own["replayed_replicas_s"] / own["replayed_step_s"]
        lines.append([*cells, f"{waits.median():.1%}"])
    heads = ["", "plans", "step", "compute", "peak memory"]
    return markdown_table([*heads, "waits for all-reduces and all-to-alls"], lines)


def _orders(kind: str) -> str:
    """ZeroPP's order in its engine and in torch's runtime beside torch's own: ``measured`` runs on
    CPUs, steps ``replayed`` on two clusters, or how much longer one of these takes than another."""
    if kind == "measured":
        frame, skipped = load_frame([_REFERENCE / "torch_orders"])
        assert not skipped, skipped
        lines = [
            [contender_label(row["contender"]), row["layout"], _rate(row)]
            for _, row in latest_ok(frame).sort_values("tokens_per_s_per_gpu").iterrows()
        ]
        return markdown_table(["runs in", "plan", "tokens/s/rank"], lines)
    rows = pd.read_csv(_REFERENCE / "torch_orders.csv")
    clusters = list(dict.fromkeys(rows["cluster"]))
    if kind != "replayed":
        return _longer(rows.pivot(index="way", columns="cluster", values="step_s"), kind)
    lines = []
    for way, of in rows.groupby("way", sort=False):
        cells = of.set_index("cluster")
        times = [
            "{step_s:.2f} ({reduce_s:.2f}, {transfer_s:.2f})".format(**cells.loc[cluster])
            for cluster in clusters
        ]
        first = cells.iloc[0]
        lines.append(
            [str(way), *times, f"{first['peak_gib']:.0f}", f"{first['gathers_per_stage']:g}"]
        )
    heads = [f"s on {cluster} (waits for reductions, messages)" for cluster in clusters]
    peak = f"peak GiB ({rows['limit_gib'].min():.0f} fit)"
    return markdown_table(["", *heads, peak, "gathers of a stage"], lines)


def _longer(steps: pd.DataFrame, kind: str) -> str:
    """How much longer ZeroPP's order takes in torch's runtime than in the engine (``engine``) and
    than torch's fastest order (``order``), and that one than the engine's fastest (``best``)."""
    same = steps.loc["ZeroPP's order, torch's runtime, unit=4"]
    own = steps[~steps.index.str.startswith("ZeroPP")].min()
    engine = steps[steps.index.str.contains("its engine")]
    longer = {
        "engine": same / engine.loc["ZeroPP's order, its engine, unit=4"],
        "order": same / own,
        "best": own / engine.min(),
    }
    words = (f"{ratio - 1:.1%} ({str(cluster).upper()})" for cluster, ratio in longer[kind].items())
    return " and ".join(words)


def _atlas(name: str) -> str:
    return _atlas_tables()[name]


@cache
def _atlas_tables() -> dict[str, str]:
    return atlas_tables(pd.read_csv(COMMITTED))


def _scaling(name: str) -> str:
    return markdown(as_table(pd.read_csv(_REFERENCE / "scaling" / f"{name}.csv")).grid())


def _host_link(_: str) -> str:
    """Speeds without and with activations in the host's memory, by its link."""
    rows = pd.read_csv(_REFERENCE / "scaling" / "host_link.csv")
    names, of_link = [name for name in rows if name in ROWS], "cluster.host.bandwidth_gb_s"
    kept = rows[rows[of_link].isna()].set_index(["model", "cluster"])[names]
    lines = []
    for row in rows[rows[of_link].notna()].to_dict("records"):
        before = kept.loc[(row["model"], row["cluster"])]
        pairs = [f"{before[name]:,.0f} → {row[name]:,.0f}" for name in names]
        case = [model_label(row["model"]), cluster_label(row["cluster"])]
        lines.append(
            [*case, f"{row[of_link]:g}", *(pair.replace("nan → nan", "–") for pair in pairs)]
        )
    heads = ["model", "cluster", "link [GB/s]", *map(contender_label, names)]
    return markdown_table(heads, lines)


def _opponents(program: str) -> str:
    """The settings of an opponent, or how far those that were searched move the verdict."""
    if program == "moved":
        return moved_table(_REFERENCE / "opponents/variants.csv", _REFERENCE / "claim_33" / TABLE)
    return opponents_table(program)


def _one_gpu(name: str) -> str:
    """A table of the records of one GPU."""
    tables = one_gpu_tables(_REFERENCE / "one_gpu")
    return markdown(next(table for table in tables if table.name == name).grid())


def _settings(name: str) -> str:
    """The fields of a settings class, their defaults, and the text below or beside each of them; a
    field without one has that of the class that it comes from."""
    kind = {"Settings": Settings, "OptimizerConfig": OptimizerConfig}[name]
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        texts |= _field_texts(base)
    rows = []
    for each in fields(kind):
        if each.default is not MISSING:
            default = getattr(each.default, "__name__", repr(each.default))
        elif each.default_factory is not MISSING:
            default = f"{getattr(each.default_factory, '__name__', '')}()".replace("dict()", "{}")
        else:
            default = "must be given"
        rows.append([f"`{each.name}`", default.replace("'", '"'), texts.get(each.name, "")])
    return markdown_table(["keyword", "default", "what it is"], rows)


def _field_texts(kind: type) -> dict[str, str]:
    """The string below each field of a class, or the comment behind it, where there is one."""
    lines = inspect.getsource(kind).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for here, below in pairwise([*tree.body, ast.Pass()]):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            text = lines[(here.end_lineno or 1) - 1].partition("  # ")[2]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = " ".join(str(below.value.value).split()).replace("``", "`")
            texts |= {here.target.id: text} if text else {}
    return texts


TABLES: dict[str, Callable[[str], str]] = {
    "settings": _settings,
    "measured_pairs": pairs_table,
    "atlas": _atlas,
    "scaling": _scaling,
    "host_link": _host_link,
    "comparison": _comparison,
    "across": _across,
    "verdict": _verdict,
    "accuracy": _accuracy,
    "errors": _errors,
    "eight_bits": _eight_bits,
    "worst": _worst,
    "strangers": _strangers,
    "fits": _fits,
    "priced": _priced,
    "whole_blocks": _whole_blocks,
    "number": _number,
    "traced": _traced,
    "configurations": _configurations,
    "replays": _replays,
    "orders": _orders,
    "opponents": _opponents,
    "one_gpu": _one_gpu,
}


def step(name: str, words: str, *, chunks: int, gather: bool, unit: int | None = None) -> Timeline:
    """One step of a schedule; a model chunk takes 1/chunks of a rank's share of the model."""
    share = 2 / chunks  # in units of half a rank's forward, for every schedule the same work
    cost = StageCost(forward=share, backward_input=share, backward_weight=share, transfer=0.05)
    if gather:
        cost = replace(cost, unshard=0.6, reduce_grad=0.6)
    costs = [cost] * (_RANKS * chunks)
    compute = build(
        name,
        num_ranks=_RANKS,
        chunks=chunks,
        num_microbatches=_MICROBATCHES,
        unit=unit,
        costs=costs,
    )
    return _timeline(words, lower(compute, gather=gather), costs)


def saving(words: str, *, parts: int = 1, offload: bool = False) -> Timeline:
    """One step of ZeroPP with full backwards, whose gradients are reduced in parts, or whose
    activations wait in the host's memory; a chunk's forward takes 1."""
    cost = StageCost(
        forward=1.0,
        backward_input=1.0,
        backward_weight=1.0,
        unshard=1.5,
        reduce_grad=3.0,
        parts=parts,
        transfer=0.05,
        store=0.8 * offload,
        load=0.8 * offload,
    )
    costs = [cost] * 6
    compute = build(
        "zeropp",
        num_ranks=2,
        chunks=3,
        num_microbatches=8,
        unit=4,
        split_backward=False,
        costs=costs,
    )
    offloaded = range(len(costs)) if offload else ()
    return _timeline(words, lower(compute, gather=True, offloaded=offloaded), costs)


def _timeline(words: str, schedule: Schedule, costs: list[StageCost]) -> Timeline:
    result = run(schedule, costs)
    return Timeline(f"{words}: step {result.over_ideal:.2f} x ideal", "simulated", result.spans())


def main() -> None:
    """Fill the pages' tables; draw README's throughput and the documentation's schedules."""
    argparse.ArgumentParser(
        prog="python -m docs.make",
        description="Fill the tables of README and documentation from results/reference and draw "
        "their pictures. Takes no arguments; writes README.md, docs/*.md and docs/images.",
    ).parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    figure = timeline_figure(
        [
            step("1f1b", "1F1B, what DeepSpeed runs (no gathers)", chunks=1, gather=False),
            step("interleaved_1f1b", "interleaved 1F1B, V=2 (no gathers)", chunks=2, gather=False),
            step("zeropp", "ZeroPP, V=2, U=4, parameters sharded", chunks=2, gather=True, unit=4),
        ],
        time_unit="half a rank's forward",
    )
    less_memory = timeline_figure(
        [
            saving("whole gradients"),
            saving("gradients in 4 parts", parts=4),
            saving("offloaded activations", offload=True),
        ],
        time_unit="a chunk's forward",
    )
    _IMAGES.mkdir(exist_ok=True)
    throughput = next(throughput_bars(latest_ok(load_frame([_REFERENCE / "demo"])[0])))
    say_what_it_shows(throughput)
    throughput.figure.savefig(_IMAGES / "demo_throughput.png")
    pairs_figure().savefig(_IMAGES / "measured_pairs.png", dpi=150)
    plans, repriced = _verdict_records()
    for picture in pictures_of(plans, *judged(plans, repriced)):
        picture.figure.savefig(_IMAGES / f"claim_33_{picture.name}.png", dpi=150)
    rows = latest_ok(load_frame([COMMITTED])[0])
    print(write_page(rows, _DOCS / "atlas.html", pairs_of_case), end="")
    figure.savefig(_IMAGES / "schedules.png", dpi=130)
    figure.savefig(_IMAGES / "schedules.svg", metadata={"Date": None})
    less_memory.savefig(_IMAGES / "less_memory.svg", metadata={"Date": None})
    for path in _IMAGES.glob("*.png"):  # in 256 colours they take a quarter of the bytes
        few = Image.open(path).convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE)
        few.save(path, optimize=True)
    _explained(["num_gpus=16", "cluster=h100"])


def _explained(words: list[str]) -> None:
    """Draw what ``zeropp explain`` prints for the examples of its page, without and with a
    measurement."""
    file = _DOCS / "examples" / "llama3_8b.toml"
    asked = [str(file)], words, list[str]()
    question, title = ask(*asked), f"zeropp explain {file.name} {' '.join(words)}"
    with _terminal("explain", title) as console:
        show(answered := answer(question), console, verbose=False)
        show_changes(answered, changes_of(answered), console)
        show_best(answered, best_plans(answered.question), console)
    with _terminal("measured", f"{title} --measured {_TIMES[0]} ...") as console:
        show_measured([measured_run(text, *asked) for text in _TIMES], console)


@contextmanager
def _terminal(name: str, title: str) -> Iterator[Console]:
    """A console whose text becomes a picture."""
    console = Console(record=True, width=100, file=StringIO(), highlight=False)
    yield console
    console.save_svg(str(_IMAGES / f"{name}.svg"), title=title, unique_id=name)


if __name__ == "__main__":
    main()
