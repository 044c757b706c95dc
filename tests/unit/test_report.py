"""The report from made-up records: what is shown, what is skipped, what is never mixed; and that of
a folder of scripts/gpu: measurements beside what is described."""

from __future__ import annotations

import base64
import csv
import errno
import gzip
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from benchmarks.records.lone import LONE, is_of_one_gpu, read_lone
from benchmarks.records.record import GateCheck, GateResult, read_record
from benchmarks.report import TABLES, Options
from benchmarks.report.__main__ import main
from benchmarks.report.evidence import (
    VALIDATION,
    evidence_distances,
    published_distances,
    published_figure,
    published_table,
)
from benchmarks.report.frame import best_configuration, latest_ok, load_frame, notes_of, row_of
from benchmarks.report.one_gpu import described_seconds, one_gpu_tables, write_one_gpu
from benchmarks.report.speedup import (
    headline_table,
    paired_speedups,
    speedup_maps,
    speedup_table,
    with_speedups,
)
from benchmarks.report.table import MISSING, print_table
from benchmarks.report.tables import paper_grids, scaling_table, throughput_table
from benchmarks.report.write import make_table, report_folder, write_one_table, write_report
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.unit.synthetic_records import QUIET, column, failed, frame_of, make_record, write_records
from tests.unit.toy_spec import mapping
from zeropp.price import price_plan


def test_throughput_is_the_formula(tmp_path: Path) -> None:
    record = make_record(step_s=[2.0] * 6)
    frame = frame_of(record, root=tmp_path)
    row = frame.iloc[0]
    assert {*row_of(record)} == {*frame.columns}
    assert row["tokens_per_s_per_gpu"] == 16 * 64 / 2.0 / 4
    assert pd.isna(row["mfu"])  # a CPU has no known peak
    assert (row["memory_kind"], row["steps_unsettled"]) == ("resident", "")


def test_latest_success_wins_and_failures_stay(tmp_path: Path) -> None:
    early = make_record(step_s=[2.0] * 6)
    newer = {"started_at": "2026-11-21"}  # files are not known, so they are no repeats
    late = make_record(step_s=[1.0] * 6, attempt="local-2", fields=newer)
    broken = make_record(attempt="local-3", fields=failed("failed", "rank 1 was killed"))
    other = make_record("deepspeed_3d", fields=failed("oom", "rank 0: out of memory"))
    frame = frame_of(early, late, broken, other, root=tmp_path)
    assert len(frame) == 4
    rows = latest_ok(frame)
    assert list(rows["step_s"].dropna()) == [1.0]
    table = throughput_table(rows)
    assert column(table, "note") == [
        "rank 0: out of memory",
        "default degrees; 1 other attempt did not succeed",
    ]
    assert "OOM" in column(table, "step [s]")
    assert "OOM" in column(headline_table(rows), "tokens/s/rank")
    late = make_record(
        "deepspeed_3d", fields=failed("timeout", "at step 5") | {"step_s": [1.0] * 5}
    )
    rows = latest_ok(frame_of(make_record(), late, root=tmp_path / "late"))
    assert with_speedups(rows, "deepspeed_3d")["speedup"].count() == 0  # of steps before a failure


def test_attempts_that_failed_beside_a_success_are_listed(tmp_path: Path) -> None:
    endings = {"oom": "rank 0: out of memory", "preempted": "", "failed": "rank 1 was killed"}
    records = [make_record(attempt="local-0"), make_record("deepspeed_3d")]
    for number, (status, reason) in enumerate(endings.items(), 1):
        fields = failed(status, reason) | {"started_at": f"2026-11-2{number}"}
        records.append(make_record(attempt=f"local-{number}", fields=fields))
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert list(rows["status"]) == ["ok", "ok"]
    table = make_table("attempts", rows)
    assert column(table, "status") == list(endings)
    assert column(table, "reason") == list(endings.values())
    assert table.grid().records == tuple((record.record_id,) for record in records[2:])
    (note,) = notes_of(rows)
    assert note.startswith("1 oom, 1 preempted, 1 failed: other attempts")


def test_the_reference_is_the_fastest_and_sure_of_itself(tmp_path: Path) -> None:
    slow = {"plan": {"layout": {"pp": 4}}, "started_at": "2026-11-21"}
    base = make_record("deepspeed_3d", step_s=[1.0, 2.0, 0.5, 1.5, 3.0])
    later = make_record("deepspeed_3d", step_s=[2.5] * 6, attempt="local-2", fields=slow)
    ours = make_record("zeropp", step_s=[0.75] * 6)
    shown = headline_table(latest_ok(frame_of(base, later, ours, root=tmp_path)))
    first, second, third = column(shown, "speed-up")  # contenders by key, the later layout first
    assert {first, second} == {"1.00", "~0.60 [0.27, 1.31]"}
    assert third.startswith("~2.00 [")


