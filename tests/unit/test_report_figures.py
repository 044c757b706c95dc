"""The report's figures and traces, from made-up records."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.records.record import RunRecord
from benchmarks.report import Options, style
from benchmarks.report.charts import memory_breakdown, save, scaling_curves, throughput_bars
from benchmarks.report.frame import latest_ok
from benchmarks.report.speedup import speedup_maps
from benchmarks.report.timelines import step_timelines, write_traces
from benchmarks.specification.contenders import COMPARED, PRICED
from tests.unit.report_frames import frame_of
from tests.unit.synthetic_records import make_record


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
    rows = latest_ok(frame_of(make_record(), root=tmp_path))
    (path,) = write_traces(rows, tmp_path)
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
        assert len({*values}) == len(values) > 12, kind


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
    assert "the first 6 of 8 panels, up to GPT tiny, batch 48 x 64" in picture.caption
    assert picture.shown.endswith("batch 6 sizes · default degrees: ZeroPP")


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
        left = min(label.get_window_extent().x0 for label in axis.get_yticklabels())
        assert left >= 0
        assert axis.get_window_extent().width > figure.bbox.width / 5


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
