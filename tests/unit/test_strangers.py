"""benchmarks.validation.strangers: a source is priced without anything that it taught."""

from __future__ import annotations

import csv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import log

import numpy as np
import pytest

from benchmarks import CHECKOUT
from benchmarks.report import ratio_errors
from benchmarks.report.ratio_errors import (
    FEWEST_PEAKS,
    bounds_of,
    error_text,
    interval_of,
    memory_room,
    priced_runs,
)
from benchmarks.specification.contenders import PRICED
from benchmarks.validation.cases import case_of
from benchmarks.validation.fit_constants import constants, fit, slopes, with_factors
from benchmarks.validation.strangers import (
    StrangerRun,
    as_stranger,
    errors_by_source,
    left_out,
    nearest,
)
from tests.unit.published_cells import predicted, row

ALONE = {"pp": "1", "dp": "8", "schedule": "none"}
OTHERS = frozenset({"megatron_core_r0.8", "llm_foundry", "torchtitan"})


def run(source: str, error: float, quantity: str = "speed") -> StrangerRun:
    return StrangerRun(
        place="a.csv:2", source=source, program="zeropp", priced_as="llm_foundry", device="a100",
        quantity=quantity, in_sample=0.0, stranger=error,
    )  # fmt: skip


def constant(text: str) -> int:
    return [each.text for each in constants()].index(text)


def test_a_program_that_others_run_stays_and_another_is_the_one_with_most_traits_in_common() -> (
    None
):
    assert nearest("torchtitan_compiled", OTHERS) == "torchtitan"
    assert nearest("nemo_h100", OTHERS) == "megatron_core_r0.8"
    published = row(program="megatron_core_r0.8")
    assert as_stranger(published, OTHERS) == ("megatron_core_r0.8", case_of(published))


def test_what_stands_for_a_program_can_run_as_the_row_does() -> None:
    assert as_stranger(row(program="nemo_h100"), OTHERS)[0] == "megatron_core_r0.8"
    assert (
        as_stranger(row(program="nemo_h100", zero="3", **ALONE), OTHERS)[0] != "megatron_core_r0.8"
    )
    assert as_stranger(row(program="modalities", **ALONE), OTHERS)[0] == "llm_foundry"
    assert as_stranger(row(program="modalities"), OTHERS)[0] != "llm_foundry"


def test_a_stranger_keeps_the_traits_that_its_run_switched() -> None:
    for program in ("torchtitan", "torchtitan_compiled"):
        name, case = as_stranger(row(program=f"{program}+gathers_casts=true", **ALONE), OTHERS)
        assert (name, case.program.gathers_casts) == ("torchtitan+gathers_casts=true", True)


def test_a_stranger_keeps_the_year_of_its_kernels() -> None:
    name, case = as_stranger(row(program="nemo_h100"), OTHERS)
    assert (name, case.program.kernels) == ("megatron_core_r0.8", 2025)


def test_constants_are_those_of_conf_and_change_what_has_them_alone() -> None:
    matmul = constants()[constant("a100 matmul_bf16_tflops")]
    case = case_of(row(program="llm_foundry", **ALONE))
    faster = with_factors(case, {matmul: 1.1}).cluster.device
    assert matmul.now == case.cluster.device.matmul_bf16_tflops
    assert faster.matmul_bf16_tflops == pytest.approx(1.1 * matmul.now)
    other = case_of(row(device="h100"))
    assert with_factors(other, {matmul: 1.1}) == other
    later = constants()[constant("h100 newer.matmul_bf16_tflops")]
    newer = with_factors(other, {later: 1.1}).cluster.device.newer
    assert newer is not None
    assert newer.matmul_bf16_tflops == pytest.approx(1.1 * later.now)
    assert with_factors(case, {later: 1.1}) == case


def test_faster_products_make_a_run_faster() -> None:
    _, moved = slopes(row())
    assert 0.3 < moved[constant("a100 matmul_bf16_tflops")] < 1
    assert moved[constant("h100 matmul_bf16_tflops")] == 0


