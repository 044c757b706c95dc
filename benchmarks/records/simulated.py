"""Simulated steps that are kept: what a record has of one, and tables with one record per line.

A launcher writes the record of a point into the point's folder, as it does for every attempt. A
study prices hundreds of plans and keeps their records as one table, ``plans.csv``, which people can
read and compare. A line names model and cluster by their presets and the plan in words, and has the
knobs from which the plan is made again; the memory of every rank is left out.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.records.record import SCHEMA_VERSION, RecordError, RunRecord
from benchmarks.specification.reading import preset
from zeropp.choose.task import Task
from zeropp.price.cluster import Cluster
from zeropp.price.lost_time import TimeBreakdown
from zeropp.price.simulator import SimResult
from zeropp.schedule.plan import MemoryBytes
from zeropp.types.literals import Precision
from zeropp.types.shape import ModelShape

TABLE = "plans.csv"
# The bases of comparison (``RunRecord.basis``) by their names in tables.
BASES = {
    "best": "best plans",
    "own": "best plans, as users run them",
    "equal": "equal degrees",
    "paper": "the paper's setting",
}
# What a line says of the search for its plan; older tables do not.
SEARCHED = ("gap", "memory_margin")
_MODES = {basis: mode for mode, basis in BASES.items()}
_CHANGED = "+changes"  # after a commit from whose files the checkout differed


def prediction(result: SimResult) -> dict[str, Any]:
    """The part of a simulated step that a record keeps."""
    step = _predicted_step(
        step_s=result.step_s,
        tokens_per_s_per_gpu=result.tokens_per_s_per_gpu,
        bubble=result.bubble,
        share_of_limit=result.limit_share,
        breakdown_s=result.breakdown.by_kind(),
    )
    return step | predicted_memory(result.memory)


def predicted_memory(ranks: Sequence[MemoryBytes]) -> dict[str, Any]:
    """What a record keeps of the memory of ranks that were simulated, traced or replayed."""
    return {
        "peak_bytes": max(memory.total for memory in ranks),
        "memory": [asdict(memory) for memory in ranks],
    }


def _predicted_step(
    *,
    step_s: float,
    tokens_per_s_per_gpu: float,
    bubble: float,
    share_of_limit: float,
    breakdown_s: Mapping[str, float],
) -> dict[str, Any]:
    return {
        "step_s": step_s,
        "tokens_per_s_per_gpu": tokens_per_s_per_gpu,
        "bubble": bubble,
        "compute_limit_tokens_per_s_per_gpu": tokens_per_s_per_gpu / share_of_limit,
        "share_of_compute_limit": share_of_limit,
        "breakdown_s": dict(breakdown_s),
    }


def plan_record(
    task: Task,
    contender: str,
    basis: str,
    *,
    bandwidth: float = 1.0,
    commit: str = "",
    words: str,
    setting: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
    found: Mapping[str, float] | None = None,
) -> RunRecord:
    """The record of the plan of a ``contender``, or of a row of a comparison, in a study: of one
    that was simulated, with its ``setting`` (``contenders.setting_of``) and what is
    ``predicted``, or, without both, of none that fits.

    ``bandwidth`` multiplies the inter-node bandwidth of the task's cluster. ``commit`` is as in
    tables, and ``words`` describe the plan, or say that there is none. ``found`` says of a search
    its ``gap`` and the ``memory_margin`` that its plans had to leave (``SEARCHED``).
    """
    name = f"{task.shape.name}-{contender}-{task.num_gpus}gpu-{task.cluster.name}"
    name += f"-{_MODES[basis]}-{task.global_batch}"
    name += f"-{bandwidth:g}x" if bandwidth != 1.0 else ""
    name += f"-{task.precision}" if task.precision != "bf16" else ""
    spec = {
        "model": asdict(task.shape),
        "cluster": asdict(task.cluster),
        "bandwidth": bandwidth,
        "num_gpus": task.num_gpus,
        "contender": {"name": contender},
        "global_batch": task.global_batch,
        "precision": task.precision,
    }
    if setting is not None:
        spec["contender"] = setting["knobs"] | {"name": contender}
        spec["microbatch_size"] = setting["microbatch_size"]
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        record_id=name,
        spec_id=name,
        spec=spec,
        provenance="simulated",
        status="ok" if predicted else "oom",
        reason="" if predicted else words,
        started_at="",  # a table has no times
        ended_at="",
        git_sha=commit.removesuffix(_CHANGED),
        git_dirty=commit.endswith(_CHANGED),
        launcher="simulate",
        basis=basis,
        plan={"words": words, **(found or {})},
        step_s=[predicted["step_s"]] if predicted else [],
        predicted=dict(predicted or {}),
    )


def commit_of(sha: str, dirty: bool) -> str:
    """A commit, and whether the checkout differed from it, as tables have it."""
    return sha[:12] + (_CHANGED if dirty else "")


def line_of(record: RunRecord) -> dict[str, object]:
    """The columns of a record of ``plan_record``: seconds, GiB and tokens per second and GPU, which
    are None if no plan fits; ``limit_s``, ``bubble_s`` ... are the losses, which add up to
    ``step_s``."""
    spec, predicted = record.spec, record.predicted
    setting = {"knobs": spec["contender"], "microbatch_size": spec.get("microbatch_size")}
    lost = predicted.get("breakdown_s", {})
    return {
        "model": spec["model"]["name"],
        "cluster": spec["cluster"]["name"],
        "num_gpus": spec["num_gpus"],
        "global_batch": spec["global_batch"],
        "bandwidth": spec["bandwidth"],
        "precision": spec["precision"],
        "contender": spec["contender"]["name"],
        "mode": _MODES[record.basis],
        "provenance": record.provenance,
        "plan": record.plan["words"],
        "step_s": predicted.get("step_s"),
        "tokens_per_s_per_gpu": predicted.get("tokens_per_s_per_gpu"),
        "peak_gib": predicted["peak_bytes"] / 2**30 if predicted else None,
        "bubble": predicted.get("bubble"),
        "share_of_limit": predicted.get("share_of_compute_limit"),
        "setting": json.dumps(setting) if predicted else "",
        **{f"{kind}_s": lost.get(kind) for kind in _KINDS},
        **{name: record.plan.get(name) for name in SEARCHED},
        "commit": commit_of(record.git_sha, record.git_dirty),
    }


_KINDS = [kind.name for kind in fields(TimeBreakdown)]


def read_table(path: Path) -> list[RunRecord]:
    """The records of a table, in the order of its lines. Raises RecordError, which names the
    file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_record_in(line) for line in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{path}: not a table of plans ({type(error).__name__}: {error})"
        ) from None


