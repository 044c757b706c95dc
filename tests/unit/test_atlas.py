"""The atlas: its cells, what its rows say, its page, and the published pairs beside them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.launch.sweep import spec_of
from benchmarks.records.simulated import BASES, line_of, plan_record, shape_named
from benchmarks.report.atlas_page import cases, ratios_of
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.ratio_errors import factor, need_text
from benchmarks.report.tables import published
from benchmarks.specification import SpecError
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import ATLAS, program_label
from benchmarks.specification.reading import preset
from benchmarks.verdict.atlas import atlas_tables
from benchmarks.verdict.cells import Cell, CellPart, study_spec
from benchmarks.verdict.measured_pairs import (
    _program,
    _published,
    measured_pairs,
    pairs_table,
    tokens_per_s_per_gpu,
)
from zeropp.choose.task import Candidate, Task
from zeropp.price.cluster import Cluster
from zeropp.price.programs import program_names
from zeropp.types.shape import ModelShape

PLANS = {
    "zeropp": (100.0, "shard=64 b=1"),
    "fsdp": (90.0, "shard=64 b=2"),
    "deepspeed_3d": (40.0, "tp=2 pp=8 replicate=4 b=1"),
    "megatron_core_tp1": (70.0, "pp=8 replicate=8 b=1"),
    "megatron_core": (110.0, "tp=8 pp=4 replicate=2 b=2"),
}


def _rows(*cells: dict[str, float | None]) -> pd.DataFrame:
    """The rows of cells, each with some speeds changed."""
    lines: list[dict[str, Any]] = [
        {
            "model": "llama_8b", "cluster": "h100", "num_gpus": 64, "global_batch": 64 * 4**number,
            "bandwidth": 1.0, "contender": name, "mode": "best",
            "tokens_per_s_per_gpu": changed.get(name, speed), "plan": plan,
        }
        for number, changed in enumerate(cells)
        for name, (speed, plan) in PLANS.items()
    ]  # fmt: skip
    lines += [lines[0] | {"contender": name, "tokens_per_s_per_gpu": None, "plan": "no plan fits"}
              for name in ATLAS if name not in PLANS]  # fmt: skip
    return pd.DataFrame(lines)


def _cells(table: str) -> list[list[str]]:
    """The lines below the caption and the heads."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[4:]]


def test_the_experiment_has_every_cell_once() -> None:
    (config,) = compose("config", ["experiment=atlas"])
    cells = study_spec("atlas", config["atlas"]).cells("bf16")
    keys = {(cell.key, cell.task.precision) for cell in cells}
    assert len(keys) == len(cells) > 50
    sequences = {cell.task.shape.name: cell.task.shape.seq for cell in cells}
    assert (sequences["llama_405b"], sequences["llama_70b_32k"]) == (8192, 32768)
    assert {cell.bandwidth for cell in cells} == {1.0, 0.25}


def test_a_model_at_another_sequence_has_a_name_that_is_read_again() -> None:
    assert shape_named("llama_8b").seq == 8192
    long = shape_named("llama_8b_32k")
    assert (long.name, long.seq, long.layers) == ("llama_8b_32k", 32768, 32)
    with pytest.raises(SpecError, match=r"^model='llama_9b': no such preset"):
        shape_named("llama_9b_32k")


@pytest.mark.parametrize(
    ("zeropp", "fsdp", "cells"),
    [
        (100.0, 90.0, ["0", "1", "1", "0", "0", "0", "0.91 (0.91 to 0.91)"]),
        (108.0, 90.0, ["0", "0", "0", "0", "0", "0", "0.98 (0.98 to 0.98)"]),
        (140.0, 90.0, ["0", "0", "0", "0", "1", "0", "1.27 (1.27 to 1.27)"]),
        (80.0, None, ["0", "1", "1", "1", "0", "0", "0.73 (0.73 to 0.73)"]),
        (None, None, ["1", "1", "1", "1", "0", "0", "0.00 (0.00 to 0.00)"]),
    ],
)
def test_tensor_parallelism_is_needed_for_memory_or_speed(
    zeropp: float | None, fsdp: float | None, cells: list[str]
) -> None:
    changed = {"zeropp": zeropp, "fsdp": fsdp}
    if zeropp is None:
        changed["megatron_core_tp1"] = None
    (line,) = _cells(atlas_tables(_rows(changed))["need"])
    assert line == ["Llama 8B on H100", "1", *cells]


