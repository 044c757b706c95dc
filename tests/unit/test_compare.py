"""What changed between two sets of records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.compare import compare, why_worse, write_comparison
from benchmarks.report.frame import latest_ok
from tests.unit.report_frames import QUIET, failed, frame_of
from tests.unit.synthetic_records import make_record, write_records


def test_compare_says_what_changed_beyond_noise(tmp_path: Path) -> None:
    def steps(base: float, wobble: float = 0.01) -> list[float]:
        return [base * (1 + wobble * (i % 3)) for i in range(9)]

    before = [
        make_record("zeropp", step_s=steps(1.0)),
        make_record("deepspeed_3d", step_s=steps(1.0)),
        make_record("torch_pp", step_s=steps(1.0)),
        make_record("fsdp", step_s=steps(1.0)),
        make_record("zeropp", num_gpus=8, step_s=steps(1.0)),
    ]
    after = [
        make_record("zeropp", step_s=steps(0.8)),
        make_record("deepspeed_3d", step_s=steps(1.3)),
        make_record("torch_pp", step_s=steps(1.005)),
        make_record("fsdp", fields=failed("oom", "rank 0: out of memory")),
    ]
    old = latest_ok(frame_of(*before, root=tmp_path / "a"))
    new = latest_ok(frame_of(*after, root=tmp_path / "b"))
    changes = compare(old, new)
    verdicts = {(r.contender, r.num_gpus): r.verdict for r in changes.itertuples()}
    assert verdicts == {
        ("zeropp", 4): "faster",
        ("deepspeed_3d", 4): "slower",
        ("torch_pp", 4): "no difference shown",
        ("fsdp", 4): "ok -> oom",
        ("zeropp", 8): "only before",
    }
    made = write_comparison([tmp_path / "a"], [tmp_path / "b"], tmp_path / "out", QUIET)
    assert "comparison.csv" in {path.name for path in made.files}
    reasons = [*filter(None, made.worse.values())]
    assert reasons == ["23 % slower", "ok -> oom", "is gone"]
    lenient = write_comparison([tmp_path / "a"], [tmp_path / "b"], tmp_path / "out", QUIET, 0.25)
    assert [*filter(None, lenient.worse.values())] == ["ok -> oom", "is gone"]
    other = make_record("zeropp", global_batch=32)
    write_records([other], tmp_path / "c")
    none = write_comparison([tmp_path / "a"], [tmp_path / "c"], tmp_path / "out", QUIET)
    why = "the two sets have no configuration in common"
    assert none.worse == {"all": f"{why}; global_batch is 16, and 32"}


def test_compare_across_clusters_leaves_the_cluster_out(tmp_path: Path) -> None:
    record = make_record("zeropp")
    elsewhere = {**record.spec, "cluster": {**record.spec["cluster"], "name": "other"}}
    old = latest_ok(frame_of(record, root=tmp_path / "a"))
    there = make_record("zeropp", fields={"spec": elsewhere})
    new = latest_ok(frame_of(there, root=tmp_path / "b"))
    assert list(compare(old, new)["verdict"]) == ["no difference shown"]


@pytest.mark.parametrize(
    ("change", "slower", "worse"),
    [
        ({"verdict": "slower", "ratio": 0.96}, None, True),
        ({"verdict": "slower", "ratio": 0.96}, 0.1, False),
        ({"verdict": "slower", "ratio": 0.85}, 0.1, True),
        ({"verdict": "faster", "ratio": 1.2}, 0.1, False),
        ({"verdict": "unsettled: spread 20.9 %", "ratio": 0.50, "spread": 0.209}, None, True),
        ({"verdict": "unsettled: spread 20.9 %", "ratio": 0.85, "spread": 0.209}, None, False),
        ({"verdict": "unsettled: 3 steps", "ratio": 0.50, "spread": 0.0}, None, False),
        ({"verdict": "ok -> lost"}, 0.5, True),
        ({"verdict": "failed -> ok"}, None, False),
        ({"verdict": "failed -> oom", "was": "failed"}, None, False),
        ({"verdict": "only before"}, None, True),
        ({"verdict": "only before", "was": "oom"}, None, False),
        ({"verdict": "only after", "was": ""}, None, False),
    ],
)
def test_what_counts_as_worse(change: dict[str, Any], slower: float | None, worse: bool) -> None:
    row = {"was": "ok", "ratio": math.nan, "high": change.get("ratio", math.nan) + 0.03}
    assert bool(why_worse(row | change, slower)) == worse