def test_what_never_had_a_plan_is_named_by_what_was_asked(tmp_path: Path) -> None:
    nothing = failed("infeasible", "does not fit") | {"plan": {}}
    rows = latest_ok(
        frame_of(
            make_record("fsdp", fields=nothing, microbatch_size="auto"),
            make_record("zeropp", fields=nothing),
            root=tmp_path,
        )
    )
    shown = headline_table(rows)
    columns = [column(shown, head) for head in ("contender", "configuration")]
    assert columns == [["FSDP2", "ZeroPP"], ["auto", "auto"]]


def test_kinds_of_evidence_are_never_paired(tmp_path: Path) -> None:
    measured = make_record("zeropp")
    simulated = make_record("deepspeed_3d", provenance="simulated", attempt="simulate-1")
    rows = latest_ok(frame_of(measured, simulated, root=tmp_path))
    assert paired_speedups(rows, "deepspeed_3d").empty
    assert set(column(throughput_table(rows), "evidence")) == {"measured", "simulated"}


def test_speedup_warns_of_what_the_samples_do_not_show(tmp_path: Path) -> None:
    noisy = make_record("zeropp", step_s=[1.0, 2.0, 0.5, 1.5, 3.0, 1.0])
    base = make_record("deepspeed_3d", step_s=[1.0, 1.1, 0.9, 1.0, 1.05, 1.0])
    pair = paired_speedups(latest_ok(frame_of(noisy, base, root=tmp_path)), "deepspeed_3d").iloc[0]
    assert pair["speedup_unsettled"] == "spread 70.0 %, interval includes 1"


def test_a_speedup_shows_its_doubts_at_the_number(tmp_path: Path) -> None:
    quiet, noisy = [1.0] * 6, [1.0, 2.0, 0.5, 1.5, 3.0, 1.0]
    records = []
    for gpus, steps in {4: [0.5] * 6, 8: noisy, 16: [0.5]}.items():
        records += [
            make_record("zeropp", num_gpus=gpus, step_s=steps),
            make_record("deepspeed_3d", num_gpus=gpus, step_s=quiet),
        ]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    table = speedup_table(rows)
    *speedups, middle = column(table, "speed-up")
    assert speedups[0] == "2.00 [2.00, 2.00]"
    assert speedups[1].startswith("~0.80 [")
    assert speedups[2] == "~2.00 [2.00, 2.00]"  # one step shows nothing, however large the ratio
    assert middle == "2.00"
    *notes, note = column(table, "note")
    assert notes == ["", "unsettled: spread 70.0 %, interval includes 1", "unsettled: 1 step"]
    assert note == "0.80 to 2.00, 2 of them unsettled"
    assert (
        "~ unsettled: an interval that includes 1 or a spread over 10 % or fewer than 5 steps."
        in table.grid().caption
    )
    (fmap,) = speedup_maps(rows)
    texts = [text.get_text() for text in fmap.figure.axes[0].texts]
    assert [text.startswith("~") for text in texts] == [False, True, True]
    assert all("[" in text for text in texts)
    shown = headline_table(rows)
    assert column(shown, "configuration")[-1] == "pp=2 shard=8 V=2 U=2"
    assert column(shown, "speed-up")[2:] == ["1.00", speedups[1], "1.00", "~2.00 [2.00, 2.00]"]


def test_rows_of_tables_name_their_records(tmp_path: Path) -> None:
    ours, base = make_record("zeropp"), make_record("deepspeed_3d")
    predicted = {"predicted": {"peak_bytes": 2**20}}
    other = make_record(provenance="traced", attempt="trace-1", noise=0.0, fields=predicted)
    rows = latest_ok(frame_of(ours, base, other, root=tmp_path))
    tables = {name: make_table(name, rows) for name in TABLES}
    assert tables["speedup"].grid().records == ((ours.record_id, base.record_id),)
    assert set(tables["evidence"].grid().records) == {(other.record_id, ours.record_id)}
    named = {(r.record_id,) for r in (ours, base, other)}
    assert set(tables["throughput"].grid().records) == named
    (measured, _) = paper_grids(tables["paper"])
    assert measured.records == ((ours.record_id, base.record_id),)
    assert tables["published"].data.empty