def test_a_search_without_tensor_parallelism_in_its_best_plan_bounds_the_ratio() -> None:
    """Megatron-Core's best plan of all is without it, so its best with it is no faster; the row
    that was searched with it alone says how fast."""
    rows = _rows({"zeropp": 130.0})
    is_core = rows["contender"] == "megatron_core"
    rows.loc[is_core, "plan"] = "pp=4 replicate=16 b=2"
    assert ratios_of(rows)["without"] == pytest.approx(130 / 110)
    assert ratios_of(rows)["bound"]
    line = rows[is_core].assign(contender="megatron_core_tp", plan="tp=2 pp=4 b=2")
    apart = pd.concat([rows[~is_core], line.assign(tokens_per_s_per_gpu=105.0)])
    found = ratios_of(apart)
    assert (found["without"], found["core"]) == pytest.approx((130 / 105, 70 / 105))
    assert not found["bound"]
    cut = apart.assign(gap=0.0)
    cut.loc[cut["contender"] == "megatron_core_tp", "gap"] = 0.03
    assert (found["cut"], ratios_of(cut)["cut"]) == (False, True)
    late = apart.assign(gap=0.0)
    late.loc[late["contender"] == "deepspeed_3d", "gap"] = 0.5  # it would still not be the fastest
    assert not ratios_of(late)["cut"]


def test_shared_cards_and_shared_sequences_are_lines_of_their_own() -> None:
    rows = _rows({}, {"zeropp": 220.0}, {"zeropp": 330.0})
    batch = rows["global_batch"]
    rows.loc[batch == 256, "cluster"] = "h100_one_nic"
    rows.loc[batch == 1024, "global_batch"] = 32
    tables = atlas_tables(rows)
    assert [(line[0], line[-1]) for line in _cells(tables["need"])] == [
        ("Llama 8B on H100", "0.91 (0.91 to 0.91)"),
        ("Llama 8B on H100, GPUs share cards", "2.00 (2.00 to 2.00)"),
        ("Llama 8B on H100, less than a sequence per GPU", "3.00 (3.00 to 3.00)"),
    ]
    assert tables["llama_8b_bf16"] == "0.91"


def test_both_settings_have_a_table_and_that_of_users_is_the_first() -> None:
    rows = _rows({})
    own = rows.assign(mode="own", tokens_per_s_per_gpu=2 * rows["tokens_per_s_per_gpu"])
    tables = atlas_tables(pd.concat([rows, own]))
    assert re.findall(r"^(As users|Equal settings)", tables["need"], re.MULTILINE) == [
        "As users", "Equal settings",
    ]  # fmt: skip
    rows.loc[rows["contender"] == "zeropp", "tokens_per_s_per_gpu"] *= 10
    again = atlas_tables(pd.concat([rows, own]))
    assert again["brief"] == tables["brief"]
    assert again["equal"] != tables["equal"]


def test_a_program_is_first_by_all_of_its_rows() -> None:
    """DeepSpeed and Megatron-Core have two each; a cell counts beyond the errors only where the
    next program is further away."""
    reach = factor(one_program=False, tensor=True)
    rows = _rows({}, {"megatron_core": 100.0 * 1.01 * reach}, {"zeropp": 1000.0})
    rows.loc[rows["global_batch"] == 64, "plan"] += " 4 blocks per rank offloaded"
    tables = atlas_tables(rows)
    assert (tables["cells"], tables["without_fits"], tables["slower"]) == ("3", "2", "1")
    assert tables["without_slower"] == tables["without_fsdp_slower"] == "2"
    lines = {line[0]: line[1:] for line in _cells(tables["first"])}
    assert lines["Megatron-Core"] == ["67%", "67%", "33%", "3"]
    assert lines["ZeroPP"] == ["33%", "33%", "33%", "3"]
    assert lines["Megatron-FSDP"] == ["0%", "0%", "0%", "0"]


def test_how_the_answer_moves_is_told_by_batch() -> None:
    lines = _cells(atlas_tables(_rows({}, {"zeropp": 220.0}))["moves"])
    assert lines[0] == ["sequences per GPU", "1", "1", "0.91", "0.64", "0.91", "1.11"]
    assert lines[1] == ["sequences per GPU", "4", "1", "2.00", "0.64", "2.00", "2.44"]
    assert lines[-1][:3] == ["cluster", "H100", "2"]


