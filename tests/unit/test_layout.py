"""Layout: rank numbering is a bijection, auto degrees make up the ranks. No torch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.zeropp.contender import ZeroppKnobs, size
from benchmarks.specification.run_spec import RunSpec, spec_from_mapping
from tests.unit.toy_spec import mapping
from zeropp.schedule.plan import SizedPlan
from zeropp.types import frozen
from zeropp.types.layout import InfeasibleError, Layout

degree = st.integers(1, 4)


@given(degree, degree, degree, degree, st.sampled_from(["dp_inner", "pp_inner"]))
def test_ranks_and_places_are_one_to_one(
    pp: int, tp: int, shard: int, replicate: int, placement: Any
) -> None:
    layout = Layout(pp=pp, tp=tp, shard=shard, replicate=replicate, placement=placement)
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    assert [layout.rank_at(place) for place in places] == list(range(layout.world))
    assert {layout.dp_index(rank) for rank in range(layout.world)} == set(range(layout.dp))
    assert places[0]["tp"] == 0
    if tp > 1:
        assert places[1] == places[0] | {"tp": 1}  # tensor parallelism is innermost


def test_a_fast_copy_computes_its_properties_again_and_has_fields_alone() -> None:
    layout = Layout(pp=2, shard=2)
    assert layout.world == 4
    copy = frozen.replace(layout, pp=4)
    assert (copy, copy.world, layout.world) == (Layout(pp=4, shard=2), 8, 4)
    with pytest.raises(TypeError, match="Layout has no field 'shards_'"):
        frozen.replace(layout, shards_=2)


def request(
    num_gpus: int, gpus_per_node: int = 8, global_batch: int = 8, **contender: Any
) -> RunSpec:
    values = mapping()
    values["num_gpus"] = num_gpus
    values["global_batch"] = global_batch
    values["cluster"]["gpus_per_node"] = gpus_per_node
    values["contender"] = {"name": "zeropp", **contender}
    return spec_from_mapping(values)


def sized(spec: RunSpec) -> SizedPlan:
    assert isinstance(spec.contender, ZeroppKnobs)
    return size(spec.task, spec.contender, 1)


def test_auto_puts_the_shard_group_in_a_node_and_the_pipeline_across() -> None:
    layout = sized(request(32, gpus_per_node=8, chunks=1)).layout
    assert (layout.pp, layout.shard, layout.replicate) == (4, 8, 1)
    layout = sized(request(4)).layout
    assert (layout.pp, layout.shard, layout.replicate) == (2, 2, 1)
    layout = sized(request(64, pp=2, global_batch=32)).layout
    assert (layout.pp, layout.shard, layout.replicate) == (2, 8, 4)


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_auto_degrees_always_make_up_the_ranks(num_gpus: int, gpus_per_node: int) -> None:
    try:
        layout = sized(request(num_gpus, gpus_per_node, global_batch=num_gpus)).layout
    except InfeasibleError as error:
        assert "model.layers=4" in str(error)  # noqa: PT017
        return
    assert layout.world == num_gpus


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"pp": 3}, r"contender.pp=3: .* multiply to num_gpus=4"),
        ({"pp": 2, "shard": 1, "replicate": 1}, r"num_gpus=4: .* multiply to 2"),
        ({"pp": 2, "chunks": 4}, r"2 x chunks=4 = 8 stages, .* \(try contender.chunks <= 3\)"),
    ],
)
def test_degrees_that_cannot_be(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        sized(request(4, **knobs))


def test_embedding_and_head_may_be_chunks_of_their_own() -> None:
    assert sized(request(4, pp=2, chunks=3)).cuts == tuple(range(7))


def test_batch_must_divide() -> None:
    asked = request(4, global_batch=7, pp=2)
    with pytest.raises(InfeasibleError, match=r"global_batch=7: .* \(try 6 or 8\)"):
        sized(asked)


def test_a_step_of_too_many_actions_is_refused() -> None:
    asked = request(4, global_batch=2 * 2**16, pp=2, chunks=2)
    assert sized(asked).num_microbatches == 2**16
    asked = request(4, global_batch=2 * 2**16 + 2, pp=2, chunks=2)
    with pytest.raises(InfeasibleError, match=r"65537 microbatches .* x 4 stages .* most 65536 "):
        sized(asked)