def test_a_simulated_zeropp_says_that_nobody_measured_it(tmp_path: Path) -> None:
    measured = make_record()
    simulated = make_record(provenance="simulated", attempt="simulate-1", step_s=[2.5])
    assert notes_of(latest_ok(frame_of(measured, root=tmp_path / "measured"))) == []
    (note,) = notes_of(latest_ok(frame_of(measured, simulated, root=tmp_path / "both")))
    assert "published measurements" in note


def test_published_distances_stand_beside_simulated_records(tmp_path: Path) -> None:
    simulated = make_record(provenance="simulated", attempt="simulate-1", step_s=[2.5])
    rows = latest_ok(frame_of(simulated, root=tmp_path))
    distances = published_distances(rows)
    kinds = ({*distances["role"]}, {*distances["quantity"]})
    assert kinds == ({"fitted", "adjusted", "held out"}, {"speed", "memory"})
    assert len(distances) > 800
    vtrain = distances[distances["source"].str.startswith("vTrain")]["error"]  # step times
    committed = pd.read_csv(VALIDATION)
    slow = committed[committed["source"].str.startswith("vTrain")]["relative_error"].dropna()
    assert vtrain.median() == pytest.approx(1 / (1 + slow.median()) - 1, abs=1e-3)
    groups = distances.groupby(["source", "role", "quantity"])
    assert len(published_table(rows).data) == groups.ngroups
    (picture,) = published_figure(rows)
    assert len(picture.figure.axes) == 2


def test_speedup_takes_the_fastest_configuration_and_the_median_of_cells(tmp_path: Path) -> None:
    records = []
    for gpus in (4, 8):
        slow = {"plan": {"layout": {"pp": 4, "shard": 1}}}
        records += [
            make_record("zeropp", num_gpus=gpus, step_s=[1.0] * 6),
            make_record("zeropp", num_gpus=gpus, step_s=[3.0] * 6, attempt="b", fields=slow),
            make_record("deepspeed_3d", num_gpus=gpus, step_s=[2.0] * 6),
        ]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    assert (len(rows), list(paired_speedups(rows, "deepspeed_3d")["speedup"])) == (6, [2.0, 2.0])
    table = speedup_table(rows)
    assert column(table, "speed-up") == ["2.00 [2.00, 2.00]"] * 2 + ["2.00"]
    assert column(table, "model")[-1] == "median of 2 cells"