def test_rows_of_one_program_have_one_name() -> None:
    names = {program_label(name) for name in ("deepspeed_3d", "deepspeed_best", "deepspeed_zero3")}
    assert names == {"DeepSpeed"}
    assert program_label("megatron_core_tp1") == program_label("megatron_core") == "Megatron-Core"


def test_a_pair_has_equal_work_on_both_sides() -> None:
    pairs = measured_pairs()
    assert len(pairs) > 20
    other = pairs[0].without.model_copy(update={"metric": "mfu", "unit": "%"})
    assert math.isnan(tokens_per_s_per_gpu(other))  # its metric needs a count of FLOPs
    for pair in pairs:
        a, b = pair.without, pair.tensor
        assert (a.tp, a.hidden, a.device, a.num_gpus, a.seq) == (
            1, b.hidden, b.device, b.num_gpus, b.seq,
        )  # fmt: skip
        assert b.tp > 1
    equal = [p for p in pairs if p.without.global_batch == p.tensor.global_batch]
    assert len(equal) > 0.6 * len(pairs)
    groups = {(p.without.layers, p.without.hidden, p.without.ffn, p.without.device,
               p.without.num_gpus, p.without.seq) for p in pairs}  # fmt: skip
    sides: defaultdict[tuple[object, ...], set[bool]] = defaultdict(set)
    for row, _ in _published():
        if tokens_per_s_per_gpu(row) > 0 and row.dtype in ("bf16", "fp16"):
            key = (row.layers, row.hidden, row.ffn, row.device, row.num_gpus, row.seq)
            sides[key].add(row.tp > 1)
    assert {key for key, of in sides.items() if len(of) == 2} <= groups  # none is left out


