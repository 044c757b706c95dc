"""``zeropp report`` of a folder of scripts/gpu: measurements beside what is described."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.records.lone import LONE, is_of_one_gpu, read_lone
from benchmarks.report.one_gpu import described_seconds, one_gpu_tables, write_one_gpu
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.unit.toy_spec import mapping
from zeropp.price import price_plan

ROOT = Path(__file__).resolve().parents[2]
FASTER = 1.25  # described over measured, of every action
NAMES = {"F": "forward", "I": "B", "W": "W", "B": "B + W"}


def spec_of(recompute: str, **knobs: object) -> RunSpec:
    """A job with tensor parallelism, whose collectives no lone rank has."""
    values = mapping() | {"precision": "bf16", "num_gpus": 8, "microbatch_size": 2}
    values["cluster"]["device"] |= {"peak_bf16_tflops": 0.1}
    values["contender"] = {"name": "deepspeed_3d", "pp": 2, "tp": 2, "recompute": recompute} | knobs
    return spec_from_mapping(values)


def write_rank(folder: Path, name: str, spec: RunSpec, *, is_whole: bool = True) -> None:
    """A lone rank that takes 1 / FASTER of what the cost model says of its own kernels."""
    plan = spec.plan()
    price, count = price_plan(plan, spec.cluster), plan.num_microbatches
    cost, more = price.stages[1], price.extras[1]
    forward = cost.forward - more.tensor_forward - more.transfer_forward
    backward = cost.backward_input + cost.backward_weight - more.reductions
    backward -= more.tensor_backward + more.transfer_backward
    compute = {"1F": forward / FASTER, "1B": backward / FASTER}
    step = (count * (forward + backward) + cost.update) / FASTER
    values: dict[str, Any] = {"spec": spec.to_dict(), "rank": plan.layout.pipeline(0)[1]}
    if is_whole:
        values |= {"step_s": [step, step, 9.0], "issued_s": [0.1, 0.2, 0.3], "loss": 1.0}
        values |= {"memory": {"peak_reserved_bytes": 2**30}, "compute_s": compute}
        values["ops_s"] = {"UPDATE": {"sum": cost.update / FASTER}}
    else:
        values["all FAILED"] = "OutOfMemoryError: no room"
    (folder / f"lone_{name}.json").write_text(json.dumps(values))


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "one_gpu"
    folder.mkdir()
    write_rank(folder, "plain", spec_of("none"))
    write_rank(folder, "full", spec_of("full"))
    write_rank(folder, "bad", spec_of("none", tp=1), is_whole=False)
    kernels = [{"what": "dX", "model_over_measured": ratio} for ratio in (0.5, 0.9, 1.3)]
    block = {"compiled": True, "device_s": {"F": 2.0, "B": 9.0}, "model_s": {"F": 1.0}}
    prices = {"products": [*kernels, {"what": "dX", "failed": "no"}], "blocks": [block]}
    (folder / "prices.json").write_text(json.dumps(prices))
    near = {"kind": "loss (sgd, bf16)", "error": 1e-3, "limit": 2e-3}
    gate: dict[str, Any] = {"event": "gate", "passed": True}
    gate["checks"] = [near | {"error": 1e-9}, near]
    gate["checks"].append(near | {"error": 9.0, "limit": 9.1})  # rounding hides it
    run = {"codes": [0, 0], "events": [gate, {"event": "done"}], "seconds": 12.0}
    (folder / "many_four.json").write_text(json.dumps(run))
    (folder / "many_hang.json").write_text(json.dumps({"codes": [None], "events": []}))
    return folder


def test_every_action_stands_beside_what_is_described(folder: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    made = write_one_gpu(folder, tmp_path / "report", console)
    assert made.skipped == ["failed: bad: OutOfMemoryError: no room"]
    assert console.export_text().startswith(made.skipped[0])
    assert (tmp_path / "report" / "one_gpu.html").is_file()
    actions = rows_of(tmp_path / "report" / "actions.csv")
    assert {row["evidence"] for row in actions} == {LONE}
    ratios = [float(row["described_over_measured"]) for row in actions]
    assert ratios == pytest.approx([FASTER] * len(actions))
    plain = ["forward", "B + W", "update", "all"]
    for name, kinds in {"plain": plain, "full": [*plain, "recomputation"]}.items():
        assert [row["action"] for row in actions if row["point"] == name] == kinds
    steps = {row["point"]: row for row in rows_of(tmp_path / "report" / "steps.csv")}
    assert (steps["plain"]["host_s"], steps["plain"]["peak_gib"]) == ("0.2", "1.0")
    assert float(steps["plain"]["described_over_measured"]) == pytest.approx(FASTER)
    described = [float(steps[name]["described_gib"]) for name in ("full", "plain")]
    assert 0 < described[0] < described[1]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_kernels_and_gates_have_tables(folder: Path, tmp_path: Path) -> None:
    write_one_gpu(folder, tmp_path / "report", Console(quiet=True))
    kernels = {row["kernel"]: row for row in rows_of(tmp_path / "report" / "kernels.csv")}
    assert list(kernels["dX"].values()) == ["products", "dX", "3", "0.9", "0.5", "1.3"]
    assert kernels["forward"]["described_over_measured"] == "0.5"
    four, hang = rows_of(tmp_path / "report" / "gates.csv")
    assert list(four.values())[:4] == ["four", "2", "passed", "done"]
    assert four["worst"] == "loss (sgd, bf16): 1.0e-03 of 2.0e-03"
    assert (hang["gate"], hang["ended"]) == ("none", "[None]")


def test_what_is_described_has_no_network(folder: Path) -> None:
    one = next(one for one in read_lone(folder) if one.name == "plain")
    assert one.spec is not None
    plan = one.spec.plan()
    price = price_plan(plan, one.spec.cluster)
    told = described_seconds(one, plan, price)
    assert told["forward"] < plan.num_microbatches * price.stages[1].forward
    assert told["B + W"] == told["B"] + told["W"]


def test_a_folder_without_lone_ranks_is_none_of_them(tmp_path: Path) -> None:
    assert not is_of_one_gpu(tmp_path)
    (tmp_path / "lone_x.json").write_text("[]")
    assert is_of_one_gpu(tmp_path)
    with pytest.raises(SpecError, match=r"lone_x\.json: must be a JSON object"):
        read_lone(tmp_path)


def test_the_committed_folder_is_told_by_the_model() -> None:
    """Every contender's best plan of the verdict's cell, on one H100."""
    _, steps, _, gates = one_gpu_tables(ROOT / "results" / "reference" / "one_gpu")
    found = steps.data.set_index("point")["described_over_measured"].to_dict()
    ratios = {name: ratio for name, ratio in found.items() if str(name).startswith("a_")}
    assert set(ratios) == {"a_deepspeed", "a_fsdp", "a_megatron", "a_zeropp"}
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios
    assert "passed" in set(gates.data["gate"])
