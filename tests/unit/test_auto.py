"""``auto``: the best plan by the tuner, recorded and remembered; simple rules on CPUs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.launch import points
from benchmarks.launch.points import plan_point
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.reading import preset
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.unit.synthetic_records import spec_values
from zeropp.choose.contender import any_auto
from zeropp.price.cluster import Cluster
from zeropp.price.simulator import simulate
from zeropp.types.shape import ModelShape


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def spec_of(cluster: str, name: str, **knobs: object) -> RunSpec:
    values: dict[str, Any] = spec_values() | {"contender": {"name": name, **knobs}}
    machine = preset("cluster", cluster, Cluster)
    return spec_from_mapping(
        values
        | {"cluster": asdict(machine), "precision": "bf16", "microbatch_size": "auto"}
        | {"num_gpus": 4, "global_batch": 8}
    )


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_gets_its_best_plan_and_the_spec_says_which(name: str) -> None:
    spec = spec_of("a800", name)
    point = plan_point(spec)
    assert point.plan is not None, point.reason
    chosen = point.spec
    assert isinstance(chosen.microbatch_size, int)
    assert not any_auto(chosen.contender)
    assert spec_from_mapping(chosen.to_dict()) == chosen
    assert point.note.startswith(f"auto: {CONTENDERS[name].label}, ")
    simple = simulate(spec.plan(), spec.cluster).step_s
    assert simulate(point.plan, spec.cluster).step_s <= simple * 1.02


def test_what_was_chosen_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("a800", "fsdp")
    first, _, gap = points.with_best_plan(spec)
    monkeypatch.setattr(points, "best_of", None)  # asked again, it would fail
    again, line, again_gap = points.with_best_plan(spec)
    assert (again, again_gap) == (first, gap)
    assert "(remembered)" in line
    with pytest.raises(TypeError):
        points.with_best_plan(replace(spec, global_batch=64))


def test_what_is_fixed_is_kept_and_a_closed_spec_stays_as_it_is() -> None:
    spec = spec_of("a800", "zeropp", pp=4, chunks=1, activation_cap=8)
    found, *_ = points.with_best_plan(spec)
    chosen: Any = found
    assert (chosen.contender.pp, chosen.contender.chunks) == (4, 1)
    assert chosen.contender.activation_cap == 8
    assert points.with_best_plan(chosen) == (chosen, "", 0.0)


def test_replicas_that_leave_no_shards_are_chosen_for() -> None:
    """ZeroPP's own search has shards of two ranks and more."""
    chosen, *_ = points.with_best_plan(spec_of("a800", "zeropp", pp=2, replicate=2))
    layout = chosen.plan().layout
    assert (layout.pp, layout.shard, layout.replicate) == (2, 1, 2)


def test_without_prices_simple_rules_apply() -> None:
    spec = spec_of("cpu_gloo", "zeropp")
    chosen, *_ = points.with_best_plan(spec)
    assert chosen == replace(spec, microbatch_size=1)  # a record holds a number
    plan = chosen.plan()
    assert (plan.layout.pp, plan.layout.chunks, plan.microbatch_size) == (2, 2, 1)
    assert plan.schedule.unit == plan.num_microbatches > plan.layout.pp  # nothing hides gathers


def test_where_nothing_fits_the_reason_says_so() -> None:
    spec = spec_of("a800", "zeropp")
    large = preset("model", "gpt_175b", ModelShape)
    wide = replace(large, layers=2, hidden=4 * large.hidden, ffn=4 * large.ffn)
    point = plan_point(replace(spec, model=wide))
    assert point.plan is None
    assert "no choice for what is auto fits 4 x" in point.reason


@pytest.mark.parametrize(
    ("contender", "knob", "asked", "runs"),
    [
        ("fsdp", "context", 2, 1),
        ("megatron_core", "context", 2, 1),
        ("deepspeed_zero3", "compile", True, False),
    ],
)
def test_what_a_trainer_cannot_run_is_simulated_alone(
    contender: str, knob: str, asked: object, runs: object
) -> None:
    spec = spec_of("a800", contender)
    knobs = replace(cast("Any", spec.contender), **{knob: asked})
    wanted = replace(spec, contender=knobs)
    assert "in simulation alone" in plan_point(wanted).reason
    assert plan_point(wanted, simulated=True).plan is not None
    assert getattr(plan_point(spec).spec.contender, knob) == runs


def test_a_run_searches_what_its_trainer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    found = points._search

    def searched(spec: RunSpec) -> Any:
        asked.append(spec.contender)
        return found(spec)

    monkeypatch.setattr(points, "_search", searched)
    spec = spec_of("a800", "fsdp")
    plan_point(spec)
    plan_point(spec, simulated=True)
    assert [knobs.context for knobs in asked] == [1, "auto"]
