"""Ranks of large jobs that ran alone on one GPU, as ``scripts/gpu`` leaves them in a folder.

A kind of evidence of its own: a rank's kernels, launches and memory are those of the job, and there
is no network and nobody to wait for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping

LONE = "measured on one GPU, a rank alone"
_PREFIX = "lone_"


@dataclass(frozen=True, kw_only=True)
class LoneRank:
    """What one rank measured. ``compute_s``: the median seconds of a compute action over the
    microbatches, by stage and kind (``3F``). ``step_s`` and ``host_s``: each step, and when the
    host had issued it. ``update_s``: 0 if it was not timed. ``failed``: why there is no more."""

    name: str
    spec: RunSpec | None
    rank: int
    compute_s: Mapping[str, float]
    update_s: float
    step_s: list[float]
    host_s: list[float]
    peak_bytes: int
    loss: float | None
    megahertz: float | None
    failed: str


def is_of_one_gpu(folder: Path) -> bool:
    """Whether ``scripts/gpu`` has filled a folder."""
    return any(folder.glob(f"{_PREFIX}*.json")) or (folder / "prices.json").is_file()


def read_files(folder: Path, prefix: str) -> dict[str, Any]:
    """The JSON files whose names begin with ``prefix``, by the rest of their names. Raises
    SpecError for one that is no JSON object."""
    found = {}
    for path in sorted(folder.glob(f"{prefix}*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: {error}") from None
        if not isinstance(content, dict):
            raise SpecError(f"{path}: must be a JSON object")
        found[path.stem.removeprefix(prefix)] = content
    return found


def read_lone(folder: Path) -> list[LoneRank]:
    """The lone ranks of a folder, by name. A file without its specification takes that of the same
    name in the folder ``specs``."""
    specs = read_files(folder / "specs", "")
    return [
        _lone(name, values, values.get("spec") or specs.get(name, {}).get("spec"))
        for name, values in read_files(folder, _PREFIX).items()
    ]


def _lone(name: str, values: Mapping[str, Any], spec: Mapping[str, Any] | None) -> LoneRank:
    failed = [str(why) for key, why in values.items() if key.endswith("FAILED")]
    return LoneRank(
        name=name,
        spec=spec_from_mapping(spec) if spec else None,
        rank=values.get("rank", 0),
        compute_s=values.get("compute_s", {}),
        update_s=values.get("ops_s", {}).get("UPDATE", {}).get("sum", 0.0),
        step_s=values.get("step_s", []),
        host_s=values.get("issued_s", []),
        peak_bytes=max(values.get("memory", {}).values(), default=0),
        loss=values.get("loss"),
        megahertz=values.get("clocks", {}).get("sm_mhz_median"),
        failed="; ".join(failed) or ("" if values.get("compute_s") else "ended early"),
    )
