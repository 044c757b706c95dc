"""Records as a DataFrame: one row per record, one column per quantity, units in column names."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from benchmarks.records.losses import Losses, apart_from_others
from benchmarks.records.metrics import (
    mfu,
    model_tflops_per_gpu,
    peak_memory_gib,
    tokens_per_s_per_gpu,
)
from benchmarks.records.record import (
    RecordError,
    RunRecord,
    find_below,
    find_records,
    read_record,
)
from benchmarks.records.recorded_spec import (
    RecordedSpec,
    differences,
    flat_spec,
    read_spec,
    unchecked,
)
from benchmarks.records.same_run import evidence_of, settings_of
from benchmarks.records.samples import LEAST_SAMPLES, Summary, half_width, pooled_spread, summarise
from benchmarks.records.simulated import TABLE, read_table
from benchmarks.report import display
from benchmarks.report.display import varied
from benchmarks.specification.contenders import PRICED, name_of
from zeropp.price import parameter_count
from zeropp.schedule.program import collector_paused
from zeropp.types.timeline import timeline_from_rows

pd.set_option("mode.string_storage", "python")  # rows are read one by one, for which Arrow is slow

# Knobs that the text of a configuration shows in a form of their own, or under a shorter name.
_NAMED = {
    *("name", "tp", "pp", "chunks", "shard", "replicate", "replicate_zero", "unit"),
    *("schedule", "recompute", "sequence_parallel"),
}
_SHORT = {"activation_cap": "cap", "reduce_every": "reduce"}
# What simple rules make of ``auto``.
_RULES = {"prefetch": 1, "gradient_parts": 1, "merged_microbatches": 1}
# Knobs that a tuner sets. If all of them are the contender's defaults, nobody has tuned it.
_DEGREES = (
    *("pp", "tp", "shard", "replicate", "replicate_zero", "chunks", "unit"),
    *("activation_cap", "schedule", "sequence_parallel", "recompute"),
)


def default_knobs(contender: str) -> dict[str, Any]:
    """The value of every knob that nobody has set; none for a contender that is not registered."""
    known = PRICED.get(contender)
    return vars(known.knobs()) if known else {}


def configuration_text(record: RunRecord, spec: RecordedSpec) -> str:
    """Degrees above 1 and the knobs that were set, as ``zeropp.choose.contender.describe`` writes
    plans: ``pp=2 shard=2 V=2 U=4``.

    A unit that the planner cut also shows what it became, as in ``U=16 (run as 8)``. An
    infeasible record has no plan, so its text shows what was asked for: ``auto`` if all degrees
    were left open. A study's record has its plan in words.
    """
    if record.basis:
        return str(record.plan["words"])
    plan, knobs = record.plan, spec.contender.knobs
    degrees = plan.get("layout") or {k: v for k, v in knobs.items() if v != "auto"}
    names = ("pp", "tp", "shard", "replicate")
    words = [f"{name}={degrees[name]}" for name in names if degrees.get(name, 1) > 1]
    words += [f"b={spec.microbatch_size}"] * (spec.microbatch_size not in ("auto", 1))
    if knobs.get("schedule", "auto") not in ("auto", spec.contender.name):
        words.append(knobs["schedule"])
    if "chunks" in knobs and degrees.get("chunks", 1) > 1:
        words.append(f"V={degrees['chunks']}")
    asked = knobs.get("unit")
    unit = plan.get("unit", 0) if asked else 0
    if isinstance(asked, int) and unit not in (0, asked):
        words.append(f"U={asked} (run as {unit})")
    elif unit not in (0, plan.get("num_microbatches")):
        words.append(f"U={unit}")
    if stage := degrees.get("replicate_zero"):
        words.append(f"zero{stage}")
    words += ["sp"] * (knobs.get("sequence_parallel") is True)
    if knobs.get("recompute", "auto") not in ("auto", "none"):
        words.append(f"{knobs['recompute']} recompute")
    for name, default in default_knobs(spec.contender.name).items():
        value = knobs.get(name, default)
        rule = ("auto", 0, "dp_inner", _RULES.get(name))
        plain = rule if default == "auto" else (default, "auto")
        if name not in _NAMED and value not in plain:
            words.append(name if value is True else f"{_SHORT.get(name, name)}={value}")
    return " ".join(words) or ("1 rank" if spec.num_gpus == 1 else "auto")


def asked_knobs(record: RunRecord, spec: RecordedSpec) -> dict[str, Any]:
    """Every knob and the microbatch size as they were asked for; ``unit`` also shows the unit that
    the planner made of it."""
    knobs = {k: v for k, v in spec.contender.knobs.items() if k != "name"}
    run = record.plan.get("unit", 0)
    if isinstance(knobs.get("unit"), int) and run not in (0, knobs["unit"]):
        knobs["unit"] = f"{knobs['unit']} (run as {run})"
    return knobs | {"microbatch_size": spec.microbatch_size}


# Keys with columns of their own, and in the last line those of a configuration.
_OWN = [
    *("model", "cluster", "num_gpus", "global_batch", "model.seq", "precision"),
    *("contender", "microbatch_size"),
]


def has_default_degrees(spec: RecordedSpec) -> bool:
    """Whether every degree is the contender's default, which means that nobody has tuned it."""
    default, knobs = default_knobs(spec.contender.name), spec.contender.knobs
    named = [name for name in _DEGREES if name in default and name in knobs]
    return bool(default) and all(knobs[name] in ("auto", default[name]) for name in named)


