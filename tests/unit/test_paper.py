"""The paper's table: from records and from the verdict's plans, in every form."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.report import TABLES, Options
from benchmarks.report.display import Unit, flops_unit, memory_unit, model_label
from benchmarks.report.frame import CELL, latest_ok, load_frame
from benchmarks.report.table import Column, latex, table, write_table
from benchmarks.report.tables import paper_grids, paper_table
from benchmarks.report.write import grids_of, make_table, write_one_table
from benchmarks.specification import SpecError
from tests.unit.synthetic_records import make_record, write_records

REFERENCE = CHECKOUT / "results" / "reference"
COMMITTED = ("claim_33", "demo")
QUIET = Console(quiet=True)
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
    write_records(records, tmp_path)
    (grid,) = paper_grids(paper_table(latest_ok(load_frame([tmp_path])[0])))
    assert [row[0].text for row in grid.rows] == ["GPT tiny", "GPT mini", "GPT 1.5B"]
    assert [name for name, _ in grid.groups] == ["", "ZeroPP", "DeepSpeed 3D"]
    speed = grid.heads.index("tokens/s")
    assert all(row[speed].bold for row in grid.rows)  # synthetic ZeroPP is the faster one
    assert "measured" in grid.title
    assert "measured" not in grid.caption
    assert "GPU" not in " ".join((*grid.heads, grid.caption))  # it was a CPU


def test_a_failure_is_a_word_and_keeps_its_reason(tmp_path: Path) -> None:
    lost = {"status": "oom", "reason": "rank 3: out of memory", "step_s": []}
    write_records([make_record(), make_record("deepspeed_3d", fields=lost)], tmp_path)
    table = paper_table(latest_ok(load_frame([tmp_path])[0]))
    (grid,) = paper_grids(table)
    assert "OOM" in [cell.text for cell in grid.rows[0]]
    assert any("rank 3: out of memory" in note for note in grid.notes)
    assert table.data["speedup"].isna().all()


def test_the_base_can_be_chosen(tmp_path: Path) -> None:
    names = {"zeropp": 1.0, "deepspeed_3d": 2.0, "fsdp": 4.0}
    write_records([make_record(n, step_s=[s] * 6) for n, s in names.items()], tmp_path)
    rows = latest_ok(load_frame([tmp_path])[0])
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
    rows = latest_ok(load_frame([REFERENCE / "claim_33"])[0])
    table = paper_table(rows)
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
    write_records([make_record(name, step_s=steps) for name, steps in times.items()], tmp_path)
    (grid,) = paper_grids(paper_table(latest_ok(load_frame([tmp_path])[0])))
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
    table = paper_table(load_frame([tmp_path])[0])
    csv, parquet, *_ = write_table(table, [], tmp_path)
    assert [pd.read_csv(csv).columns[0], pd.read_parquet(parquet).columns[0]] == ["model"] * 2


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex (Debian's texlive)")
def test_latex_compiles_and_fits_the_text(
    tmp_path: Path, committed: dict[str, dict[str, Path]]
) -> None:
    odd = {"status": "failed", "reason": r"100 % of #1_x & \y{z} ~ ^ é → 你", "step_s": []}
    write_records([make_record(), make_record("fsdp", fields=odd)], tmp_path / "runs")
    tables = (*committed.values(), table_of(tmp_path / "runs", tmp_path / "odd"))
    texts = [files[".tex"].read_text() for files in tables]
    rows = latest_ok(load_frame([tmp_path / "runs"])[0])
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
