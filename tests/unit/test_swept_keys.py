"""What a sweep varied is a column: rows are equal specifications on one kind of machine, and a
record that is found twice counts once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import CHECKOUT
from benchmarks.report import TABLES
from benchmarks.report.charts import loss_curves, scaling_curves, throughput_bars
from benchmarks.report.compare import compare, comparison_table
from benchmarks.report.display import varied
from benchmarks.report.frame import latest_ok, load_frame, notes_of
from benchmarks.report.speedup import paired_speedups, speedup_maps
from benchmarks.report.write import grids_of, make_table
from tests.unit.report_frames import frame_of
from tests.unit.synthetic_records import make_record

Change = Callable[[dict[str, Any]], None]


def _ranks(**more: object) -> Change:
    def change(record: dict[str, Any]) -> None:
        for rank in record["ranks"]:
            rank["environment"] |= more

    return change


def _spec(path: str, value: object) -> Change:
    def change(record: dict[str, Any]) -> None:
        *groups, last = path.split(".")
        spec = record["spec"]
        for group in groups:
            spec = spec[group]
        spec[last] = value

    return change


SWEPT: dict[str, Change] = {
    "model.layers": _spec("model.layers", 99),
    "model.hidden": _spec("model.hidden", 4096),
    "optimizer.lr": _spec("optimizer.lr", 0.5),
    "optimizer": _spec("optimizer.kind", "adamw"),
    "data.seed": _spec("data.seed", 7),
    "cluster.gpus_per_node": _spec("cluster.gpus_per_node", 1),
    "cluster.inter.bandwidth_gb_s": _spec("cluster.inter.bandwidth_gb_s", 1),
    "measure.steps": _spec("measure.steps", 999),
    "measure.gate": _spec("measure.gate", False),
    "seed": _spec("seed", 7),
    "machine.OMP_NUM_THREADS": _ranks(variables={"OMP_NUM_THREADS": "9"}),
    "machine.processor": _ranks(cpu="another"),
    "machine.cores": _ranks(cpu_count=96),
    "machine.device": _ranks(device="NVIDIA H100"),
}


def two(root: Path, change: Change | None, status: str = "ok") -> Path:
    """Two attempts with the same files that differ in one thing, the second twice as slow."""
    base = make_record(step_s=[1.0] * 7, spans=False, fields={"code_digest": "files"})
    first: dict[str, Any] = json.loads(json.dumps(vars(base), default=vars))
    for rank in first["ranks"]:
        rank["environment"] |= {"cpu": "EPYC", "cpu_count": 2}
        rank["environment"]["variables"] = {"OMP_NUM_THREADS": "1", "CUDA_MODULE_LOADING": "EAGER"}
    second = json.loads(json.dumps(first)) | {"step_s": [2.0] * 7, "status": status}
    for number, record in enumerate((first, second)):
        record |= {"record_id": f"p{number}/a", "started_at": f"2026-11-2{number}T00:00:00+00:00"}
        if number and change:
            change(record)
        path = root / record["record_id"] / "record.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record))
    return root


@pytest.mark.parametrize("name", SWEPT)
def test_what_was_swept_is_a_column(tmp_path: Path, name: str) -> None:
    """The issue's list: each of them was one row, the median of two different runs."""
    frame, skipped = load_frame([two(tmp_path, SWEPT[name])])
    rows = latest_ok(frame)
    assert (len(rows), list(rows["runs"]), skipped) == (2, [1, 1], [])
    shown = "optimizer.kind" if name == "optimizer" else name
    assert varied(rows) == [shown]
    for table in ("throughput", "memory", "paper"):
        made = make_table(table, rows)
        assert made.numbers[shown].nunique(dropna=False) == 2, table
        (grid,) = grids_of(made)
        texts = {row[: grid.keys] for row in grid.rows}
        assert len(texts) == 2, (table, texts)


