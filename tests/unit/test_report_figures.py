"""The report's figures, traces, folder and paper's table in every form, and what changed between
two sets of made-up records."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.records.record import RunRecord
from benchmarks.report import TABLES, Options, style
from benchmarks.report.__main__ import main
from benchmarks.report.charts import memory_breakdown, save, scaling_curves, throughput_bars
from benchmarks.report.compare import compare, why_worse, write_comparison
from benchmarks.report.display import Unit, flops_unit, memory_unit, model_label
from benchmarks.report.frame import CELL, latest_ok, load_frame
from benchmarks.report.speedup import ablation_figure, speedup_maps
from benchmarks.report.table import Column, latex, markdown_table, table, write_table
from benchmarks.report.tables import paper_grids, paper_table
from benchmarks.report.timelines import step_timelines, write_traces
from benchmarks.report.write import grids_of, make_table, report_folder, write_one_table
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import COMPARED, PRICED
from tests.unit.synthetic_records import QUIET, failed, frame_of, make_record, write_records


def test_traced_memory_is_broken_down_by_kind(tmp_path: Path) -> None:
    ranks = [{"parameters": 2**20, "activations": 2**21}, {"parameters": 2**20, "activations": 0}]
    traced = make_record(
        provenance="traced",
        attempt="trace-1",
        fields={"step_s": [], "plan": {}, "predicted": {"peak_bytes": 3 * 2**20, "memory": ranks}},
    )
    (picture,) = memory_breakdown(latest_ok(frame_of(traced, root=tmp_path)))
    assert picture.caption.startswith("Traced memory")
    bars: list[Any] = list(picture.figure.axes[0].patches)
    heights = [bar.get_height() for bar in bars]  # in MiB, as all is below one GiB
    assert heights == [1.0, 2.0]


def test_every_kind_of_evidence_has_its_timelines(tmp_path: Path) -> None:
    records = [make_record("zeropp", num_gpus=n) for n in (4, 8, 16, 32, 64)]
    records.append(make_record(provenance="simulated", attempt="simulate-1", step_s=[0.1]))
    rows = latest_ok(frame_of(*records, root=tmp_path))
    for every, measured in {False: 1, True: 5}.items():
        names = [picture.name for picture in step_timelines(rows, Options(timelines=every))]
        assert sum("measured" in name for name in names) == measured
        assert sum("simulated" in name for name in names) == 1


def test_names_at_curve_ends_do_not_cover_each_other() -> None:
    _, (axis,) = style.panels(1)
    axis.plot([1, 2], [0, 100])
    low, high = axis.get_ylim()
    style.label_ends(axis, [(2, 50.0, name, "black") for name in "abcd"] + [(2, 99, "e", "black")])
    places = sorted(text.get_position()[1] for text in axis.texts)
    assert all(b - a > 0.07 * (high - low) for a, b in pairwise(places))
    assert places[0] >= low


def test_traces_give_every_lane_of_every_rank_its_own_thread(tmp_path: Path) -> None:
    (path,) = write_traces(latest_ok(frame_of(make_record(), root=tmp_path)), tmp_path)
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(make_record().spans)
    assert {type(event[key]) for event in slices for key in ("ts", "dur")} == {float}
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if "tid" in event and event["ph"] == "M"
    }
    assert all(names[event["tid"]] == event["cat"] for event in slices)
    processes = {event["tid"]: event["pid"] for event in slices}
    assert all(processes[event["tid"]] == event["pid"] for event in slices)
    assert 0 not in processes
    ends: dict[int, float] = {}
    for event in sorted(slices, key=lambda event: (event["tid"], event["ts"])):
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-6  # none lies across another
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_every_contender_has_a_look_of_its_own() -> None:
    looks = [style._STYLES[name] for name in dict.fromkeys([*PRICED, *COMPARED])] + [style._OTHER]
    for kind in ("colour", "hatch", "marker"):
        values = [getattr(look, kind) for look in looks]
        assert len({*values}) == len(values) > 10, kind


def test_figures_are_pdf_whose_fonts_publishers_take(tmp_path: Path) -> None:
    fields = {"basis": "the paper's setting", "plan": {"words": "pp=2"}}
    record = make_record(provenance="simulated", step_s=[1.0], fields=fields)
    (picture,) = throughput_bars(latest_ok(frame_of(record, root=tmp_path)))
    assert picture.name == "throughput_simulated_the_paper_s_setting_cpu_gloo"
    *_, pdf = save(picture, tmp_path).paths
    content = pdf.read_bytes()
    assert (b"/CIDFontType2" in content, b"/Type3" in content) == (True, False)


def test_a_figure_with_many_panels_says_which_it_draws(tmp_path: Path) -> None:
    records = [make_record(global_batch=8 * n, spans=False) for n in range(1, 9)]
    (picture,) = throughput_bars(latest_ok(frame_of(*records, root=tmp_path)))
    for text in (picture.caption, picture.shown):  # what is passed on has no caption
        assert "the first 6 of 8 panels, up to GPT tiny, batch 48 x 64" in text
    assert "batch 6 sizes · default degrees: ZeroPP" in picture.shown


def test_a_map_has_room_for_what_was_swept(tmp_path: Path) -> None:
    records = [make_record(name, spans=False) for name in ("zeropp", "deepspeed_3d")]
    (before,) = speedup_maps(latest_ok(frame_of(*records, root=tmp_path / "few")))
    for record in [*records]:
        other = json.loads(json.dumps(vars(record), default=vars))
        other["spec"]["model"] |= {"hidden": 4096, "ffn": 65536, "heads": 32, "layers": 2**14}
        other["spec"]["data"]["seed"], other["record_id"] = 12345, f"{other['record_id']}-long"
        records.append(RunRecord(**other))
    (after,) = speedup_maps(latest_ok(frame_of(*records, root=tmp_path / "many")))
    for picture in (before, after):
        save(picture, tmp_path)
        (axis, *_), figure = picture.figure.axes, picture.figure
        assert min(label.get_window_extent().x0 for label in axis.get_yticklabels()) >= 0
        assert axis.get_window_extent().width > figure.bbox.width / 5


def test_a_panel_is_named_by_what_differs_in_its_figure(tmp_path: Path) -> None:
    """Settings of other figures filled its titles; labels and titles were cut off."""
    other = {
        "pp": 2,
        "shard": 2,
        "chunks": 2,
        "unit": 1,
        "activation_cap": 7,
        "placement": "pp_inner",
    }
    knobs = [{}, other | {"reduce_every": "step", "recompute": "full", "split_backward": False}]
    records = [
        make_record(contender_knobs=of, spans=False, optimizer={"kind": "sgd", "lr": lr})
        for lr in (0.25, 0.5)
        for of in knobs
    ]
    records.append(
        make_record(provenance="simulated", spans=False, data={"kind": "synthetic", "seed": 99})
    )
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert rows["data.seed"].nunique(dropna=False) > 1
    for figure_of in (ablation_figure, throughput_bars):
        picture = next(p for p in figure_of(rows) if "measured" in p.name)
        save(picture, tmp_path)
        (left, *others), figure = picture.figure.axes, picture.figure
        titles = [axis.get_title() + axis.get_title(loc="left") for axis in (left, *others)]
        named = [" ".join(title.split()).split(", ")[-1] for title in titles if title]
        assert named == ["optimizer.lr 0.25", "optimizer.lr 0.5"]
        assert "data.seed" in picture.shown
        assert min(label.get_window_extent().x0 for label in left.get_yticklabels()) >= 0
        assert left.get_window_extent().width > figure.bbox.width / 5


def test_figures_have_units_and_a_zero_baseline(tmp_path: Path) -> None:
    contenders = ("zeropp", "deepspeed_3d", "torch_pp")
    records = [make_record(c, num_gpus=n) for c in contenders for n in (4, 8)]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    strong, *_ = list(scaling_curves(rows))
    assert {axis.get_ylabel() for axis in strong.figure.axes} == {"tokens/s", "efficiency [%]"}
    (stacks,) = memory_breakdown(rows)
    assert stacks.figure.axes[0].get_ylim()[0] == 0
    of_zeropp, *others = (picture.name for picture in speedup_maps(rows))
    assert (of_zeropp, others) == ("speedup_zeropp_measured_cpu_gloo", [])
    chosen = Options(contenders=("torch_pp",))
    assert [p.name for p in speedup_maps(rows, chosen)] == ["speedup_torch_pp_measured_cpu_gloo"]


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def write(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("null" if name == ".report.json" else name)


def test_stale_files_go_and_those_of_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "notes.txt")
    with report_folder(out) as folder:
        write(folder, "a.csv", "traces/b.json")
    with report_folder(out) as folder:
        write(folder, "a.csv", "c.csv")
    assert names(out) == {"notes.txt", "a.csv", "c.csv", ".report.json"}
    assert not (out / "traces").exists()
    assert list(tmp_path.iterdir()) == [out]  # nothing is left beside it


@pytest.mark.parametrize("broken", [set(), {".report.json"}])  # a broken list of files is as none
def test_a_file_of_another_is_never_replaced(tmp_path: Path, broken: set[str]) -> None:
    out = tmp_path / "out"
    write(out, "paper.tex", *broken)
    (out / "paper.tex").write_text("the paper itself")
    with pytest.raises(SpecError, match=r"out/paper.tex: is of no report"), report_folder(out) as f:
        write(f, "a.csv", "paper.tex")
    assert names(out) == {"paper.tex"} | broken
    assert (out / "paper.tex").read_text() == "the paper itself"
    assert list(tmp_path.iterdir()) == [out]


def test_what_is_no_report_lies_beside_one(tmp_path: Path) -> None:
    for _ in range(2):
        with report_folder(tmp_path) as folder:
            write(folder, "report.html")
        with report_folder(tmp_path, ".timeline.json") as folder:
            write(folder, "timeline.png")
    assert names(tmp_path) == {"report.html", "timeline.png", ".report.json", ".timeline.json"}
    with pytest.raises(SpecError), report_folder(tmp_path, ".timeline.json") as folder:
        write(folder, "report.html")


def test_a_report_that_is_cut_off_is_replaced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with report_folder(out) as folder:
        write(folder, "a.csv")
    move, moved = Path.replace, list[Path]()

    def replace(path: Path, target: Path) -> Path:
        if path.suffix == ".csv":
            moved.append(target)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt), report_folder(out) as folder:
        write(folder, "b.csv", "c.csv")
    monkeypatch.undo()
    with report_folder(out) as folder:
        write(folder, "b.csv", "c.csv", "d.csv")
    assert names(out) == {"b.csv", "c.csv", "d.csv", ".report.json"}


def interrupted_report(out: Path) -> None:
    with report_folder(out) as folder:
        write(folder, "b.csv")
        raise KeyboardInterrupt


def test_an_interruption_leaves_the_last_report_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with report_folder(out) as folder:
        write(folder, "a.csv")
    with pytest.raises(KeyboardInterrupt):
        interrupted_report(out)
    assert names(out) == {"a.csv", ".report.json"}
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("step_s", "said"), [([], "no records (zeropp run makes"), ([-1.0], "none of 1 records can be")]
)
def test_records_that_cannot_be_read_are_not_called_missing(
    step_s: list[float],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if step_s:
        write_records([make_record(step_s=step_s, spans=False)], tmp_path)
    words = ["report", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 2
    told, error = capsys.readouterr()
    assert said in error
    assert told.startswith("skipped") == bool(step_s)


@pytest.mark.parametrize(("steps", "status"), [(1.5, 1), (0.7, 0), (1.0, 0)])
def test_compare_ends_with_1_where_something_became_slower(
    steps: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, step in (("before", 1.0), ("after", steps)):
        write_records(
            [make_record(step_s=[step * (1 + 0.001 * i) for i in range(9)])], tmp_path / name
        )
    words = ["--compare", str(tmp_path / "before"), str(tmp_path / "after")]
    monkeypatch.setattr(sys, "argv", ["report", *words, "--out", str(tmp_path / "out")])
    assert main() == status
    assert "comparison.csv" in names(tmp_path / "out")


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
    changes = compare(old, latest_ok(frame_of(*after, root=tmp_path / "b")))
    assert {(r.contender, r.num_gpus): r.verdict for r in changes.itertuples()} == {
        ("zeropp", 4): "faster",
        ("deepspeed_3d", 4): "slower",
        ("torch_pp", 4): "no difference shown",
        ("fsdp", 4): "ok -> oom",
        ("zeropp", 8): "only before",
    }
    made = write_comparison([tmp_path / "a"], [tmp_path / "b"], tmp_path / "out", QUIET)
    assert "comparison.csv" in {path.name for path in made.files}
    assert [*filter(None, made.worse.values())] == ["23 % slower", "ok -> oom", "is gone"]
    lenient = write_comparison([tmp_path / "a"], [tmp_path / "b"], tmp_path / "out", QUIET, 0.25)
    assert [*filter(None, lenient.worse.values())] == ["ok -> oom", "is gone"]
    write_records([make_record("zeropp", global_batch=32)], tmp_path / "c")
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


REFERENCE = CHECKOUT / "results" / "reference"
COMMITTED = ("claim_33", "demo")
_DOCUMENT = r"""\documentclass[a4paper]{article}
\usepackage[margin=2.5cm]{geometry}
\usepackage{booktabs,graphicx}
\begin{document}
%s
\end{document}
"""


def compiled(texts: list[str], folder: Path) -> str:
    """pdflatex's log of a document of these texts; it must not stop, and no box may be too wide."""
    (folder / "document.tex").write_text(_DOCUMENT % "\n".join(texts))
    subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"],
        cwd=folder,
        check=True,
        timeout=300,
        capture_output=True,
    )
    return (folder / "document.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """The files of the paper's table by suffix, for every set of committed records."""
    root = tmp_path_factory.mktemp("committed")
    return {name: table_of(REFERENCE / name, root / name) for name in COMMITTED}


def table_of(records: Path, out: Path) -> dict[str, Path]:
    """The files of the paper's table of some records, by suffix."""
    made = write_one_table("paper", [records], out=out, options=Options(), console=QUIET)
    return {path.suffix: path for path in made.files}


def test_models_are_named_as_people_write_them() -> None:
    names = {"gpt_14_6b": "GPT 14.6B", "llama_405b": "Llama 405B", "gpt_tiny": "GPT tiny"}
    assert {name: model_label(name) for name in names} == names
    assert model_label("my_own") == "my_own"


def test_sizes_are_in_their_natural_order_and_the_best_is_bold(tmp_path: Path) -> None:
    records = [
        make_record(contender, model, 4)
        for model in ("gpt_1_5b", "gpt_tiny", "gpt_mini")
        for contender in ("zeropp", "deepspeed_3d")
    ]
    (grid,) = paper_grids(paper_table(latest_ok(frame_of(*records, root=tmp_path))))
    assert [row[0].text for row in grid.rows] == ["GPT tiny", "GPT mini", "GPT 1.5B"]
    assert [name for name, _ in grid.groups] == ["", "ZeroPP", "DeepSpeed 3D"]
    speed = grid.heads.index("tokens/s")
    assert all(row[speed].bold for row in grid.rows)  # synthetic ZeroPP is the faster one
    assert "measured" in grid.title
    assert "measured" not in grid.caption
    assert "GPU" not in " ".join((*grid.heads, grid.caption))  # it was a CPU


def test_a_failure_is_a_word_and_keeps_its_reason(tmp_path: Path) -> None:
    lost = {"status": "oom", "reason": "rank 3: out of memory", "step_s": []}
    records = [make_record(), make_record("deepspeed_3d", fields=lost)]
    table = paper_table(latest_ok(frame_of(*records, root=tmp_path)))
    (grid,) = paper_grids(table)
    assert "OOM" in [cell.text for cell in grid.rows[0]]
    assert any("rank 3: out of memory" in note for note in grid.notes)
    assert table.data["speedup"].isna().all()


def test_the_base_can_be_chosen(tmp_path: Path) -> None:
    names = {"zeropp": 1.0, "deepspeed_3d": 2.0, "fsdp": 4.0}
    records = [make_record(n, step_s=[s] * 6) for n, s in names.items()]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    table = paper_table(rows, Options("fsdp")).numbers.set_index("contender")
    assert table["speedup"].to_dict() == {"zeropp": 4.0, "deepspeed_3d": 2.0, "fsdp": 1.0}


@pytest.mark.parametrize("name", COMMITTED)
def test_every_form_of_the_committed_tables(
    name: str, committed: dict[str, dict[str, Path]]
) -> None:
    files = committed[name]
    assert set(files) == {".csv", ".parquet", ".md", ".tex", ".html"}
    csv, parquet = pd.read_csv(files[".csv"]), pd.read_parquet(files[".parquet"])
    assert len(csv) == len(parquet) >= 4
    for column in ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "peak_gib", "speedup"):
        assert csv[column].dtype.kind == "f"
        if column != "peak_gib":
            assert {f"{column}_low", f"{column}_high"} <= set(csv.columns)
    assert csv["tokens_per_s_per_gpu"].notna().all()
    assert files[".md"].read_text().count("**") >= 2 * csv["model"].nunique()  # one a line