def source_of(record: RunRecord) -> dict[str, Any]:
    """The source of a record's numbers: commit, machine, versions, specification and gate."""
    first = record.ranks[0].environment if record.ranks else {}
    return {
        "record": record.record_id,
        "evidence": ", ".join(filter(None, (evidence_of(record), record.basis))),
        "status": f"{record.status} {record.reason}".strip(),
        "started": record.started_at,
        "ended": record.ended_at,
        "commit": record.git_sha + (" with local changes" if record.git_dirty else ""),
        "suite's files": record.code_digest,
        "notes": record.notes,
        "launcher": record.launcher,
        "hosts": sorted({rank.environment.get("host", "?") for rank in record.ranks}),
        "device": first.get("device", "none"),
        "processor": first.get("cpu", ""),
        "python": first.get("python", ""),
        "versions": first.get("versions", {}),
        "variables": first.get("variables", {}),
        "correctness gate": record.gate,
        "raw steps [s]": record.step_s,
        "plan": record.plan,
        "slurm": record.slurm,
        "spec": record.spec,
    }


# The columns that follow from a record (``row_of``): what was run, how it may be compared, and what
# came out. A number that is not known is NaN. Speeds have the ends of 95 % intervals if measured.
_SPEEDS = ("step_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu")
_DERIVED = (
    *("model", "parameters", "cluster", "on_cpu", "num_gpus", "global_batch", "seq", "precision"),
    *("memory_limit_gib", "evidence", "contender", "layout", "default_degrees", "knobs"),
    *("settings", "setting", "machine", "environment", "configuration", "path", "samples_step_s"),
    *("trained", "unchecked", "has_spans", "memory_by_kind", "predicted_gib"),
    *("peak_gib", "memory_kind", "source", "runs", "run_spread", "run_freedom", "spread"),
    *("steps_unsettled", *(f"{name}{end}" for name in _SPEEDS for end in ("", "_low", "_high"))),
)
# Fields of a record that are no columns: tables that need one of these read the record again.
_LEFT_OUT = {"spec", "plan", "gate", "ranks", "spans", "predicted", "slurm", "notes"}
_RECORDED = [column.name for column in fields(RunRecord) if column.name not in _LEFT_OUT]


def row_of(record: RunRecord, path: str = "") -> dict[str, Any]:
    """The row of one record. Raises RecordError if its spec lacks a key that rows need."""
    spec = read_spec(record.spec)
    settings, knobs = settings_of(record), asked_knobs(record, spec)
    groups: dict[str, dict[str, str]] = {"machine": {}, "environment": {}, "setting": {}}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        if group in ("machine", "environment"):
            groups[group] |= {name: value} if name else {}
        elif key not in _OWN:
            groups["setting"][key] = value
    shape, device = spec.model.shape, spec.cluster.device
    peak, kind = peak_memory_gib(record) or (math.nan, "")
    planned = record.plan.get("predicted_memory", [])
    network = record.spec.get("bandwidth", 1.0)  # the share of its speed, in a study
    derived = {
        "model": spec.model.name,
        "parameters": math.nan if shape is None else float(parameter_count(shape)),
        "cluster": spec.cluster.name + ("" if network == 1.0 else f", {network:g} × its network"),
        "on_cpu": device.name == "cpu" or spec.cluster.name == "cpu_gloo",
        "num_gpus": spec.num_gpus,
        "global_batch": spec.global_batch,
        "seq": spec.model.seq,
        "precision": spec.precision,
        "memory_limit_gib": _nan_if_none(device.memory_gib),
        "evidence": evidence_of(record),
        # Its key, not its label; a study names its rows itself.
        "contender": spec.contender.name if record.basis else name_of(spec.contender.knobs),
        "layout": configuration_text(record, spec),
        "default_degrees": not record.basis and has_default_degrees(spec),
        "knobs": knobs,
        "settings": settings,
        **{name: json.dumps(of, sort_keys=True) if of else "" for name, of in groups.items()},
        "configuration": json.dumps(default_knobs(spec.contender.name) | knobs, sort_keys=True),
        "path": path,
        "samples_step_s": record.step_s if record.status == "ok" else [],
        "trained": _trained(spec),
        "unchecked": unchecked(record.spec) if record.provenance == "measured" else "",
        "has_spans": timeline_from_rows("", record.provenance, record.spans).step_s > 0,
        "memory_by_kind": _fullest(record.predicted.get("memory", planned)),
        "predicted_gib": sum(_fullest(planned).values()) / 2**30 or math.nan,
        "peak_gib": peak,
        "memory_kind": kind,
        "source": source_of(record),
        "runs": 1,
        "run_spread": math.nan,
        "run_freedom": 0,
        **_throughput(record, spec),
    }
    return {name: getattr(record, name) for name in _RECORDED} | derived


