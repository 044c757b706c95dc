"""The cost of collectives and transfers: what physics fixes, and figures that others published."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.specification import SpecError
from benchmarks.specification.reading import validated
from tests.unit.simulated_task import cluster
from zeropp.price.cluster import Cluster, network_range
from zeropp.price.network import all_reduce_s, gather_s, group, transfer_s, waits_s
from zeropp.types.layout import Layout

A100 = cluster("a100")


@given(st.floats(1e3, 1e10), st.sampled_from([2, 4, 8, 16, 64]))
def test_collectives_grow_with_size_and_an_all_reduce_moves_twice(size: float, ranks: int) -> None:
    ring = group(A100, ranks, 1, max(8, ranks))
    assert gather_s(A100, ring, size) < gather_s(A100, ring, 2 * size)
    assert all_reduce_s(A100, ring, size) < 2.1 * gather_s(A100, ring, size)


def test_bandwidth_rises_with_message_size() -> None:
    """The small gathers of a unit reach less of the link than a whole model's do."""
    ring = group(A100, 16, 1, 64)
    rates = [size / gather_s(A100, ring, size) for size in (1e5, 1e6, 1e7, 1e8, 1e9)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] / 5


@pytest.mark.parametrize(
    ("size", "published_us"), [(2**26, 684.6), (2**28, 2420.6), (2**30, 8203.9)]
)
def test_all_reduce_inside_a_node_is_near_its_measurement(size: int, published_us: float) -> None:
    """results/published/nccl_busbw.csv, 8 A100; a smoke bound, the docs have the figures."""
    assert all_reduce_s(A100, group(A100, 8, 1, 8), size) * 1e6 == pytest.approx(
        published_us, rel=0.2
    )


def test_a_measured_rate_between_nodes_stands_for_what_is_assumed() -> None:
    nominal = A100.nics_per_node * A100.inter.bandwidth_gb_s
    ring, size = group(A100, 64, 1, 64), 1e10
    measured = replace(A100, busbw_gb_s=nominal * A100.inter.efficiency)
    assert group(measured, 64, 1, 64).rate == pytest.approx(ring.rate)
    slow = replace(A100, busbw_gb_s=10.0)
    bytes_s = size * 63 / 64 / (gather_s(slow, group(slow, 64, 1, 64), size) - waits_s(slow, ring))
    assert bytes_s == pytest.approx(10e9)  # as nccl-tests' busbw is defined
    assert group(slow, 8, 1, 64) == group(A100, 8, 1, 64)  # inside a node
    message = {"source": 0, "target": 1, "size": 1e9}
    layout = Layout(pp=2, shard=8)
    assert transfer_s(slow, layout, **message) > 5 * transfer_s(A100, layout, **message)  # type: ignore[arg-type]


def test_the_range_of_a_network_is_of_what_nobody_measured() -> None:
    slow, fast = network_range(A100, 16) or (A100, A100)
    rates = [group(of, 16, 1, 16).rate for of in (slow, A100, fast)]
    assert rates == sorted(rates)
    assert rates[0] < 0.15 * rates[2]
    assert network_range(A100, 8) is None  # one node
    assert network_range(slow, 16) is None


@pytest.mark.parametrize(
    ("given", "gb_s"),
    [
        (180, 180.0),
        ("92.5", 92.5),
        (
            " 8589934592  2147483648  float  sum  -1  47113  182.32  341.86  0  4700  182  341  0",
            341.86,
        ),
        ("fast", None),
        (-3, None),
    ],
)
def test_a_line_of_nccl_tests_is_its_busbw(given: object, gb_s: float | None) -> None:
    tree = asdict(A100) | {"busbw_gb_s": given}
    if gb_s is None:
        with pytest.raises(SpecError, match="busbw_gb_s="):
            validated(Cluster, tree)
    else:
        assert validated(Cluster, tree).busbw_gb_s == gb_s


def test_groups_across_nodes_share_the_nics() -> None:
    whole = group(A100, 64, 1, 64)  # one group of 8 nodes has every NIC
    eighth = group(A100, 8, 8, 64)  # eight groups of one GPU per node
    assert (whole.nodes, eighth.nodes) == (8, 8)
    assert whole.rate == pytest.approx(8 * eighth.rate)


@pytest.mark.parametrize(("per_node", "hops_us"), [(8, 38), (4, 24), (1, 14)])
def test_a_ring_costs_a_time_per_node_as_in_nccls_own_model(per_node: int, hops_us: float) -> None:
    """``tuning.cc``: 14 us between nodes and 3.4 per NVLink hop; an A100's was measured as 2.6. The
    rate of the network does not change it, and a broadcast pays the same hops."""
    few, many = (group(A100, n * per_node, 8 // per_node, 8 * n) for n in (4, 32))
    assert (few.nodes, many.nodes) == (4, 32)
    more = gather_s(A100, many, 0.0) - gather_s(A100, few, 0.0)
    assert more * 1e6 / 28 == pytest.approx(hops_us, abs=0.85 * (per_node - 1))
    slow = replace(A100, inter=replace(A100.inter, bandwidth_gb_s=1.0))
    assert waits_s(slow, group(slow, 256, 1, 256)) == waits_s(A100, group(A100, 256, 1, 256))
    farther = replace(A100, inter=replace(A100.inter, hop_us=140.0))
    assert waits_s(farther, many) > 2 * waits_s(A100, many)
    inside = group(A100, 8, 1, 8)
    assert gather_s(farther, inside, 1e8) == gather_s(A100, inside, 1e8)


def test_in_switch_reduction_helps_all_reduce_alone() -> None:
    h200 = cluster("h200")
    without = replace(h200, reduction_gain=1.0)
    ring = group(h200, 8, 1, 8)
    assert all_reduce_s(h200, ring, 1e9) < all_reduce_s(without, ring, 1e9)
    assert gather_s(h200, ring, 1e9) == gather_s(without, ring, 1e9)


def test_a_boundary_between_nodes_is_slower_than_inside_one() -> None:
    inside = Layout(pp=8, placement="pp_inner")
    across = Layout(pp=2, shard=8)
    assert transfer_s(A100, inside, source=0, target=1, size=1e7) < transfer_s(
        A100, across, source=0, target=1, size=1e7
    )
    assert transfer_s(A100, across, source=1, target=1, size=1e7) == 0.0
