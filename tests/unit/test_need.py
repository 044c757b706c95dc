"""The last lines of ``zeropp tune`` and ``explain``: whether a case needs tensor parallelism."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.explain.need import need_lines
from benchmarks.records.simulated import shape_named
from benchmarks.report import searches
from benchmarks.report.network import network_answer, network_steps
from benchmarks.report.ratio_errors import factor, need_text
from benchmarks.report.searches import Best, _atlas, atlas_plans, best_of, search_rows
from benchmarks.specification.compose import compose
from benchmarks.specification.contenders import ATLAS, ROWS, candidate_in
from benchmarks.specification.reading import beside_preset, flat, preset
from benchmarks.tune.best_plans import checked, print_commands
from tests.unit.simulated_task import task
from zeropp.choose.space import SearchPoint
from zeropp.choose.task import Task
from zeropp.price.cluster import Cluster
from zeropp.types.layout import Layout
from zeropp.types.shape import ModelShape

SHAPE = replace(task().shape, layers=8, hidden=2048, heads=16, kv_heads=16, ffn=8192)
SMALL = replace(task(8, 16), shape=SHAPE)
NAMES = ("fsdp", "megatron_core_tp1", "megatron_core_tp")


@cache
def found() -> tuple[Best, ...]:
    return tuple(best_of(SMALL, ROWS[name], tolerance=0.05, runner_up=False) for name in NAMES)


def lines(bests: Iterable[Best], what: Task = SMALL) -> list[str]:
    return [*need_lines(what, [*bests])]


def test_the_fastest_of_both_sides_are_compared_and_may_exceed_one() -> None:
    sides = {best.name: best.winner for best in found() if best.winner is not None}
    assert len(sides) == len(NAMES)
    having = sides["megatron_core_tp"]
    lacking = min((sides[name] for name in NAMES[:2]), key=lambda of: of.step_s)
    assert (having.plan.layout.tp > 1, lacking.plan.layout.tp) == (True, 1)
    told = lines(found())
    ratio = having.step_s / lacking.step_s
    assert ratio > 1  # a model this small
    assert f"Speed without over with: {ratio:.2f} [" in told[2]
    own = having.step_s / sides["megatron_core_tp1"].step_s
    assert f"Megatron-Core {own:.2f} [" in told[3]
    assert "faster" not in told[3]
    assert told[-1].startswith("Do you need tensor parallelism here? ")


def test_what_decides_is_said_of_one_program_of_the_host_and_of_the_network() -> None:
    asked = {"megatron_core_tp": {"tp": 8}, "fsdp": {"offload_blocks": 4}}
    slow, host = (best_of(SMALL, ROWS[name], asked=replace(ROWS[name].contender.knobs(), **knobs))
                  for name, knobs in asked.items())  # fmt: skip
    assert "(faster without it)" in lines([*found()[:2], slow])[3]
    assert " of 230 GiB of its host per GPU." in lines([host])[0]
    nodes = replace(SMALL, cluster=replace(SMALL.cluster, name="halves", gpus_per_node=4))
    apart = [replace(best, outcome=replace(best.outcome, task=nodes)) for best in found()]
    steps = [(network_steps(of.outcome.contender, nodes, of.winner.candidate) or (0.0,))[0]
             for of in apart if of.winner]  # fmt: skip
    assert f" over with it {steps[2] / min(steps[:2]):.2f}); at 96%" in network_answer(apart)


def test_the_answer_is_yes_no_or_cannot_be_told() -> None:
    reach = factor(one_program=False, tensor=True)
    assert factor(one_program=False) < reach
    for ratio, word in ((0.0, "Yes"), (0.99 / reach, "Yes"), (1.01 / reach, "Cannot"),
                        (0.99 * reach, "Cannot"), (1.01 * reach, "No"), (float("inf"), "No"),
                        (float("nan"), "Cannot")):  # fmt: skip
        assert need_text(ratio, one_program=False).startswith(word), ratio


def test_a_search_that_was_cut_answers_nothing() -> None:
    cut = replace(found()[0], searched=(replace(found()[0].outcome, bound_s=0.0),))
    (*told, last) = lines([cut, *found()[1:]])
    assert "here? For memory, no. For speed: Cannot be told, as a search was cut. Cut: " in last
    assert "Cut: FSDP2 (" in last
    assert not any(line.startswith("Speed without over with") for line in told)
    slower_s = max(best.outcome.winner.step_s for best in found()[::2] if best.outcome.winner)
    late = replace(found()[1].outcome, bound_s=slower_s)  # it would not be the fastest
    (*told, last) = lines([found()[0], replace(found()[1], searched=(late,)), found()[2]])
    assert "as a search was cut" not in last
    assert any(line.startswith("Speed without over with") for line in told)
    early = replace(found()[1], searched=(replace(late, bound_s=0.0),))
    own = next(line for line in lines([early, found()[2]]) if line.startswith("Of one program"))
    assert own.endswith(" (a search was cut).")
    none = replace(found()[0].outcome, winner=None, is_complete=False, bound_s=0.0)
    unknown = replace(found()[0], outcome=none, searched=(none,))
    for bests, missing in (([unknown, *found()[1:]], []), (found(), ["ZeroPP"])):
        (*told, last) = need_lines(SMALL, bests, missing)
        assert "Cannot be told, as a search was cut" in last
        assert not any(line.startswith("Speed without over with") for line in told)


def test_without_a_program_that_may_have_it_nothing_is_said() -> None:
    (*_, last) = lines(found()[:1])
    assert last.endswith("Cannot be told: no program that may have it was searched.")


def test_published_runs_of_the_very_case_are_named() -> None:
    case = replace(
        task(), shape=shape_named("llama_405b"), cluster=preset("cluster", "h100", Cluster),
        num_gpus=512, global_batch=256,
    )  # fmt: skip
    (run, answer) = lines([], case)
    assert run.split(" (")[0] == (
        "Published run of this case: nemo_h100 tp=8 pp=8 cp=2 zero1, 207 tokens/s/GPU measured, "
        "214 simulated"
    )
    assert answer.endswith("Cannot be told: no plan fits.")
    near = replace(case, shape=shape_named("llama_8b"), num_gpus=16, global_batch=64)
    assert [line.partition(":")[0] for line in lines([], near)[:-1]] == [
        *(f"Nearest published run (16 GPUs, batch {batch})" for batch in (256, 512)),
        "These runs without tensor parallelism and with it are no pair",
    ]
    assert len(lines([], replace(near, cluster=preset("cluster", "h100_one_nic", Cluster)))) == 1


def test_ctrl_c_keeps_what_has_been_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def tell(best: Best) -> None:
        told.append(best.name)
        raise KeyboardInterrupt

    given: dict[str, Any] = {"tolerance": 0.05}
    bests = search_rows(SMALL, ["megatron_core_tp", "fsdp"], 5.0, tell, **given)
    assert [best.name for best in bests] == told
    assert len(told) == 1  # whichever has ended first
    assert bests[0].winner is not None
    monkeypatch.setattr(searches, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        search_rows(SMALL, ["fsdp"], 5.0, **given)


def test_the_longest_search_has_a_core_of_its_own_and_all_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shares(cores: int, *, is_complete: bool = True) -> list[tuple[str, int]]:
        outcome = replace(found()[0].outcome, is_complete=is_complete)
        begun: list[tuple[str, int]] = []

        def submit(_: object, name: str, rounds: int, before: object = None) -> Future[Any]:
            begun.append((name, rounds))
            assert before in (None, outcome.winner)
            result = Future[Any]()
            result.set_result(replace(found()[0], searched=(outcome,)))
            return result

        pool = SimpleNamespace(submit=submit)
        monkeypatch.setattr("os.cpu_count", lambda: cores)
        monkeypatch.setattr(searches, "workers", lambda *_: nullcontext(pool))
        search_rows(SMALL, names, 5.0, beside=lambda: begun.append(("meanwhile", 0)))
        assert begun.pop(len(names)) == ("meanwhile", 0)  # all searches have begun
        return begun

    names = ["zeropp", "fsdp", "megatron_fsdp", "torchtitan_tp"]
    assert shares(1) == [("megatron_fsdp", 4), ("fsdp", 3), ("torchtitan_tp", 2), ("zeropp", 1)]
    assert shares(2) == [("zeropp", 1), ("megatron_fsdp", 3), ("fsdp", 2), ("torchtitan_tp", 1)]
    assert [rounds for _, rounds in shares(3)] == [1, 2, 1, 1]
    assert [rounds for _, rounds in shares(8)] == [1, 1, 1, 1]
    # Once more, where each has more time than before.
    again = [shares(cores, is_complete=False)[4:] for cores in (1, 2)]
    assert again == [[], [(name, 2) for name, _ in shares(2)]]


def test_a_search_begins_with_plans_of_the_atlas_of_the_same_model() -> None:
    named = replace(shape_named("llama_8b"), name="someones")  # equal sizes are the same model
    h100 = preset("cluster", "h100", Cluster)
    case = Task(shape=named, cluster=h100, num_gpus=64, global_batch=64)
    first, *others = atlas_plans(case, "fsdp", "equal")
    (own,) = [c for c in _atlas() if (c["model"], c["cluster"], c["num_gpus"], c["global_batch"])
              == ("llama_8b", "h100", "64", "64") and c["mode"] == "best" and c["bandwidth"] == "1"
              and (c["contender"], c["precision"]) == ("fsdp", "bf16")]  # fmt: skip
    values = json.loads(own["setting"])
    assert first == candidate_in("fsdp", values["knobs"], values["microbatch_size"])[2]
    assert 0 < len(others) < 6
    assert first not in others
    assert atlas_plans(replace(case, shape=replace(named, layers=31)), "fsdp", "users") == []
    assert atlas_plans(replace(case, precision="fp32"), "fsdp", "users") == []
    large = replace(case, shape=shape_named("llama_70b"), num_gpus=512, global_batch=512)
    known = atlas_plans(large, "zeropp", "users")[0]
    best = searches._best_of_row(large, "zeropp", 1, ends_s=0.0, tolerance=0.01)  # cut at once
    assert best.winner is not None
    assert best.winner.step_s <= best.outcome.contender.simulated(large, known).step_s


def test_every_program_of_the_atlas_has_both_sides_or_one() -> None:
    names = {name.removesuffix("_tp1").removesuffix("_tp") for name in ATLAS}
    assert names == {"zeropp", "fsdp", "megatron_fsdp", "deepspeed", "torchtitan", "megatron_core"}
    for name, row in ATLAS.items():
        tensor = {any(row.searched[0].space.families(
                      SearchPoint(task(8), row.contender.knobs(), Layout(tp=tp), 256)))
                  for tp in (1, 8) if row.contender.space.tensor}  # fmt: skip
        assert tensor in ({True, False}, set()), name


def test_a_command_says_what_differs_from_the_presets() -> None:
    small = replace(preset("model", "llama_8b", ModelShape), seq=512)
    assert [*flat(beside_preset("model", small), "model")] == ["model.seq=512"]
    cluster = preset("cluster", "h100", Cluster)
    assert beside_preset("cluster", cluster) == {}
    slow = replace(cluster, host=None, device=replace(cluster.device, memory_gib=70))
    words = [*flat(beside_preset("cluster", slow), "cluster")]
    assert words == ["cluster.device.memory_gib=70", "cluster.host=null"]
    assert beside_preset("model", replace(small, name="another")) == {}


def test_the_commands_of_winners_are_of_the_case_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=llama_8b", "model.seq=4096", "cluster=h100", "num_gpus=8", "global_batch=16"]
    (config,) = compose("tune", [*words, "contenders=fsdp"])
    spec = checked(config)
    print_commands(spec, [*found()[:1]])
    assert "zeropp run model=llama_8b cluster=h100" in (told := capsys.readouterr().out)
    assert " model.seq=4096 contender=fsdp" in told
    print_commands(replace(spec, out=str(tmp_path)), [*found()[:1]])
    assert "model:\n  seq: 4096\n" in (tmp_path / "experiment" / "best_fsdp.yaml").read_text()