def _trained(spec: RecordedSpec) -> str:
    sizes = {k: v for k, v in spec.model.sizes.items() if k != "sizes"}
    same = [sizes, spec.data, spec.seed, spec.optimizer, spec.global_batch, spec.precision]
    return "" if sizes.get("dropout") else json.dumps(same, sort_keys=True)


def _fail_what_leaves_the_band(rows: list[dict[str, Any]]) -> None:
    """Make failures of runs whose losses are not those of the other contenders."""
    fine = [row for row in rows if row["status"] == "ok" and row["losses"] and row["trained"]]
    runs = [Losses(r["trained"], r["contender"], r["precision"], r["losses"]) for r in fine]
    for place, why in apart_from_others(runs).items():
        fine[place] |= {
            "status": "failed",
            "reason": why,
            "samples_step_s": [],
            "steps_unsettled": "",
        }
        timed = [name for name in fine[place] if name.startswith(_SPEEDS)]
        fine[place] |= dict.fromkeys([*timed, "spread"], math.nan)


def _throughput(record: RunRecord, spec: RecordedSpec) -> dict[str, Any]:
    """The median step time and the rates that follow from it, with 95 % intervals if measured; NaN
    for a failure."""
    measured = record.provenance == "measured"
    low = median = high = spread = math.nan
    unsettled = ""
    if record.status == "ok" and record.step_s:
        time = summarise(record.step_s)
        median, spread, unsettled = time.median, time.spread, time.doubt if measured else ""
        low, high = (time.low, time.high) if measured else (math.nan, math.nan)
    columns: dict[str, Any] = {"spread": spread, "steps_unsettled": unsettled}
    # The ends of a rate's interval are those of the step time, the other way round.
    for end, step, slow in (("", median, median), ("_low", low, high), ("_high", high, low)):
        columns[f"step_s{end}"] = step
        columns[f"tokens_per_s_per_gpu{end}"] = tokens_per_s_per_gpu(spec, slow)
        columns[f"model_tflops_per_gpu{end}"] = _nan_if_none(model_tflops_per_gpu(spec, slow))
        columns[f"mfu{end}"] = _nan_if_none(mfu(spec, slow))
    return columns


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Bytes by kind of the rank with the largest total; empty if none is known."""
    return max(ranks, key=lambda kinds: sum(kinds.values()), default={})


# The columns of a cell: rows that agree in these differ in the contender only, so they compare.
CELL = [
    *("model", "cluster", "num_gpus", "global_batch", "seq", "precision"),
    *("setting", "machine", "environment", "evidence", "basis"),
]
KEPT_APART = ("setting", "machine", "environment")  # whose differences are columns (``varied``)
CONFIGURATION = [*CELL, "contender", "layout", "configuration"]


# What a value of another type or size raises where a row is made of it.
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@collector_paused()
def load_frame(roots: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """(all records below the roots, the oldest first; one line per file that was skipped).

    The lines of a study's tables (``plans.csv`` of ``experiment=claim_33``) are records, too. A
    record that is found twice, as in a copy of its folder, counts once.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    skipped: list[str] = []
    for root in roots:
        tables = find_below(root, TABLE) if root.is_dir() else []
        for path in dict.fromkeys([*find_records([root]), *tables]):
            is_table = path.suffix == ".csv"
            try:
                records = read_table(path) if is_table else [read_record(path)]
            except RecordError as error:
                skipped.append(str(error))
                continue
            for record in records:
                key = (record.record_id, record.git_sha * is_table)
                try:
                    rows.setdefault(key, row_of(record, "" if is_table else str(path)))
                except _ODD as error:
                    why = f"an odd value ({type(error).__name__}: {error})"
                    skipped.append(f"{path}: {error if isinstance(error, RecordError) else why}")
    lines = [*rows.values()]
    _fail_what_leaves_the_band(lines)
    frame = pd.DataFrame(lines, columns=[*dict.fromkeys([*_RECORDED, *_DERIVED])])
    return frame.sort_values("started_at", kind="stable", ignore_index=True), skipped


