"""The engine on virtual streams: nothing races, numbers are those without emulation, and every
fault that is put into it is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gloo.world import World
from tests.streams.cases import CASES
from tests.streams.emulation import Case, Found, run_case
from tests.streams.faults import CONTROLS, FAULTS
from zeropp.verify.rendezvous import hanging_waits, mismatches, stuck


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks to run functions on; see ``World.run``."""
    with World(4) as world:
        yield world


def faults_of(found: list[Found]) -> set[str]:
    return {fault for one in found for fault in one.faults}


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_nothing_races_and_everything_ends(case: Case, world: World, tmp_path: Path) -> None:
    plain = world.run(run_case, case, False, None, str(tmp_path / "plain"), size=case.ranks)
    found = world.run(run_case, case, True, None, str(tmp_path / "emulated"), size=case.ranks)
    assert faults_of(found) == set()
    assert [one.numbers for one in found] == [one.numbers for one in plain]
    logs = {rank: one.log for rank, one in enumerate(found)}
    assert mismatches(logs) == []
    assert stuck(logs) == {}
    assert stuck(logs, resident=3, seed=1) == {}
    assert {rank: hanging_waits(logs, rank) for rank in logs} == {rank: [] for rank in logs}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, world: World, tmp_path: Path) -> None:
    case = CASES[FAULTS[name][1]]
    found = world.run(run_case, case, True, name, str(tmp_path), size=case.ranks)
    assert faults_of(found)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_no_fault_is_not_found(name: str, world: World, tmp_path: Path) -> None:
    case = CASES[CONTROLS[name][1]]
    found = world.run(run_case, case, True, name, str(tmp_path), size=case.ranks)
    assert faults_of(found) == set()
