"""The registration of contenders, and the rows of the verdict's comparison: the only place that
names them all. Imports no torch.

To add a contender, make its folder, add its entry here, and add a file with its knobs to
``conf/contender/``; ``docs/extending.md`` has an example.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baselines.deepspeed_3d.contender import DEEPSPEED, DEEPSPEED_3D
from baselines.deepspeed_3d.zero3 import DEEPSPEED_ZERO3
from baselines.fsdp.contender import FSDP, MEGATRON_FSDP
from baselines.megatron_core.contender import MEGATRON_CORE, MEGATRON_CORE_LOCAL
from baselines.public_3d import BEST_3D
from baselines.torch_pp.contender import TORCH_PP, TORCHTITAN
from baselines.zeropp.contender import ZEROPP
from benchmarks.specification.reading import validated
from zeropp.choose.contender import Contender
from zeropp.choose.planner import asked_degrees
from zeropp.choose.space import SearchPoint
from zeropp.choose.task import Candidate

# Every contender that can be priced, in the order in which tables and figures show them.
PRICED: dict[str, Contender[Any]] = {
    contender.name: contender
    for contender in (
        ZEROPP,
        DEEPSPEED,
        DEEPSPEED_3D,
        DEEPSPEED_ZERO3,
        TORCH_PP,
        FSDP,
        MEGATRON_FSDP,
        MEGATRON_CORE,
        MEGATRON_CORE_LOCAL,
        TORCHTITAN,
        BEST_3D,
    )
}
# Those that can also be run, because they have a trainer.
CONTENDERS: dict[str, Contender[Any]] = {
    name: contender for name, contender in PRICED.items() if contender.trainer
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row of the verdict's comparison: the best plan of a contender, or of the ``others`` of the
    same software, among those that the row ``allows``, under a name and a label of its own."""

    name: str
    label: str
    contender: Contender[Any]
    allows: Callable[[Any], bool]  # of degrees: a point's, or knobs without auto
    others: tuple[Contender[Any], ...] = ()

    @property
    def searched(self) -> tuple[Contender[Any], ...]:
        """The contenders, with the row's plans alone in their search spaces."""
        return tuple(map(self._allowed, (self.contender, *self.others)))

    def _allowed(self, contender: Contender[Any]) -> Contender[Any]:
        space, allows = contender.space, self.allows

        def families(point: SearchPoint[Any]) -> Iterable[Any]:
            return space.families(point) if allows(point.degrees) else ()

        return replace(contender, space=replace(space, families=families))


def whole(contender: Contender[Any]) -> Compared:
    """The row of a contender that may have any plan of its space."""
    return Compared(
        name=contender.name, label=contender.label, contender=contender, allows=lambda _: True
    )


def sides(row: Compared) -> tuple[Compared, ...]:
    """A row's plans without tensor parallelism and those with it, as a row each; the row itself
    where its program has none."""
    if not row.contender.space.tensor:
        return (row,)
    without = partial(_is_side, row.allows, tensor=False)
    having = partial(_is_side, row.allows, tensor=True)
    return (
        replace(row, name=f"{row.name}_tp1", label=f"{row.label}, tp=1", allows=without),
        replace(row, name=f"{row.name}_tp", label=f"{row.label}, tp>1", allows=having),
    )


def _is_side(allows: Callable[[Any], bool], degrees: Any, *, tensor: bool) -> bool:
    return (getattr(degrees, "tp", 1) > 1) is tensor and allows(degrees)


# DeepSpeed is compared as the claim's own opponent, and with whatever it runs fastest.
_DEEPSPEED_BEST = replace(
    whole(DEEPSPEED), name="deepspeed_best", label="DeepSpeed, best", others=(DEEPSPEED_ZERO3,)
)
# The rows of the comparison by name, in the order of the verdict's tables.
COMPARED: dict[str, Compared] = {
    row.name: row
    for row in (
        whole(DEEPSPEED_3D),
        _DEEPSPEED_BEST,
        whole(DEEPSPEED_ZERO3),
        whole(MEGATRON_CORE),
        whole(TORCHTITAN),
        whole(TORCH_PP),
        whole(FSDP),
        whole(MEGATRON_FSDP),
        whole(BEST_3D),
        whole(ZEROPP),
    )
}


# The rows of ``experiment=atlas`` and of ``zeropp tune``, in the order of their tables: what a
# program is worth without tensor parallelism, and with it.
ATLAS: dict[str, Compared] = {
    side.name: side
    for row in (
        whole(ZEROPP),
        whole(FSDP),
        whole(MEGATRON_FSDP),
        replace(_DEEPSPEED_BEST, name="deepspeed", label="DeepSpeed"),
        whole(TORCHTITAN),
        whole(MEGATRON_CORE),
    )
    for side in sides(row)
}
_WHOLE = COMPARED | {name: whole(c) for name, c in PRICED.items() if name not in COMPARED}
# Every row of a study by its name, every other contender as one, and both sides of each.
ROWS = _WHOLE | {side.name: side for row in _WHOLE.values() for side in sides(row)} | ATLAS


def name_of(knobs: Mapping[str, Any]) -> str:
    """The name of the contender with these ``knobs``. Records and tables of versions before 0.7
    have DeepSpeed's other plans under ``deepspeed_3d``, too."""
    name = str(knobs["name"])
    is_3d = 1 not in (knobs.get("tp"), knobs.get("pp"))
    return "deepspeed" if name == "deepspeed_3d" and not is_3d else name


def setting_of(candidate: Candidate[Any]) -> dict[str, Any]:
    """What a table keeps of a plan: the microbatch size, the contender's name, and the knobs that
    differ from their defaults, so that a knob that is added later changes no table."""
    default = vars(type(candidate.knobs)()) | {"name": ""}
    knobs = {k: v for k, v in vars(candidate.knobs).items() if v != default[k]}
    return {"knobs": knobs, "microbatch_size": candidate.microbatch_size}


def candidate_in(
    row: str, knobs: Mapping[str, Any], microbatch_size: int
) -> tuple[Compared, Contender[Any], Candidate[Any]]:
    """The row of this name, and the contender and the plan whose ``knobs`` a table has; others have
    their defaults, and degrees are 1. Of several contenders of a row it is the one that has all of
    these knobs. Raises SpecError if there is none."""
    compared = ROWS[name_of({**knobs, "name": row})]
    own = {name: value for name, value in knobs.items() if name != "name"}
    contender = compared.contender
    for other in compared.others:
        if own.keys() <= other.knobs.__dataclass_fields__.keys():
            contender = other
    left_out = {axis: 1 for axis in asked_degrees(contender.knobs()) if axis not in own}
    made = validated(contender.knobs, own | left_out | {"name": contender.name}, "setting.knobs")
    return compared, contender, Candidate(made, microbatch_size)


def program_label(name: str) -> str:
    """The program of a contender or row, which several rows may have: ``DeepSpeed``."""
    return re.split(r",| 3D$| ZeRO-3$", ROWS[name].label if name in ROWS else name)[0]