def test_the_verdicts_table_says_what_its_plans_say() -> None:
    table = paper_table(latest_ok(load_frame([REFERENCE / "claim_33"])[0]))
    numbers = table.numbers
    lines = sum(len(grid.rows) for grid in paper_grids(table))
    assert lines == len(table.data.groupby([*CELL])) < len(numbers)
    plans = pd.read_csv(REFERENCE / "claim_33" / "plans.csv")
    own = plans[plans["bandwidth"] == 1.0]
    assert len(numbers) == len(plans) > 200
    keys = ["model", "cluster", "num_gpus", "global_batch", "contender"]
    best = own[own["mode"] == "best"].set_index(keys)["tokens_per_s_per_gpu"].sort_index()
    whole = ~numbers["cluster"].str.contains("×")  # of its network
    mine = numbers[whole & (numbers["basis"] == "best plans")].set_index(keys)[
        "tokens_per_s_per_gpu"
    ]
    pd.testing.assert_series_equal(mine.sort_index(), best, rtol=1e-4)
    assert numbers["mfu"].between(0.05, 0.8).all()


def test_a_page_has_room_for_every_column(committed: dict[str, dict[str, Path]]) -> None:
    """The default table of the verdict had 62 columns in one line."""
    text = committed["claim_33"][".tex"].read_text()
    forms = re.findall(r"begin\{tabular\}\{(\w+)\}", text)
    assert len(forms) > 8
    assert max(map(len, forms)) <= 10
    numbers = pd.read_csv(committed["claim_33"][".csv"])
    assert all(label.replace("&", r"\&") in text for label in numbers["label"].unique())


