"""The registry of programs: sources, and one entry for whoever prices a plan."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.specification.contenders import CONTENDERS, PRICED
from tests.unit.simulated_task import cluster, task
from zeropp.choose.task import Candidate
from zeropp.price.cluster import NEWEST
from zeropp.price.programs import (
    Program,
    ProgramEntry,
    entry_name,
    entry_named,
    entry_of,
    gathers,
    program_named,
    program_names,
)
from zeropp.schedule.program import Op
from zeropp.types.literals import Precision

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAMS = pytest.mark.parametrize("name", program_names())


@PROGRAMS
def test_every_value_has_the_type_of_its_trait(name: str) -> None:
    """The library reads the files without pydantic, and so without a check of the values."""
    program = program_named(name)
    assert TypeAdapter(Program).validate_python(asdict(program)) == program


@PROGRAMS
def test_every_trait_that_is_stated_has_a_source(name: str) -> None:
    entry = entry_named(name)
    assert entry.version
    assert {"bf16", "fp32"} <= set(entry.stated) <= set(entry.sources)
    assert all(len(source) > 10 for source in entry.sources.values())
    assert set(entry.sources) <= {trait.name for trait in fields(Program)}


def test_a_source_speaks_of_one_value_of_a_trait() -> None:
    """No entry has taken over the source of a value that it changed."""
    values: dict[tuple[str, str], list[tuple[str, object]]] = defaultdict(list)
    for name in program_names():
        entry = entry_named(name)
        for trait, source in entry.sources.items():
            values[trait, source].append((name, getattr(entry.program, trait)))
    assert any(len(found) > 1 for found in values.values())
    for key, found in values.items():
        assert len({value for _, value in found}) == 1, (key, found)


def test_an_entry_takes_over_no_source_of_a_trait_that_it_changes() -> None:
    foundry = entry_named("llm_foundry")

    def other(**traits: dict[str, object]) -> ProgramEntry:
        file = {"version": "a version", "based_on": "llm_foundry", "traits": traits}
        return entry_of("other", file)

    assert "fused_loss" in foundry.sources
    default = other(fused_loss={"value": False})
    assert set(foundry.sources) - set(default.sources) == {"fused_loss"}
    with pytest.raises(ValueError, match="program='other': no source for attention_factor"):
        other(attention_factor={"value": 0.9})
    stated = other(attention_factor={"value": 0.9, "source": "its paper"})
    assert stated.sources["attention_factor"] == "its paper"
    with pytest.raises(ValueError, match="program='other': unknown trait flush"):
        other(flush={"value": True})


def test_no_price_and_no_simulation_depends_on_a_name() -> None:
    names = {*program_names(), *PRICED, "megatron", "deepspeed", "published"}
    files = list((CHECKOUT / "zeropp/price").glob("*.py"))
    assert len(files) > 8
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{path.name}:{node.lineno}: {node.value!r}"
            if isinstance(node, ast.Compare):
                sides = ast.unparse(node)
                assert "contender" not in sides, f"{path.name}:{node.lineno}: {sides}"


def test_tuner_and_contenders_price_registered_programs() -> None:
    for name, contender in PRICED.items():
        program = contender.size(task(), contender.knobs(), 1).program.partition("+")[0]
        assert program in program_names()
        alike = {c.name for c in CONTENDERS.values() if c.trainer == contender.trainer}
        assert program in alike or name not in CONTENDERS  # what runs is what is priced


@pytest.mark.parametrize(("shard", "precision"), [*product((1, 4), ("fp32", "bf16"))])
def test_zeropps_programs_gather_where_its_prices_do(shard: int, precision: Precision) -> None:
    knobs = ZeroppKnobs(pp=2, shard=shard, replicate=1, chunks=1, unit=2)
    plan = ZEROPP.plan(replace(task(2 * shard), precision=precision), Candidate(knobs, 1))
    gathered = any(action.op is Op.UNSHARD for action in plan.schedule.programs[0])
    assert gathered == gathers(plan)


def test_a_stock_program_is_the_entry_of_that_name_without_what_it_states_itself() -> None:
    assert entry_name("megatron_core", stock=True) == "megatron_core_stock"
    assert entry_name("megatron_core", stock=False) == "megatron_core"
    assert entry_name("zeropp", stock=True) == "zeropp"  # nothing to tune
    tuned = "torchtitan_3d+loss_gradient=sliced+torch_stages=false"
    assert entry_name(tuned, stock=True) == "torchtitan_3d_stock+torch_stages=false"


@pytest.mark.parametrize("name", [name for name in program_names() if name.endswith("_stock")])
def test_a_stock_program_is_slower_than_the_tuned_one_and_hides_less(name: str) -> None:
    stock, tuned = program_named(name), program_named(name.removesuffix("_stock"))
    assert stock.launch_factor > tuned.launch_factor
    assert (stock.overlap_tensor, stock.fused_loss) == (False, False)
    assert (tuned.overlap_tensor, tuned.fused_loss) == (True, True)


def test_flash_attention_2_gains_nothing_from_newer_devices() -> None:
    stock = program_named("torchtitan_3d_stock")
    rates = {}
    for name in ("a100", "h100", "b200"):
        device = cluster(name).device.of_year(NEWEST)
        gain = stock.attention_gain(device)
        rates[name] = gain * device.matmul_bf16_tflops * device.attention_efficiency
        assert gain <= 1
    assert rates["h100"] == rates["b200"] == pytest.approx(298)
    assert rates["a100"] < 298