def _record_in(line: Mapping[str, str]) -> RunRecord:
    task = Task(
        shape=shape_named(line["model"]),
        cluster=preset("cluster", line["cluster"], Cluster),
        num_gpus=int(line["num_gpus"]),
        global_batch=int(line["global_batch"]),
        precision=cast("Precision", line.get("precision") or "bf16"),  # older tables do not say it
    )
    setting = predicted = None
    if line["step_s"]:
        setting = json.loads(line["setting"])
        predicted = _predicted_step(
            step_s=float(line["step_s"]),
            tokens_per_s_per_gpu=float(line["tokens_per_s_per_gpu"]),
            bubble=float(line["bubble"]),
            share_of_limit=float(line["share_of_limit"]),
            breakdown_s={kind: float(line[f"{kind}_s"]) for kind in _KINDS},
        )
        predicted["peak_bytes"] = float(line["peak_gib"]) * 2**30
    return plan_record(
        task,
        line["contender"],
        BASES[line["mode"]],
        bandwidth=float(line["bandwidth"]),
        commit=line["commit"],
        words=line["plan"],
        setting=setting,
        predicted=predicted,
        found={name: float(value) for name in SEARCHED if (value := line.get(name))},
    )


def shape_named(name: str) -> ModelShape:
    """A preset of ``conf/model``, or one at another sequence, which its name ends with in units of
    1,024 tokens: ``llama_8b_32k``. Raises SpecError if there is none."""
    base, _, length = name.rpartition("_")
    if not re.fullmatch(r"\d+k", length):
        return preset("model", name, ModelShape)  # type: ignore[no-any-return]
    own: ModelShape = preset("model", base, ModelShape)
    return replace(own, name=name, seq=1024 * int(length[:-1]))