def test_only_what_is_settled_is_bold(tmp_path: Path) -> None:
    times = {"zeropp": [1.0, 1.4] * 5, "deepspeed_3d": [1.1, 1.5] * 5, "fsdp": [2.0] * 10}
    records = [make_record(name, step_s=steps) for name, steps in times.items()]
    (grid,) = paper_grids(paper_table(latest_ok(frame_of(*records, root=tmp_path))))
    bold = {head for head, cell in zip(grid.heads, grid.rows[0], strict=True) if cell.bold}
    assert bold == {"MiB"}


def test_contenders_and_columns_can_be_chosen(tmp_path: Path) -> None:
    names = ("zeropp", "deepspeed_3d", "deepspeed_best", "megatron_core")
    options = Options(contenders=names[2:], columns=("tokens_per_s_per_gpu", "speedup"))
    claim = REFERENCE / "claim_33"
    screen = Console(width=160, record=True, file=io.StringIO())
    made = write_one_table("paper", [claim], out=tmp_path, options=options, console=screen)
    shown = screen.export_text()
    said = [word in shown for word in ("Megatron-Core", "ZeroPP  ", "speed-up", "MFU", "GiB")]
    assert said == [True, False, True, False, False]
    latex = next(path for path in made.files if path.suffix == ".tex").read_text()
    first = latex.partition(r"\toprule")[2].partition(r"\midrule")[0]
    assert [label in first for label in ("DeepSpeed, best", "Megatron-Core", "ZeroPP")] == [1, 1, 0]
    assert first.count("tokens/s &") == first.count("speed-up") == 2
    assert "GiB" not in first
    csv = pd.read_csv(next(path for path in made.files if path.suffix == ".csv"))
    assert csv["mfu"].isna().all()
    assert csv["speedup"].notna().any()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Options(base="magic"), "there are deepspeed_3d, fsdp, zeropp"),
        (Options(contenders=("magic",)), "=magic: there are "),
        (Options(columns=("magic",)), "=magic: there are "),
    ],
)
def test_what_no_table_has_cannot_be_chosen(tmp_path: Path, wrong: Options, said: str) -> None:
    names = ("zeropp", "deepspeed_3d", "fsdp")
    write_records([make_record(name) for name in names], tmp_path)
    with pytest.raises(SpecError, match=said):
        write_one_table("paper", [tmp_path], out=tmp_path / "out", options=wrong, console=QUIET)


