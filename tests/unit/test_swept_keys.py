"""What a sweep varied is a column: rows are equal specifications on one kind of machine, and a
record that is found twice counts once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import CHECKOUT
from benchmarks.launch.attempt import plan_summary
from benchmarks.launch.points import plan_point
from benchmarks.records.environment import _VARIABLES, capture_environment
from benchmarks.records.events import measured
from benchmarks.records.losses import Losses, apart_from_others, beyond
from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import flat_spec, unchecked
from benchmarks.records.same_run import _DEFAULTS, CANNOT_MATTER, same_run
from benchmarks.report import TABLES, Options
from benchmarks.report.charts import loss_curves, scaling_curves, throughput_bars
from benchmarks.report.compare import compare, comparison_table
from benchmarks.report.display import varied
from benchmarks.report.frame import latest_ok, load_frame, notes_of
from benchmarks.report.speedup import (
    ablation_figure,
    ablation_table,
    ablations,
    headline_table,
    paired_speedups,
    speedup_maps,
)
from benchmarks.report.table import markdown
from benchmarks.report.tables import paper_grids, paper_table, throughput_table
from benchmarks.report.write import grids_of, make_table, write_one_table
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.synthetic_records import QUIET, frame_of, make_record, spec_values

Change = Callable[[dict[str, Any]], None]
GROUPS = ("model", "cluster", "cluster.device", "contender")  # whose keys follow from a name


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
    "machine.hosts": lambda record: record["ranks"][0]["environment"].update(host="node9"),
    "environment.torch": _ranks(versions={"torch": "2.11.0"}),
    "environment.NCCL_ALGO": _ranks(variables={"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Tree"}),
    "environment.LD_PRELOAD": _ranks(
        variables={"OMP_NUM_THREADS": "1", "LD_PRELOAD": "/opt/libjemalloc.so"}
    ),
    "environment.code": lambda record: record.update(code_digest="others"),
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


def test_every_field_counts_or_is_said_not_to() -> None:
    """Where a field of a record, or of what a rank records, has another value, the records are no
    runs of one thing, unless the list says why it cannot matter."""
    record = make_record(spans=False, fields={"code_digest": "files"})
    environment = capture_environment() | {"code": {"digest": "x"}, "cuda": "12.8", "nccl": "2.29"}
    environment |= {"device_memory_gib": 79.1, "variables": {"NCCL_ALGO": "Ring"}}
    ranks = [replace(rank, environment=environment) for rank in record.ranks]
    record = replace(record, ranks=ranks)
    of_rows = {"provenance", "variant", "basis"}  # which tables keep apart by themselves
    counted = {
        field.name
        for field in fields(record)
        if same_run(_changed(record, field.name)) != same_run(record)
    }
    assert counted - of_rows == {"spec", "ranks", "code_digest"}
    assert counted | of_rows == {field.name for field in fields(record)} - {*CANNOT_MATTER}
    for path in {*flat_spec(record.spec), *_DEFAULTS}:  # the latter has fields that it lacks
        values = {"spec": json.loads(json.dumps(record.spec))}
        _spec(f"{path}.name" if path in GROUPS else path, "other")(values)
        is_same = same_run(replace(record, **values)) == same_run(record)
        assert is_same == path.startswith("contender."), path
    apart = _with_environment(record, "host").ranks[:1] + record.ranks[1:]
    for other in (apart, record.ranks[1:]):  # on one host more, and a rank less
        assert same_run(replace(record, ranks=other)) != same_run(record)
    flat = flat_spec(environment)
    for path in flat:
        changed = _with_environment(record, path)
        assert (same_run(changed) == same_run(record)) == _cannot_matter(path), path
    assert {*filter(_cannot_matter, flat)} == {"host", "memory_gib", "code.digest"}
    variables = {*CANNOT_MATTER} - {f.name for f in fields(record)} - {*environment}
    assert all(name.startswith(_VARIABLES) for name in variables)
    others = (_with_environment(record, f"variables.{name}") for name in variables)
    assert {*map(same_run, others)} == {same_run(record)}


def _cannot_matter(path: str) -> bool:
    return any(part in CANNOT_MATTER for part in path.split("."))


def _changed(record: RunRecord, name: str) -> RunRecord:
    """The record with another value of a field; of its specification, another seed."""
    value = getattr(record, name)
    other: Any = {"other": 1} if isinstance(value, dict) else "other"
    if name == "spec":
        other = value | {"seed": 8}
    elif name == "ranks":
        other = [replace(rank, environment=rank.environment | {"cpu": "x"}) for rank in value]
    return replace(record, **{name: other})


def _with_environment(record: RunRecord, path: str) -> RunRecord:
    group, _, name = path.rpartition(".")
    ranks = []
    for rank in record.ranks:
        inner = rank.environment[group] | {name: "other"} if group else "other"
        ranks.append(replace(rank, environment=rank.environment | {group or name: inner}))
    return replace(record, ranks=ranks)


@pytest.mark.parametrize(
    ("name", "value", "is_same"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", True),  # the contender's own
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", False),
        ("CUDA_VISIBLE_DEVICES", "1", False),
        ("NCCL_TOPO_FILE", "/elsewhere/topology.xml", True),
        ("NCCL_TOPO_FILE", "/site/other.xml", False),
    ],
)
def test_of_variables_a_contenders_own_and_places_do_not_count(
    name: str, value: str, is_same: bool
) -> None:
    plain = {"NCCL_TOPO_FILE": "/site/topology.xml"}
    record = make_record(spans=False)
    before, after = (
        replace(record, ranks=[replace(record.ranks[0], environment={"variables": variables})])
        for variables in (plain, plain | {name: value})
    )
    assert (same_run(before) == same_run(after)) == is_same
    given = replace(after, slurm={"job": "1"})
    assert (same_run(given) == same_run(before)) == (is_same or name == "CUDA_VISIBLE_DEVICES")


def test_other_software_is_a_cell_of_its_own_in_every_table(tmp_path: Path) -> None:
    """Contenders of two torch versions shared a cell, with a speed-up, without a word."""
    old = [replace(rank, environment={"versions": {"torch": "2.4.0"}}) for rank in _one().ranks]
    records = [_one(fields={"ranks": old}), _one("deepspeed_3d"), _one("fsdp")]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert [*paired_speedups(rows, "deepspeed_3d")["contender"]] == ["fsdp"]
    assert any("torch" in note for note in notes_of(rows))
    for name in ("throughput", "memory", "paper", "headline"):
        made = headline_table(rows) if name == "headline" else make_table(name, rows)
        text = "\n".join(markdown(grid) for grid in grids_of(made))
        assert "2.4.0" in text, name
        assert "2.13.0" in text, name
        assert made.numbers["environment.torch"].nunique() == 2, name
    shown = [picture.shown for picture in throughput_bars(rows)]
    assert all("torch 2.13.0, 2.4.0" in line or "2.4.0, 2.13.0" in line for line in shown)


def _one(contender: str = "zeropp", **more: Any) -> RunRecord:
    return make_record(contender, spans=False, **more)


def test_a_failure_of_other_files_stands_beside_the_success_that_came_of_them(
    tmp_path: Path,
) -> None:
    def change(record: dict[str, Any]) -> None:
        record |= {"code_digest": "before", "step_s": []}

    (row,) = latest_ok(load_frame([two(tmp_path, change, status="failed")])[0]).to_dict("records")
    assert (row["status"], row["step_s"]) == ("ok", 1.0)
    assert [attempt["status"] for attempt in row["unsuccessful"]] == ["failed"]


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
    assert list(rows[rows["model"] == "gpt_tiny"]["model.layers"]) == [4, 8, 16, 128]


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


def sweep(root: Path) -> pd.DataFrame:
    """Units 2, 4 and 16 with and without recomputation: six points that were planned for real;
    the unit of 16 is cut to the 8 microbatches of a step."""
    records = []
    for number, unit in enumerate((2, 4, 16)):
        for recompute in ("none", "full"):
            knobs = {"name": "zeropp", "pp": 2, "shard": 2, "chunks": 2}
            knobs |= {"unit": unit, "recompute": recompute}
            point = plan_point(spec_from_mapping(spec_values() | {"contender": knobs}))
            assert point.plan is not None
            step = 1.0 - 0.1 * number + (0.3 if recompute == "full" else 0.0)
            fields = {"plan": plan_summary(point.plan)}
            records.append(make_record(step_s=[step] * 6, fields=fields, contender_knobs=knobs))
    return latest_ok(frame_of(*records, root=root))


def test_six_points_are_six_rows_and_one_figure(tmp_path: Path) -> None:
    rows = sweep(tmp_path / "runs")
    table = ablation_table(rows, Options(against={"unit": "2", "recompute": "none"}))
    assert len(table.data) == 6
    changes = dict(zip(table.data["change"], table.data["speedup"], strict=True))
    assert changes["base"] == 1.0
    assert changes["unit 2 → 4"] == pytest.approx(1 / 0.9)
    assert changes["recompute none → full"] == pytest.approx(1 / 1.3)
    found = ablations(rows, {"unit": "2"})
    assert any("16 (run as 8)" in change for change in found["change"])
    assert sum("U=16 (run as 8)" in layout for layout in found["layout"]) == 2
    with pytest.raises(SpecError, match=r"there are unit .*16 \(run as 8\).*, recompute"):
        ablation_table(rows, Options(against={"unit": "3"}))
    (picture,) = ablation_figure(rows)
    assert len(picture.figure.axes[0].patches) == 6
    out = tmp_path / "out"
    write_one_table("ablation", [tmp_path / "runs"], out=out, options=Options(), console=QUIET)
    assert len(pd.read_csv(out / "ablation.csv")) == 6


def test_no_sweep_is_a_header_alone(tmp_path: Path) -> None:
    rows = latest_ok(frame_of(make_record(), root=tmp_path))
    assert ablation_table(rows).data.empty
    assert list(ablation_figure(rows)) == []
    assert "change" in ablation_table(rows).numbers.columns


RIGHT = [5.5, 5.2, 5.0]


def test_a_loss_beyond_the_band_is_named_with_its_step() -> None:
    assert beyond([5.5, 5.21, 5.0], RIGHT, "fp32") == ""
    assert beyond([5.5, 5.2, 8.99], RIGHT, "fp32").startswith("step 3: loss 8.9900, but 5.0000")
    assert beyond([5.5, float("nan")], RIGHT, "bf16").startswith("step 2")
    # Without anything to compare with:
    assert beyond([5.5, float("nan")], [], "fp32") == "step 2: loss nan is not a finite number"
    assert beyond([5.5, float("inf")], [5.5, float("inf")], "fp32").startswith("step 2")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loss_that_is_no_number_is_no_failure_of_the_others(place: int) -> None:
    values = [[5.5, 5.2], [5.5, 5.2]]
    values.insert(place, [5.5, float("nan")])
    for several in (values, values[:2], values[1:]):
        runs = [Losses("same", str(n), "fp32", losses) for n, losses in enumerate(several)]
        wrong = [n for n, losses in enumerate(several) if losses[1] != 5.2]
        assert list(apart_from_others(runs)) == wrong


def test_the_one_that_differs_from_the_others_is_wrong_and_of_two_nobody_knows() -> None:
    def runs(**values: list[float]) -> list[Losses]:
        return [Losses("same", name, "fp32", losses) for name, losses in values.items()]

    wrong = [5.5, 5.2, 8.99]
    assert list(apart_from_others(runs(a=RIGHT, b=wrong, c=RIGHT))) == [1]
    assert list(apart_from_others(runs(a=RIGHT, b=wrong))) == [0, 1]
    assert apart_from_others(runs(a=wrong)) == {}
    assert apart_from_others(runs(a=RIGHT, b=RIGHT[:2])) == {}


def test_a_run_beyond_the_band_is_a_failure_in_tables(tmp_path: Path) -> None:
    losses = {"zeropp": [5.5, 5.2, 8.99], "deepspeed_3d": RIGHT, "fsdp": RIGHT}
    records = [make_record(name, fields={"losses": each}) for name, each in losses.items()]
    rows = latest_ok(frame_of(*records, root=tmp_path)).set_index("contender")
    assert list(rows["status"][["deepspeed_3d", "fsdp", "zeropp"]]) == ["ok", "ok", "failed"]
    assert "loss 8.9900" in rows["reason"]["zeropp"]
    assert rows.loc[["zeropp"], ["step_s", "tokens_per_s_per_gpu", "mfu"]].isna().all(axis=None)


@pytest.mark.parametrize("measure", [{"gate": False}, {"gate_tolerance": 0.01}])
def test_a_run_without_the_usual_gate_is_marked_wherever_it_is_shown(
    tmp_path: Path, measure: dict[str, object]
) -> None:
    assert unchecked({"measure": measure})
    records = [make_record("zeropp", measure=measure), make_record("deepspeed_3d")]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    mark = "NOT COMPARED with one process as usual: ZeroPP (measure.gate"
    grids = [*paper_grids(paper_table(rows)), headline_table(rows).grid()]
    for grid in (*grids, throughput_table(rows).grid()):
        assert mark in markdown(grid)
    assert mark in next(throughput_bars(rows)).shown


def test_a_run_with_the_usual_gate_is_not_marked() -> None:
    assert unchecked({"measure": {"gate": True, "gate_tolerance": 1e-4}}) == unchecked({}) == ""


def test_a_record_says_how_many_steps_were_compared() -> None:
    compared = measured({0: [{"event": "losses", "error": 1e-6, "steps": 5}]})
    assert (compared["loss_error"], compared["loss_steps"]) == (1e-6, 5)
    assert measured({0: []})["loss_error"] is None