_ATTEMPT = ["record_id", "status", "reason", "ended_at", "source"]


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows sorted by model size, then by the other columns of a cell, then by contender."""
    keys = ["evidence", "basis", "parameters", *CELL[:6], *varied(rows), *KEPT_APART, "contender"]
    return rows.sort_values(keys, kind="stable", ignore_index=True)


def latest_ok(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for tables: per cell, contender and configuration the latest success, or the latest
    attempt if none succeeded. Runs of one thing (``benchmarks.records.same_run``) are one row, with
    their median. The column ``unsuccessful`` has the other attempts that did not succeed, each as a
    mapping of its ``_ATTEMPT`` columns. A setting that differs between rows is a column of its own
    (``varied``)."""
    keys = CONFIGURATION
    frame = frame.assign(_ok=frame["status"] == "ok")
    ranked = frame = _where_failures_stand(frame.sort_values(["_ok", "started_at"], kind="stable"))
    kept = ranked.drop_duplicates(keys, keep="last").drop(columns="_ok")
    others = ranked.loc[ranked.index.difference(kept.index, sort=False)]
    others = others[~others["_ok"]].set_index(keys)
    unsuccessful: dict[Any, Any] = {}
    for key, attempt in zip(others.index, others[_ATTEMPT].to_dict("records"), strict=True):
        unsuccessful.setdefault(key, []).append(attempt)
    named = kept[keys].itertuples(index=False, name=None)
    kept = kept.assign(unsuccessful=[unsuccessful.get(key, []) for key in named])
    return in_order(_told_apart(with_repeats(kept, frame, keys).reset_index(drop=True)))