def test_a_fit_takes_the_error_away_and_without_runs_it_is_the_prior() -> None:
    number = constant("a100 matmul_bf16_tflops")
    moved = np.zeros((40, len(constants())))
    moved[:, number] = 0.8
    matmul = constants()[number]
    assert log(fit(np.full(40, 0.04), moved)[matmul]) == pytest.approx(-0.05, abs=0.003)
    nothing = fit(np.zeros(0), moved[:0])
    assert all(value == pytest.approx(c.prior / c.now) for c, value in nothing.items())


def test_a_prior_holds_a_constant_that_few_runs_hardly_depend_on() -> None:
    number = constant("h100 kernel_us")
    moved = np.zeros((5, len(constants())))
    moved[:, number] = -0.06
    kernel = constants()[number]
    assert abs(log(fit(np.full(5, 0.3), moved)[kernel])) < 2 * kernel.width


def test_the_interval_weighs_every_source_alike_and_is_that_of_the_others() -> None:
    many = [run("many", 0.01) for _ in range(90)]
    few = [run("few", error) for error in (-0.3, 0.3)]
    assert interval_of((r.source, r.stranger) for r in [*many, *few]) == 0.3
    assert bounds_of((r.source, r.stranger) for r in [*many, *few]) == (-0.3, 0.3)
    of = {each["source"]: each for each in errors_by_source([*many, *few])}
    assert (of["few"]["low"], of["few"]["high"], of["few"]["inside"]) == (0.01, 0.01, 0)
    assert (of["many"]["low"], of["many"]["high"], of["many"]["inside"]) == (-0.3, 0.3, 1)
    assert of["all sources"]["inside"] == pytest.approx(90 / 92)
    assert (of["few"]["median"], of["few"]["bias"], of["all sources"]["runs"]) == (0.3, 0, 92)


def test_the_interval_leans_to_where_errors_are_and_leaves_vendors_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {"a": [0.6, 0.1], "b": [0.3, 0.1], "NVIDIA's own": [-0.5] * 9}
    runs = [
        {"source": source, "program": "x", "quantity": "speed"}
        | {"stranger": "0", "blind": str(error)}
        for source, of in errors.items()
        for error in of
    ]
    monkeypatch.setattr(ratio_errors, "stranger_runs", lambda: runs)
    assert ratio_errors.measured_over_priced() == pytest.approx((1 / 1.6, 1 / 1.1))
    assert "on 3 sources that it had not seen (1 of them vendors')" in error_text("x", "X")


def test_two_sources_are_priced_by_each_others_programs() -> None:
    known = {
        place: predicted(source=place, program=name, **ALONE)
        for place, name in (("one", "llm_foundry"), ("two", "megatron_core_r0.8"))
    }
    with ThreadPoolExecutor(1) as pool:
        runs, words = left_out(known, pool)
    assert [(r.source, r.priced_as) for r in runs] == [
        ("one", "megatron_core_r0.8"), ("two", "llm_foundry"),
    ]  # fmt: skip
    assert runs[0].in_sample == known["one"].error_of_speed
    assert abs(runs[0].stranger - runs[0].in_sample) > 0.01
    assert words[0] == "0 runs cannot be simulated so"
    assert len(words) == 1 + len(constants())
    alone = [line for line in words if "SERVES ONE SOURCE ALONE: one" in line]
    assert [line.split()[:2] for line in alone] == [
        ["llm_foundry", "attention_factor"],
        ["llm_foundry", "traffic_factor"],
    ]


