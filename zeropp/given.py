"""What a finished plan or a mesh decides, if the caller gives one. Loaded only then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from torch.distributed.device_mesh import DeviceMesh

from zeropp.knobs import StepKnobs
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import Placement
from zeropp.plan import Plan
from zeropp.settings import AXES, Settings


def decided_by(plan: Plan) -> dict[str, Any]:
    """What a plan decides, by the names of the fields of ``Settings``."""
    places = (plan, plan.layout, plan.schedule)
    knobs = {
        name: next(getattr(place, name) for place in places if hasattr(place, name))
        for name in ("precision", *(each.name for each in fields(StepKnobs)))
    }
    return dict.fromkeys(("mesh", "weights", "cluster")) | knobs


def check_plan(plan: Plan, settings: Settings) -> None:
    """Raise InfeasibleError for a plan of another batch, or that cannot be run."""
    rows = settings.microbatch_rows
    if plan.layout != settings.layout:
        raise InfeasibleError("plan: has tensor parallelism, which nothing here can run")
    if (settings.global_batch, rows) != (plan.global_batch, plan.microbatch_size):
        raise InfeasibleError(
            f"plan: is for global_batch={plan.global_batch} in microbatches of "
            f"{plan.microbatch_size} rows, but global_batch={settings.global_batch} and "
            f"microbatch_size={rows}"
        )


def check_beside(plan: Plan, keywords: Mapping[str, Any]) -> None:
    """Raise InfeasibleError for a keyword beside a plan that decides otherwise."""
    for name, value in decided_by(plan).items():
        if name in keywords and keywords[name] != value:
            raise InfeasibleError(
                f"{name}={keywords[name]!r}: the plan decides it (leave one of the two out)"
            )


def degrees_of(mesh: DeviceMesh, asked: Mapping[str, object]) -> dict[str, Any]:
    """The degrees of a mesh, and the placement that numbers ranks as the mesh does.

    Raises InfeasibleError if the mesh has another axis, if a degree is given twice, or if no
    placement numbers ranks as the mesh does.
    """
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(AXES):
        raise InfeasibleError(f"mesh: its axes are {names}; they must be named among {AXES}")
    sizes = {name: mesh.size(names.index(name)) for name in names}
    for name in names:
        if asked[name] not in (1, sizes[name]):
            raise InfeasibleError(
                f"{name}={asked[name]!r}: the mesh has it, too (leave one of them out)"
            )
    ranks = mesh.mesh.flatten().tolist()
    for placement in get_args(Placement):
        layout = Layout(**sizes, placement=placement)  # type: ignore[arg-type]
        places = [layout.coordinates(rank) for rank in range(layout.world)]
        numbered = sorted(range(layout.world), key=lambda r: [places[r][n] for n in names])  # type: ignore[index]
        if ranks == numbered:
            return {**sizes, "placement": placement}
    raise InfeasibleError(
        f"mesh: ranks must be numbered as init_device_mesh numbers the axes (pp, replicate, shard) "
        f"or (replicate, shard, pp); this mesh has {names} and ranks {ranks}"
    )