def _where_failures_stand(ranked: pd.DataFrame) -> pd.DataFrame:
    """The rows, successes last, with failures beside what they are compared with: what never
    started is on the machine of others in its cell, and what failed in the environment of its
    newest success, or of its newest attempt."""
    place = ["machine", "environment"]

    def last(of: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
        return of.groupby([ranked[key] for key in keys]).transform("last")

    has_started = ranked["machine"] != ""
    in_cell = last(ranked[place].where(has_started), [key for key in CELL if key not in place])
    never = ~has_started & ~ranked["_ok"] & in_cell["machine"].notna()
    ranked = ranked.assign(**{name: ranked[name].mask(never, in_cell[name]) for name in place})
    newest = last(ranked, [key for key in CONFIGURATION if key != "environment"])["environment"]
    return ranked.assign(environment=ranked["environment"].where(ranked["_ok"], newest))


def _told_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column for every setting that differs between them, as numbers if all are;
    layouts with one text get what else was asked of them."""
    groups = rows.groupby([*CELL, "contender", "layout"], sort=False).indices
    for places in (places for places in groups.values() if len(places) > 1):
        asked = differences([flat_spec(rows["knobs"][place]) for place in places])
        for place, words in zip(places, asked, strict=True):
            text = ", ".join(f"{name}={value}" for name, value in words.items())
            rows.loc[place, "layout"] += f" ({text})"
    names = zip(rows["model"], rows["cluster"], rows["settings"], strict=True)
    flat = [settings | {"model": model, "cluster": cluster} for model, cluster, settings in names]
    told = pd.DataFrame(differences(flat), index=rows.index)
    for name in (name for name in told if name not in (*_OWN, *KEPT_APART)):
        numbers = pd.to_numeric(told[name], errors="coerce")
        whole = numbers.notna().sum() == told[name].notna().sum()
        rows[name] = numbers if whole else told[name]
    return rows


def best_configuration(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest configuration per cell and contender, which figures compare."""
    fine = rows[(rows["status"] == "ok") & rows["tokens_per_s_per_gpu"].notna()]
    return _one_per_contender(fine.sort_values("tokens_per_s_per_gpu", kind="stable"))


def best_or_failed(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell and contender the fastest configuration, or the latest failure if none succeeded;
    the paper's table shows these. A success without a time (traced) counts as slowest."""
    ranked = rows.assign(_ok=rows["status"] == "ok")
    ranked = ranked.sort_values(
        ["_ok", "tokens_per_s_per_gpu", "started_at"], kind="stable", na_position="first"
    )
    return _one_per_contender(ranked).drop(columns="_ok")


def _one_per_contender(ranked: pd.DataFrame) -> pd.DataFrame:
    return in_order(ranked.drop_duplicates([*CELL, "contender"], keep="last"))


def notes_of(rows: pd.DataFrame) -> list[str]:
    """Notes for a reader of these rows' numbers, one line each."""
    simulated = set(rows[rows["evidence"].str.startswith("simulated")]["contender"])
    caveats = [known.caveat for name, known in PRICED.items() if name in simulated]
    shared = rows["source"].map(lambda source: bool(source.get("slurm", {}).get("neighbours")))
    beside = (
        f"{shared.sum()} of {len(rows)} rows were measured beside other jobs on their nodes "
        "(slurm.neighbours in their records)"
    )
    apart = [display.setting_label(n) for n in varied(rows) if n.startswith("environment.")]
    several = (
        f"rows differ in {', '.join(apart)}: only those that agree in it are compared "
        "(rerun=all measures again; zeropp report --compare takes a folder of each)"
    )
    attempts = [attempt["status"] for others in rows["unsuccessful"] for attempt in others]
    counts = ", ".join(f"{number} {status}" for status, number in Counter(attempts).items())
    hidden = f"{counts}: other attempts at configurations shown here (table: attempts)"
    notes = {beside: shared.any(), several: apart, hidden: attempts}
    return [*filter(None, caveats), *(note for note, holds in notes.items() if bool(holds))]


_PLACE = ("cluster", "machine")
_RATES = ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu")


def ranges(rows: pd.DataFrame) -> str:
    """What the ranges of measured ``rows`` are, in words for a caption."""
    has_repeats = (rows["runs"] > 1).any()
    return "95 % of next runs are in the ranges" if has_repeats else "ranges are 95 % intervals"


def with_repeats(rows: pd.DataFrame, frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The rows of ``latest_ok``, those of configurations that ran more than once as medians over
    these runs; records that do not say which files ran are no repeats. ``keys`` name a
    configuration in ``rows`` and ``frame``, and its cluster and machine are among them."""
    fine = frame[(frame["status"] == "ok") & (frame["evidence"] == "measured")]
    times = {
        key: list(group["step_s"])
        for key, group in fine[fine["code_digest"] != ""].groupby([*keys])
        if len(group) > 1
    }
    if not times:
        return rows
    of_place: defaultdict[Any, list[list[float]]] = defaultdict(list)
    for key, group in times.items():
        of_place[*(key[keys.index(name)] for name in _PLACE)].append(group)
    spreads = {place: pooled_spread(groups) for place, groups in of_place.items()}
    lines = []
    for row in rows.to_dict("records"):
        runs = times.get(tuple(row[key] for key in keys))
        if row["status"] == "ok" and row["code_digest"] and runs:
            spread, freedom = spreads[*(row[name] for name in _PLACE)]
            factor = math.exp(half_width([len(runs)], spread, freedom, next_runs=1))
            faster = row["step_s"] / median(runs)
            row |= {"runs": len(runs), "run_spread": spread, "run_freedom": freedom}
            row |= {"steps_unsettled": "", "spread": spread}
            for name, best in (("step_s", median(runs)), *((n, row[n] * faster) for n in _RATES)):
                row |= {name: best, f"{name}_low": best / factor, f"{name}_high": best * factor}
        lines.append(row)
    return pd.DataFrame(lines, columns=rows.columns)


def ratio_of_repeats(top: Mapping[Any, Any], bottom: Mapping[Any, Any]) -> Summary:
    """The ratio of the step times of two rows of ``with_repeats`` on one cluster, where at least
    one was repeated, with the interval of the ratio of their next runs."""
    repeated = max(top, bottom, key=lambda row: row["runs"])
    ratio = top["step_s"] / bottom["step_s"]
    runs = [int(row["runs"]) for row in (top, bottom)]
    factor = math.exp(
        half_width(runs, repeated["run_spread"], int(repeated["run_freedom"]), next_runs=1)
    )
    return Summary(
        median=ratio,
        low=ratio / factor,
        high=ratio * factor,
        spread=math.nan,  # that of the steps says nothing here
        count=sum(runs) * LEAST_SAMPLES,
    )
