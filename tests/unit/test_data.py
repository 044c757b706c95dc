"""Batches: deterministic, the same for every topology, refused before anything starts."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from benchmarks.worker.data import check_data, open_batches
from tests.unit.toy_spec import mapping

KJV = "benchmarks/worker/kjv_genesis_psalms.txt"


def spec(**data: Any) -> RunSpec:
    return spec_from_mapping(mapping() | {"data": data})


def write_megatron(prefix: Path, tokens: Any, code: int) -> None:
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 1)
    prefix.with_name(prefix.name + ".idx").write_bytes(index + struct.pack("<iq", len(tokens), 0))
    tokens.tofile(prefix.with_name(prefix.name + ".bin"))


def test_targets_are_the_next_bytes_of_the_text() -> None:
    source = open_batches(spec(kind="text", path=KJV))
    inputs, targets = source.batch(3)
    assert inputs.shape == targets.shape == (8, 32)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    text = Path(KJV).read_bytes()
    assert bytes(inputs[0].astype(np.uint8)) in text


@pytest.mark.parametrize("kind", ["text", "synthetic"])
def test_shards_of_any_topology_make_up_the_same_batch(kind: str) -> None:
    source = open_batches(spec(kind=kind, path=KJV))
    whole = source.batch(5)
    for count in (1, 2, 4, 8):
        parts = [source.shard(5, index, count) for index in range(count)]
        for side in (0, 1):
            assert (np.concatenate([part[side] for part in parts]) == whole[side]).all()


def test_steps_and_seeds_differ() -> None:
    source = open_batches(spec(kind="text", path=KJV))
    other = open_batches(spec(kind="text", path=KJV, seed=7))
    assert not (source.batch(0)[0] == source.batch(1)[0]).all()
    assert not (source.batch(0)[0] == other.batch(0)[0]).all()


def test_megatron_files_are_read_by_their_own_token_type(tmp_path: Path) -> None:
    tokens = np.arange(200, dtype=np.uint16)
    write_megatron(tmp_path / "corpus", tokens, code=8)
    given = spec(kind="megatron", path=str(tmp_path / "corpus"))
    check_data(given)
    inputs, targets = open_batches(given).batch(0)
    assert (targets == inputs + 1).all()


def test_bad_data_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Jesus wept.")
    (tmp_path / "odd.idx").write_bytes(b"not an index")
    (tmp_path / "odd.bin").write_bytes(b"")
    cases = {
        "no such file": spec(kind="text", path="/nowhere/text.txt"),
        "needs a file": spec(kind="text"),
        "model.seq=32 needs": spec(kind="text", path=str(tmp_path / "short.txt")),
        "not a Megatron index": spec(kind="megatron", path=str(tmp_path / "odd")),
    }
    for words, given in cases.items():
        with pytest.raises(SpecError, match=words) as caught:
            check_data(given)
        assert "\n" not in str(caught.value)


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path / "wide", np.full(100, 999, dtype=np.uint16), code=8)
    source = open_batches(spec(kind="megatron", path=str(tmp_path / "wide")))
    with pytest.raises(ValueError, match=r"token 999 .* model.vocab=256"):
        source.batch(0)