def test_a_pair_of_one_program_is_of_one_source_and_has_a_simulated_ratio() -> None:
    pairs = measured_pairs(one_program=True)
    assert len(pairs) > 15
    assert {(p.without.program, p.without.source) for p in pairs} == {
        (p.tensor.program, p.tensor.source) for p in pairs
    }
    priced = [abs(math.log(p.simulated / p.ratio)) for p in pairs if not math.isnan(p.simulated)]
    assert len(priced) > 15
    assert sorted(priced)[len(priced) // 2] < 0.1


def test_programs_of_pairs_have_names_that_people_read() -> None:
    named = {_program(row) for pair in measured_pairs() for row in (pair.without, pair.tensor)}
    assert {"NeMo AutoModel", "MaxText of 2024", "Megatron-Core r0.6.0 of 2024"} <= named
    assert [name for name in named if name in program_names() or len(name) > 35] == []
    heads = pairs_table("all").splitlines()[1]
    assert heads == "| --- | --- |" + " ---: |" * 4 + " --- | --- | ---: | ---: |"


def _records(out: Path) -> pd.DataFrame:
    """A small model on two numbers of GPUs, by three rows of the atlas; one has no plan."""
    lines = []
    for gpus in (4, 8):
        for name in ("fsdp", "deepspeed_best", "megatron_core_tp1"):
            task = Task(
                shape=preset("model", "gpt_1_5b", ModelShape),
                cluster=preset("cluster", "h100", Cluster),
                num_gpus=gpus,
                global_batch=2 * gpus,
            )
            cell = Cell(task, 0.25)
            if (name, gpus) == ("fsdp", 8):
                none = plan_record(task, name, BASES["best"], bandwidth=0.25, words="no plan fits")
                lines.append(line_of(none))
            else:
                lines += CellPart(cell, name, "best", 0.3).lines("", [])
    pd.DataFrame(lines).to_csv(out / "plans.csv", index=False)
    return latest_ok(load_frame([out])[0])


def test_the_page_has_every_case_with_its_command(tmp_path: Path) -> None:
    found = cases(_records(tmp_path)).to_dict("records")
    lines = {(case["num_gpus"], case["contender"]): case for case in found}
    assert {line["cluster"] for line in lines.values()} == {"H100, 0.25 × its network"}
    assert lines.pop(("8", "FSDP2"))["text"] == "FSDP2\nno plan fits"
    assert len(lines) == 5
    for (gpus, label), line in lines.items():
        program, verb, *words = line["command"].split()
        assert (program, verb) == ("zeropp", "run"), label
        (config,) = compose("config", words)
        spec = spec_of(config)
        assert (spec.num_gpus, spec.global_batch) == (int(gpus), 2 * int(gpus))
        assert spec.plan().contender == spec.contender.name
        assert spec.cluster.inter.bandwidth_gb_s == 12.5  # a quarter of the preset's
        assert line["low"] < line["speed"] < line["high"]


def test_scaling_has_the_papers_numbers_without_recomputation() -> None:
    """Its two columns of Table 2 agree: days = 8 x tokens x parameters / (GPUs x FLOP/s)."""
    runs = published().to_dict("records")
    (first,) = (run for run in runs if (run["layers"], run["num_gpus"]) == (24, 32))
    assert 0.75 < first["tflops"] / first["value"] < 0.77  # 3 passes of a block for 4, and the head
    timed = [run for run in runs if run["days_for_300b_tokens"] > 0]
    assert len(timed) == 12
    for run in timed:
        parameters = {96: 174.6e9, 105: 529.6e9}[run["layers"]]
        seconds = 8 * 300e9 * parameters / (run["num_gpus"] * run["value"] * 1e12)
        assert run["days_for_300b_tokens"] == pytest.approx(seconds / 86400, rel=0.05), run


@pytest.mark.parametrize("name", ["weak_scaling", "strong_scaling"])
def test_points_of_scaling_run_with_every_contender(name: str) -> None:
    words = [f"experiment={name}", "cluster=a100", "contender=fsdp,megatron_core"]
    configs = compose("config", words)
    assert {c["contender"]["name"] for c in configs} == {"fsdp", "megatron_core"}
    sizes = {(c["model"]["layers"], c["model"]["hidden"], c["num_gpus"], c["global_batch"])
             for c in configs}  # fmt: skip
    assert len(configs) == 2 * len(sizes)
    table = published()
    table = table[table["table"].str.startswith({"w": "Table 1", "s": "Table 2"}[name[0]])]
    rows = table[["layers", "hidden", "num_gpus", "global_batch"]]
    assert {*rows.itertuples(index=False, name=None)} <= sizes


@pytest.mark.parametrize(
    ("gpus", "offloaded", "slices", "millions"),
    [
        *((1, 0, 1, 0.01), (8, 0, 1, 0.664), (8, 32, 1, 0.983)),
        *((32, 0, 1, 3.015), (32, 32, 1, 4.457)),
        *((1, 32, 8, 0.01), (8, 0, 8, 1.033), (8, 32, 8, 1.95)),
        *((32, 0, 8, 4.588), (32, 32, 8, 8.782)),
    ],
)
def test_the_longest_sequences_are_those_of_docs_scaling(
    gpus: int, offloaded: int, slices: int, millions: float
) -> None:
    cluster, llama = preset("cluster", "h100", Cluster), preset("model", "llama_8b", ModelShape)

    def gib(share: float) -> float:
        tokens = 1024 * gpus * max(1, int(share * millions * 1e6 / 1024 / gpus))
        shape = replace(llama, seq=tokens)
        task = Task(shape=shape, cluster=cluster, num_gpus=gpus, global_batch=1)
        knobs = ZeroppKnobs(
            pp=1,
            context=gpus,
            shard=1,
            replicate=1,
            chunks=34,
            recompute="full",
            compile=True,
            offload_blocks=offloaded,
            logits_slices=slices,
        )
        return ZEROPP.simulated(task, Candidate(knobs, 1)).peak_bytes / 2**30

    most = cluster.device.usable_bytes / 2**30
    assert gpus == 1 or gib(1.0) < most
    assert gib(1.02) > (most if gpus > 1 else 1.5 * most)


def test_a_case_whose_two_plans_are_of_one_program_has_that_programs_error() -> None:
    """The table, the numbers of sentences and the page's answer have one error."""
    one, two = (factor(one_program=name, tensor=True) for name in (True, False))
    between = 110.0 / ((one + two) / 2)
    core: dict[str, float | None] = {"zeropp": None, "fsdp": None, "megatron_core_tp1": between}
    zeropp: dict[str, float | None] = {"zeropp": between}
    for changed, beyond in ((core, "1"), (zeropp, "0")):
        tables = atlas_tables(_rows(changed))
        assert tables["slower"] == _cells(tables["need"])[0][5] == beyond
        ratios = ratios_of(_rows(changed))
        answer = need_text(ratios["without"], one_program=ratios["one_program"])
        assert answer.startswith("Yes") == (beyond == "1")
