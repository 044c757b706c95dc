"""Which records are runs of one thing: reports make rows of them, and launchers count repeats.

All that a record has of its specification, machine and software must be equal, except for what
cannot matter: ``CANNOT_MATTER`` names it, and a test holds it against every field.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import flat_spec
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.run_spec import DataSpec, MeasureSpec, RunSpec
from zeropp.price.cluster import Cluster, Device
from zeropp.types.shape import ModelShape
from zeropp.types.training import OptimizerConfig

_RESULTS = (
    *("status", "reason", "interrupted", "gate", "losses", "grad_norms"),
    *("loss_error", "loss_steps"),
    *("warmup_s", "step_s", "spans", "span_clock", "predicted", "notes"),
)
CANNOT_MATTER = {  # of a record, of a rank's environment, and of its variables
    **dict.fromkeys(("record_id", "spec_id", "started_at", "ended_at"), "a name or a date"),
    **dict.fromkeys(_RESULTS, "a result"),
    "schema_version": "all that are read have one",
    **dict.fromkeys(("git_sha", "git_dirty"), "code_digest names the files that ran"),
    "launcher": "each starts the same worker, which records what it finds",
    "plan": "follows from specification and code",
    "slurm": "names of job and nodes; a note tells of neighbours",
    "host": "a name; the number of hosts counts",
    "memory_gib": "of the host; hosts of one kind differ by what their kernels keep",
    "code": "is the record's code_digest",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "DeepSpeed sets it where it is imported, for all contenders",
    "NCCL_HOSTID": "a name, which ranks that share a GPU get",
    **dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), "a folder of the job"),
    **dict.fromkeys(("CUDA_CACHE_PATH", "NCCL_DEBUG_FILE"), "a folder or a file of the job"),
}
# The kind of machine, under these names; all else of an environment is that of its software.
_MACHINE = {
    **{name: name for name in ("device", "device_memory_gib", "hosts", "OMP_NUM_THREADS")},
    "cpu": "processor",
    "cpu_count": "cores",
}

# What a record lacks that is older than a field had this value.
_DEFAULTS = flat_spec(
    {
        above + field.name: field.default
        for above, kind in (
            *(("", RunSpec), ("model.", ModelShape), ("cluster.", Cluster)),
            *(("cluster.device.", Device), ("optimizer.", OptimizerConfig)),
            *(("data.", DataSpec), ("measure.", MeasureSpec)),
        )
        for field in fields(kind)
        if field.default is not MISSING
    }
)


def evidence_of(record: RunRecord) -> str:
    """A record's kind of evidence in words, such as ``measured with shared GPU``."""
    return " with ".join(filter(None, (record.provenance, record.variant)))


def settings_of(record: RunRecord) -> dict[str, str]:
    """Everything of a record that counts, except for its contender's knobs, as words by key:
    ``model.layers``, ``machine.processor``, ``environment.torch``, ``environment.NCCL_ALGO``. The
    keys ``machine`` and ``environment`` name what the others of their group may follow from."""
    words = _DEFAULTS | flat_spec(record.spec)
    words = {k: v for k, v in words.items() if not k.startswith("contender.")}
    evidence, cluster = evidence_of(record), record.spec["cluster"]["name"]
    words |= {"machine": f"{evidence} {cluster} {len(record.ranks)}", "environment": evidence}
    seen = defaultdict[str, set[str]](set)
    environments = [rank.environment for rank in record.ranks if rank.environment]
    for environment in environments:
        for key, value in _counts(environment, record):
            seen[key].add(value)
    if environments and len(environments) == len(record.ranks):
        seen["hosts"].add(str(len({each.get("host") for each in environments})))
    for key, values in sorted(seen.items()):
        name = f"machine.{_MACHINE[key]}" if key in _MACHINE else f"environment.{key}"
        words[name] = ", ".join(sorted(values))
    if record.code_digest:
        words["environment.code"] = record.code_digest[:8]
    return words


def _counts(environment: Mapping[str, Any], record: RunRecord) -> Iterator[tuple[str, str]]:
    """What counts of a rank's environment. Variables that the contender sets for itself are part of
    it. Slurm chooses which devices a job sees, as it chooses its nodes. Of paths, names count."""
    known = PRICED.get(record.spec["contender"]["name"])
    own = set(known.environment.items()) if known else set()
    for path, value in flat_spec(environment).items():
        group, _, name = path.rpartition(".")
        is_own = group == "variables" and (name, value) in own
        is_given = name == "CUDA_VISIBLE_DEVICES" and bool(record.slurm)
        if not (name in CANNOT_MATTER or path.startswith("code.") or is_own or is_given):
            yield name, re.sub(r"[^\s:]*/", "", value) if value.startswith("/") else value


def same_run(record: RunRecord) -> str:
    """Equal for records of one specification that are runs of one thing."""
    return str(sorted(settings_of(record).items()))
