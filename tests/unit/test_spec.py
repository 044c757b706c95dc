"""RunSpec: strict building, one-line errors, stable identity. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec, load_spec, spec_from_mapping
from tests.unit.toy_spec import changed, mapping


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("num_gpus", "many", "integer"),
        ("num_gpus", 0, "at least 1"),
        ("optimizer.beta1", 1.5, "from 0 to less than 1"),
        ("optimizer.beta2", 1.0, "from 0 to less than 1"),
        ("optimizer.eps", -1.0, "at least 0"),
        ("precision", "fp8", "'fp32' or 'bf16'"),
        ("contender.pp", "all", "'auto'"),
        ("contender.chunks", 0, "at least 1"),
        ("contender.colour", "blue", "zeropp has no such knob (it has pp, shard"),
        ("contender.units", 4, "did you mean contender.unit?"),
        ("model.heads", 5, "must divide model.hidden=64"),
        ("model.kv_heads", 3, "must divide model.heads=4"),
        ("measure.warmup_steps", -1, "at least 0"),
        ("measure.timeout_s", float("nan"), "measure.timeout_s=nan: must be finite"),
        ("measure.timeout_s", float("inf"), "measure.timeout_s=inf: must be finite"),
        ("contender.prefetch", -1, "contender.prefetch=-1: must be at least 0"),
        ("cluster.gpus_per_node", 0, "cluster.gpus_per_node=0: must be at least 1"),
        ("cluster.intra.bandwidth_gb_s", 0, "must be more than 0"),
        ("model.dropout", 1.0, "model.dropout=1.0: must be from 0 to less than 1"),
        ("data.kind", "csv", "'text', 'megatron' or 'synthetic'"),
    ],
)
def test_bad_input_names_field_value_and_way_out(path: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_mapping(changed(path, value))
    message = str(caught.value)
    assert message.startswith(path)
    assert repr(value) in message
    assert words in message
    assert "\n" not in message


def test_missing_key_is_named() -> None:
    values = mapping()
    del values["global_batch"]
    with pytest.raises(SpecError, match=r"^global_batch: missing"):
        spec_from_mapping(values)


def test_spec_id_depends_on_every_value_and_on_nothing_else(tmp_path: Path) -> None:
    spec = spec_from_mapping(mapping())
    assert spec.spec_id == spec_from_mapping(mapping()).spec_id
    assert spec.spec_id != spec_from_mapping(changed("optimizer.lr", 0.5)).spec_id
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.to_dict()))
    assert load_spec(path) == spec


def test_spec_is_frozen() -> None:
    spec: RunSpec = spec_from_mapping(mapping())
    with pytest.raises(AttributeError):
        spec.num_gpus = 8  # type: ignore[misc]
