"""Reads degrees of parallelism from a user's DeviceMesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch.distributed.device_mesh import DeviceMesh

from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import Axis, Placement

_AXES: tuple[Axis, ...] = ("pp", "shard", "replicate")


def degrees_of(mesh: DeviceMesh, knobs: Mapping[str, object]) -> dict[str, Any]:
    """The degrees of a mesh, and the placement that numbers ranks as the mesh does.

    Raises InfeasibleError if the mesh has another axis, if a degree is given twice, or if no
    placement numbers ranks as the mesh does.
    """
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(_AXES):
        raise InfeasibleError(f"mesh: its axes are {names}; they must be named among {_AXES}")
    for name in names:
        if name in knobs:
            raise InfeasibleError(
                f"{name}={knobs[name]!r}: the mesh has it, too (leave one of them out)"
            )
    sizes = {name: mesh.size(names.index(name)) for name in names}
    ranks = mesh.mesh.flatten().tolist()
    for placement in get_args(Placement):
        layout = Layout(
            pp=sizes.get("pp", 1),
            shard=sizes.get("shard", 1),
            replicate=sizes.get("replicate", 1),
            placement=placement,
        )
        if ranks == _numbered(layout, names):
            return {**sizes, "placement": placement}
    raise InfeasibleError(
        f"mesh: ranks must be numbered as init_device_mesh numbers the axes (pp, replicate, shard) "
        f"or (replicate, shard, pp); this mesh has {names} and ranks {ranks}"
    )


def _numbered(layout: Layout, names: tuple[str, ...]) -> list[int]:
    """The ranks of a layout in the order of a mesh with these axes."""
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    order = sorted(range(layout.world), key=lambda rank: [places[rank][n] for n in names])  # type: ignore[index]
    return list(order)