def test_unreadable_files_are_named_and_skipped(tmp_path: Path) -> None:
    write_records([make_record()], tmp_path)
    good = next(tmp_path.rglob("record.json")).read_text()
    document = json.loads(good)
    for name, text in {
        "cut": good[: len(good) // 2],
        "future": json.dumps(document | {"schema_version": 99}),
        "other": json.dumps(document | {"spec": {**document["spec"], "global_batch": "many"}}),
        "list": "[]",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    frame, skipped = load_frame([tmp_path])
    assert (len(frame), len(skipped)) == (1, 4)
    for name in ("cut", "future", "other", "list"):
        assert any(str(tmp_path / name / "record.json") in line for line in skipped)


def test_distance_between_kinds_of_evidence(tmp_path: Path) -> None:
    measured = make_record(step_s=[2.0] * 6)
    simulated = make_record(
        step_s=[2.5],
        provenance="simulated",
        attempt="simulate-1",
        fields={"ranks": [], "predicted": {"peak_bytes": 2**30}},
    )
    rows = latest_ok(frame_of(measured, simulated, root=tmp_path))
    distances = evidence_distances(rows).set_index("quantity")
    assert distances.loc["step [s]", "error"] == pytest.approx(0.25)
    assert distances.loc["step [s]", "reference_kind"] == "measured"
    assert distances.loc["peak memory [GiB]", "reference_kind"] == "measured (resident)"


def test_write_report_leaves_tables_figures_page_and_traces(tmp_path: Path) -> None:
    records = [make_record(c) for c in ("zeropp", "deepspeed_3d")]
    for unit in (2, 4):
        plan = {"plan": records[0].plan | {"unit": unit}}
        knobs = {"pp": 2, "chunks": 2, "unit": unit}
        records.append(make_record(num_gpus=8, contender_knobs=knobs, fields=plan))
    records.append(make_record("fsdp", fields=failed("infeasible", "contender.pp=3: too many")))
    records.append(make_record(attempt="local-2", fields=failed("oom", "rank 0: out of memory")))
    write_records(records, tmp_path / "runs")
    every = Options(timelines=True, pdf=True)
    paths = write_report([tmp_path / "runs"], tmp_path / "out", QUIET, every)
    assert len([path for path in paths.files if path.parent.name == "traces"]) == 3
    assert len([path for path in paths.files if path.match("timeline_*.png")]) == 2
    assert all(path.stat().st_size > 0 for path in paths.files)
    names = {path.name for path in paths.files}
    assert {"report.html", "tables.md", "throughput.csv", "speedup.tex"} <= names
    kinds = "throughput", "loss", "ablation", "speedup_zeropp"
    for suffix in ("png", "pdf"):
        assert {f"{kind}_measured_cpu_gloo.{suffix}" for kind in kinds} <= names
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "contender.pp=3: too many" in page
    attempt = records[-1].record_id  # listed, with its source
    assert f'data-record="{attempt}"' in page
    assert attempt in sources_in(page)
    parquet = pd.read_parquet(tmp_path / "out" / "throughput.parquet")
    csv = pd.read_csv(tmp_path / "out" / "throughput.csv")
    assert list(parquet.columns) == list(csv.columns)
    for name in ("step_s", "step_s_low", "step_s_high", "tokens_per_s_per_gpu"):
        assert csv[name].dtype.kind == "f"
        pd.testing.assert_series_equal(csv[name], parquet[name])
    assert csv["step_s"].notna().sum() == 4


def test_report_of_failures_alone(tmp_path: Path) -> None:
    record = make_record(fields=failed("failed", "rank 0: ValueError: no") | {"ranks": []})
    write_records([record], tmp_path / "runs")
    out = tmp_path / "out"
    with report_folder(out) as last:  # a figure of the last report does not stay
        (last / "speedup_zeropp_measured_cpu_gloo.png").touch()
    paths = write_report([tmp_path / "runs"], out, QUIET)
    assert "rank 0: ValueError: no" in (out / "tables.md").read_text()
    assert not [path for path in paths.files if path.suffix == ".png"]
    assert list(out.glob("*.png")) == []


def test_no_records_is_no_report(tmp_path: Path) -> None:
    assert write_report([tmp_path], tmp_path / "out", QUIET).files == []
    assert not (tmp_path / "out").exists()
    assert best_configuration(load_frame([tmp_path])[0]).empty


def test_a_disk_that_becomes_full_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_records([make_record()], tmp_path / "runs")
    monkeypatch.setattr("benchmarks.report.write.write_table", write)
    words = [str(tmp_path / "runs"), "--table", "throughput", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["report", *words])
    assert main() == 2
    line = f"error: --out={tmp_path / 'out'}: no report: no space left on device\n"
    assert capsys.readouterr().err == line


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_numbers_that_are_not_finite_are_null_and_read_back(tmp_path: Path) -> None:
    check = GateCheck(kind="loss (sgd)", worst="", step=2, error=math.inf, limit=1e-4)
    errors: dict[str, Any] = {
        "loss_error": math.inf,
        "grad_norm_error": math.nan,
        "parameter_error": 1.0,
    }
    gate = GateResult(passed=False, tolerance=1e-4, shape="gpt_tiny", checks=[check], **errors)
    fields = {"gate": gate, "losses": [5.0, math.nan], **failed("failed", "gate")}
    path = tmp_path / "record.json"
    make_record(fields=fields).write(path)
    json.loads(path.read_text(), parse_constant=refuse)
    record = read_record(path)
    assert record.gate is not None
    assert record.gate.words().startswith("gate: loss (sgd) differs")
    assert math.isnan(record.losses[1])


def sources_in(page: str) -> dict[str, Any]:
    packed = page.partition('id="sources">')[2].partition("</script>")[0]
    unpacked: dict[str, Any] = json.loads(
        gzip.decompress(base64.b64decode(packed)), parse_constant=refuse
    )
    return unpacked


def test_the_page_holds_json_whatever_records_hold(tmp_path: Path) -> None:
    """JavaScript's JSON.parse refuses Infinity, and all that stood below it did not run."""
    record = make_record(spans=False)
    path = write_records([record], tmp_path / "runs") / record.record_id / "record.json"
    values = json.loads(path.read_text())
    values["plan"]["odd"] = math.inf  # as an older suite wrote it
    path.write_text(json.dumps(values))
    write_report([tmp_path / "runs"], tmp_path / "out", QUIET)
    page = (tmp_path / "out" / "report.html").read_text()
    assert record.record_id in sources_in(page)


ODD: dict[str, Callable[[dict[str, Any]], None]] = {
    "a step of 0 s": lambda r: r.update(step_s=[0.0, 1.0]),
    "a negative step": lambda r: r.update(step_s=[-1.0] * 7),
    "a plan that is no mapping": lambda r: r["plan"].update(layout="pp=2"),
    "a plan of words": lambda r: r["plan"]["layout"].update(pp="two"),
    "memory of words": lambda r: r["plan"].update(predicted_memory=[{"parameters": "much"}]),
    "an odd date": lambda r: r.update(ended_at="yesterday"),
    "spans of words": lambda r: r.update(spans=[["a"]]),
    "a tolerance of words": lambda r: r["spec"]["measure"].update(gate_tolerance="small"),
    "no layers": lambda r: r["spec"]["model"].update(layers="many"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_leaves_one_record_out(tmp_path: Path, name: str) -> None:
    """Each of them ended the whole report, or all of ``status``, with a traceback."""
    for contender in ("zeropp", "deepspeed_3d"):
        write_records([make_record(contender)], tmp_path)
    path = next(tmp_path.glob("*zeropp*/*/record.json"))
    values = json.loads(path.read_text())
    ODD[name](values)
    path.write_text(json.dumps(values))
    frame, skipped = load_frame([tmp_path])
    rows = latest_ok(frame)
    for table_name in TABLES:
        make_table(table_name, rows)
    assert list(rows["contender"]) == ["deepspeed_3d"]
    (line,) = skipped
    assert line.startswith(f"{path}: ")
    assert "\n" not in line


REASON = "contender.pp=3: the degrees pp=3 x shard=auto must multiply to num_gpus=4"
REASON += " (/a/folder/with/a-long-name/of-an-attempt)"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    records = [make_record(c, num_gpus=n) for c in ("zeropp", "deepspeed_3d") for n in (4, 8)]
    records.append(make_record(attempt="local-2", fields=failed("infeasible", REASON)))
    for unit in (4, 8):
        plan = {"plan": records[0].plan | {"unit": unit}}
        knobs = {"pp": 2, "chunks": 2, "unit": unit}
        records.append(make_record(contender_knobs=knobs, fields=plan))
    knobs = {"pp": 3, "chunks": 2}
    records.append(make_record(contender_knobs=knobs, fields=failed("infeasible", REASON)))
    records.append(make_record(provenance="simulated", attempt="simulate-1", step_s=[0.1]))
    return latest_ok(frame_of(*records, root=tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", TABLES)
def test_no_letter_is_lost(rows: pd.DataFrame, name: str) -> None:
    table = headline_table(rows) if name == "paper" else make_table(name, rows)  # as commands do
    cells = " ".join(cell.text for row in table.grid().rows for cell in row)
    for width in range(60, 180, 8):
        file = io.StringIO()
        print_table(table, Console(file=file, width=width), most=12)
        printed = file.getvalue()
        assert max(map(len, printed.splitlines())) <= width
        if len(table.data) <= 12:
            lost = Counter(cells) - Counter(printed)
            assert {*lost} <= {" ", MISSING, ",", ";"}, width


def test_the_last_line_is_the_path_of_the_page(tmp_path: Path) -> None:
    out = tmp_path / "/".join(["a-folder-with-a-long-name"] * 4)
    file = io.StringIO()
    runs = write_records([make_record()], tmp_path / "runs")
    write_one_table(
        "throughput", [runs], out=out, options=Options(), console=Console(file=file, width=80)
    )
    last = file.getvalue().splitlines()[-1]
    assert last == f"{out / 'throughput.html'} (and 4 other files in its folder)"


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


def test_a_scaling_table_has_settings_of_plans_alone_and_the_largest_gap(tmp_path: Path) -> None:
    records = [
        make_record("zeropp", fields={"plan": {"words": "pp=2", "gap": 0.01}}),
        make_record("fsdp", fields={"plan": {"words": "shard=4", "gap": 0.05}}),
        make_record("deepspeed_3d", fields=failed("oom", "rank 0: out of memory")),
    ]
    table = scaling_table(frame_of(*records, root=tmp_path))
    (line,) = table.numbers.to_dict("records")
    assert "deepspeed_3d_setting" not in line
    assert (line["zeropp_gap"], line["fsdp_plan"]) == (0.01, "shard=4")
    assert column(table, "largest gap") == ["5.0 %"]