SAME: dict[str, Change | None] = {
    "nothing": None,
    "a host": _ranks(host="node7"),
    "a field that older records lack": lambda record: record["spec"].pop("seed"),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_specifications_on_one_kind_of_machine_are_repeats(tmp_path: Path, name: str) -> None:
    rows = latest_ok(load_frame([two(tmp_path, SAME[name])])[0])
    assert (list(rows["runs"]), list(rows["step_s"]), varied(rows)) == ([2], [1.5], [])


def test_other_packages_make_no_repeat(tmp_path: Path) -> None:
    root = two(tmp_path, _ranks(versions={"torch": "2.11.0"}))
    rows = latest_ok(load_frame([root])[0])
    assert (list(rows["runs"]), list(rows["step_s"])) == ([1], [2.0])
    (note,) = notes_of(rows)
    assert note.startswith("1 of 1 rows also ran with other versions")


def test_an_attempt_that_never_started_belongs_to_those_that_did(tmp_path: Path) -> None:
    """It has no machine, and is no row of its own beside the success."""

    def change(record: dict[str, Any]) -> None:
        record |= {"ranks": [], "step_s": [], "reason": "no such host"}

    rows = latest_ok(load_frame([two(tmp_path, change, "failed")])[0])
    assert list(rows["status"]) == ["ok"]
    assert [attempt["status"] for attempt in rows["unsuccessful"][0]] == ["failed"]


def test_layouts_of_one_text_say_what_else_was_asked(tmp_path: Path) -> None:
    records = [make_record(contender_knobs={"pp": pp}) for pp in (2, "auto")]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert sorted(layout.split("(")[1] for layout in rows["layout"]) == ["pp=2)", "pp=auto)"]


def test_numbers_are_in_their_order_and_what_follows_from_a_name_is_no_column(
    tmp_path: Path,
) -> None:
    records = [make_record(), make_record(model="gpt_mini")]
    for layers in (16, 4, 128):
        records.append(make_record(model_fields={"layers": layers}))
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert varied(rows) == ["model.layers"]  # neither hidden nor ffn, which gpt_mini has others of
    tiny = rows[rows["model"] == "gpt_tiny"]
    assert list(tiny["model.layers"]) == [4, 8, 16, 128]


def _sweep(root: Path) -> pd.DataFrame:
    records = []
    for layers in (4, 16):
        model = {"layers": layers}
        for name in ("zeropp", "deepspeed_3d"):
            for count in (4, 8):
                records.append(make_record(name, num_gpus=count, spans=False, model_fields=model))
    return latest_ok(frame_of(*records, root=root))


def test_figures_and_speedups_keep_them_apart(tmp_path: Path) -> None:
    rows = _sweep(tmp_path)
    assert list(paired_speedups(rows, "deepspeed_3d")["model.layers"]) == [4, 4, 16, 16]
    (bars,), (loss,) = list(throughput_bars(rows)), list(loss_curves(rows))
    titles = [axis.get_title() for axis in bars.figure.axes if axis.get_title()]
    assert [title.partition("layers ")[2] for title in titles] == ["4", "16"]
    assert "layers 4, 16" in bars.shown
    assert len(loss.figure.axes) == 4  # a panel of losses and one of distances each
    strong = next(p for p in scaling_curves(rows) if "strong" in p.name)
    assert "layers 4" in strong.figure.axes[0].get_title()
    (heat,) = speedup_maps(rows)
    lines = [text.get_text() for text in heat.figure.axes[0].get_yticklabels()]
    assert [line.partition("layers ")[2] for line in lines] == ["4", "16"]


def test_every_table_is_made_of_a_sweep(tmp_path: Path) -> None:
    rows = _sweep(tmp_path)
    for name in TABLES:
        shown = "layers" if name == "scaling" else "model.layers"
        assert shown in make_table(name, rows).numbers or name == "published"
    other = latest_ok(load_frame([two(tmp_path / "steps", SWEPT["measure.steps"])])[0])
    (grid,) = grids_of(make_table("scaling", other))
    head = [row[grid.heads.index("measure.steps")].text for row in grid.rows]
    assert (head, "0" in {cell.text for row in grid.rows for cell in row}) == (["10", "999"], False)


def test_a_comparison_matches_what_was_swept(tmp_path: Path) -> None:
    old = latest_ok(load_frame([two(tmp_path / "a", SWEPT["model.layers"])])[0])
    new = latest_ok(load_frame([two(tmp_path / "b", SWEPT["model.layers"])])[0])
    changes = compare(old, new)
    assert list(changes["verdict"]) == ["no difference shown"] * 2
    assert {*comparison_table(changes).numbers["model.layers"]} == {"8", "99"}
    one = old[old["model.layers"] == 8].drop(columns="model.layers")
    other = new[new["model.layers"] == 99].drop(columns="model.layers")
    assert compare(one, other).empty  # two models are no before and after


@pytest.mark.parametrize("name", ["measure.steps", "machine.processor", "seed"])
def test_a_comparison_goes_across_places_and_methods(tmp_path: Path, name: str) -> None:
    rows = latest_ok(load_frame([two(tmp_path / "a", SWEPT[name])])[0])
    assert list(compare(rows[:1], rows[1:])["verdict"]) == ["slower"]
    assert list(compare(rows, rows)["verdict"]) == ["no difference shown"] * 2


DEMO = CHECKOUT / "results" / "reference" / "demo"


def test_a_record_that_is_found_twice_counts_once(tmp_path: Path) -> None:
    """Roots that overlap, and a copy of a folder."""
    alone = latest_ok(load_frame([DEMO])[0])
    point = next(DEMO.iterdir())
    shutil.copytree(point, tmp_path / f"{point.name}.bak")
    twice = latest_ok(load_frame([DEMO, DEMO, point, tmp_path])[0])
    columns = ["record_id", "runs", "step_s", "step_s_low"]
    assert twice[columns].equals(alone[columns])