def test_an_empty_table_has_a_header(tmp_path: Path) -> None:
    csv, parquet, *_ = write_table(paper_table(load_frame([tmp_path])[0]), [], tmp_path)
    assert [pd.read_csv(csv).columns[0], pd.read_parquet(parquet).columns[0]] == ["model"] * 2


def test_numbers_of_a_markdown_table_stand_on_the_right() -> None:
    rows = [["8 blocks", "**1.5**", "–", "16 | 8"], ["7B", "~2", "", "none"]]
    assert markdown_table(["model", "a", "b", "c"], rows).splitlines() == [
        "| model | a | b | c |",
        "| --- | ---: | ---: | --- |",
        "| 8 blocks | **1.5** | – | 16 \\| 8 |",
        "| 7B | ~2 |  | none |",
    ]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex (Debian's texlive)")
def test_latex_compiles_and_fits_the_text(
    tmp_path: Path, committed: dict[str, dict[str, Path]]
) -> None:
    odd = {"status": "failed", "reason": r"100 % of #1_x & \y{z} ~ ^ é → 你", "step_s": []}
    records = [make_record(), make_record("fsdp", fields=odd)]
    rows = latest_ok(frame_of(*records, root=tmp_path / "runs"))
    tables = (*committed.values(), table_of(tmp_path / "runs", tmp_path / "odd"))
    texts = [files[".tex"].read_text() for files in tables]
    texts += [latex(grids_of(make_table(name, rows))) for name in TABLES]  # some are empty
    columns = [Column("model", "model"), Column("words", "note_of")]
    columns += [Column(f"n{i}", f"n{i}", form="{:.2f}".format) for i in range(9)]
    data = pd.DataFrame({c.name: [12345.678 if c.form else "shard=2 U=4 " * 20] for c in columns})
    data = data.loc[[0] * 1000]
    texts.append(latex([table("long", "A long one", columns, data).grid()]))
    log = compiled(texts, tmp_path)
    assert not re.findall(r"Overfull \\hbox.*", log)
    assert "Float too large" not in log


@pytest.mark.parametrize(
    ("unit", "name", "texts"),
    [
        (memory_unit, "GiB", {0.0114: "0.011", 0.99961: "1.00", 9.996: "10.0", 74.84: "74.8"}),
        (memory_unit, "MiB", {0.0004: "0.4", 0.0114: "12", 0.5: "512", 0.9999: "1,024"}),
        (flops_unit, "TFLOP/s", {0.00281: "0.00281", 4.561: "4.56", 161.94: "161.9"}),
        (flops_unit, "GFLOP/s", {0.000458: "0.458", 0.01116: "11.2", float("nan"): "nan"}),
    ],
)
def test_a_column_has_one_unit_and_numbers_are_rounded_by_size(
    unit: Callable[[Iterable[float]], Unit], name: str, texts: dict[float, str]
) -> None:
    chosen = unit(texts)
    assert chosen.name == name
    assert [chosen.form(value) for value in texts] == list(texts.values())