def test_nine_in_ten_published_peaks_fit_in_the_room_that_plans_leave() -> None:
    """Of every program with enough of them, and of all; each source alike."""
    names = [contender.published_as for contender in PRICED.values()]
    shares = {programs: memory_room(programs).share for programs in names}
    assert len(set(shares.values())) > 3
    for programs, share in shares.items():
        peaks = [run for run in priced_runs() if run["metric"].startswith("peak")]
        own = [run for run in peaks if run["program"] in programs]
        used = own if len(own) >= FEWEST_PEAKS else peaks
        sources = Counter(run["source"] for run in used)
        inside = sum(
            (float(run["value"]) / float(run["predicted"]) <= 1 + share) / sources[run["source"]]
            for run in used
        )
        assert 0.9 - 1e-9 <= inside / len(sources) <= 1.0
    assert 0.05 < max(shares.values()) < 0.2


def test_a_program_has_an_error_of_its_own_if_two_sources_ran_it_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [
        {"source": source, "program": program, "quantity": "speed"}
        | dict.fromkeys(("stranger", "blind"), str(error))
        for program, sources, error in (("often", "ab", 0.03), ("alone", "c", 0.2))
        for source in sources
        for _ in range(12)
    ]
    monkeypatch.setattr(ratio_errors, "stranger_runs", lambda: runs)
    whole = "error 3% in the median on 3 sources that it had not seen (0 of them vendors'); "
    whole += "nine in ten ordinary runs have 0.83 to 0.97 of the simulated speed"
    assert error_text("often", "Often") == f"{whole}; 3% on 24 published runs of Often by 2 sources"
    assert error_text("none", "None") == f"no published run of None: {whole}"
    alone = f"12 published runs of Alone, too few for an error of its own: {whole}"
    assert error_text("alone", "Alone") == alone


def test_the_error_of_a_ratio_is_of_pairs_with_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    same = dict.fromkeys(ratio_errors._SAME, "8") | {"quantity": "speed", "tp": "1"}
    runs = [
        same | {"source": "s", "program": "a", "metric": "time", "value": "2", "stranger": "0.1"},
        same | {"source": "s", "program": "a", "metric": "time", "value": "4", "stranger": "0"},
        same | {"source": "t", "program": "b", "metric": "time", "value": "2", "stranger": "-0.1"},
        same | {"source": "t", "program": "a", "metric": "rate", "value": "9", "stranger": "0"},
    ]
    runs[0]["tp"] = "8"
    monkeypatch.setattr(ratio_errors, "stranger_runs", lambda: runs)
    pairs = ratio_errors.pairs.__wrapped__
    ((_, error, measured),) = pairs(one_program=True)
    assert (error, measured) == pytest.approx((log(1.1), log(2)))
    (_, *first), (_, *second) = pairs(one_program=False)
    assert first == pytest.approx([log(1.1 / 0.9), 0])
    assert second == pytest.approx([-log(0.9), -log(2)])
    assert len(pairs(one_program=True, tensor=True)) == 1
    ((_, *only),) = pairs(one_program=False, tensor=True)  # one with, and one without
    assert only == first


def test_the_committed_table_of_sources_follows_from_the_committed_runs() -> None:
    folder = CHECKOUT / "results" / "reference" / "validation"
    with (folder / "stranger_runs.csv").open(newline="", encoding="utf-8") as file:
        numbers = ("in_sample", "stranger")
        runs = [
            StrangerRun(**{n: float(v) if n in numbers else v for n, v in line.items()})  # type: ignore[arg-type]
            for line in csv.DictReader(file)
        ]
    with (folder / "strangers.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for errors, line in zip(errors_by_source(runs), lines, strict=True):
        assert list(errors) == list(line)
        assert (errors["quantity"], errors["source"], str(errors["runs"])) == (
            line["quantity"], line["source"], line["runs"],
        )  # fmt: skip
        for name in ("median_in_sample", "p90_in_sample", "median", "p90", "bias", "low", "high"):
            assert errors[name] == pytest.approx(float(line[name]), abs=2e-4)
    whole = next(e for e in errors_by_source(runs) if e["source"] == "all sources")
    assert 0.85 < whole["inside"] < 0.95  # what an interval of 90 % promises
