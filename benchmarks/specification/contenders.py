"""The registration of contenders, and the rows of the verdict's comparison: the only place that
names them all. Imports no torch.

To add a contender, make its folder, add its entry here, and add a file with its knobs to
``conf/contender/``; ``docs/extending.md`` has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from baselines.deepspeed_3d.contender import DEEPSPEED_3D
from baselines.deepspeed_3d.zero3 import DEEPSPEED_ZERO3
from baselines.fsdp.contender import FSDP, MEGATRON_FSDP
from baselines.megatron_core.contender import MEGATRON_CORE, MEGATRON_CORE_LOCAL
from baselines.public_3d import BEST_3D
from baselines.torch_pp.contender import TORCH_PP, TORCHTITAN
from baselines.zeropp.contender import ZEROPP
from benchmarks.specification.reading import validated
from zeropp.choose.contender import Contender
from zeropp.choose.space import SearchPoint
from zeropp.choose.task import Candidate

# Every contender that can be priced, in the order in which tables and figures show them.
PRICED: dict[str, Contender[Any]] = {
    contender.name: contender
    for contender in (
        ZEROPP,
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
    allows: Callable[[Any], bool]  # of a contender's knobs, where none is auto
    others: tuple[Contender[Any], ...] = ()

    @property
    def searched(self) -> tuple[Contender[Any], ...]:
        """The contenders, with the row's plans alone in their search spaces."""
        return tuple(map(self._allowed, (self.contender, *self.others)))

    def _allowed(self, contender: Contender[Any]) -> Contender[Any]:
        space, allows = contender.space, self.allows

        def families(point: SearchPoint[Any]) -> Iterable[Any]:
            return (knobs for knobs in space.families(point) if allows(knobs))

        return replace(contender, space=replace(space, families=families))


def whole(contender: Contender[Any]) -> Compared:
    """The row of a contender that may have any plan of its space."""
    return Compared(
        name=contender.name, label=contender.label, contender=contender, allows=lambda _: True
    )


# DeepSpeed is compared as the claim's own opponent, which has a pipeline, and with whatever it runs
# fastest: without a pipeline its ordinary engine runs, or its ZeRO-3.
_DEEPSPEED = tuple(
    Compared(
        name=name,
        label=label,
        contender=DEEPSPEED_3D,
        allows=allows,
        others=(DEEPSPEED_ZERO3,) * ("best" in name),
    )
    for name, label, allows in (
        ("deepspeed_3d", "DeepSpeed 3D", lambda knobs: bool(knobs.pp > 1)),
        ("deepspeed_best", "DeepSpeed, best", lambda _: True),
    )
)
# The rows of the comparison by name, in the order of the verdict's tables.
COMPARED: dict[str, Compared] = {
    row.name: row
    for row in (
        *_DEEPSPEED,
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


# The rows of ``experiment=atlas``, in the order of its tables. Megatron-Core stands there without
# tensor parallelism, too: what that is worth to one program.
ATLAS: dict[str, Compared] = {
    row.name: row
    for row in (
        whole(ZEROPP),
        whole(FSDP),
        whole(MEGATRON_FSDP),
        *_DEEPSPEED,
        whole(TORCHTITAN),
        Compared(
            name="megatron_core_tp1",
            label="Megatron-Core, tp=1",
            contender=MEGATRON_CORE,
            allows=lambda knobs: bool(knobs.tp == 1),
        ),
        whole(MEGATRON_CORE),
    )
}
# Every row of a study by its name, and every other contender as one.
ROWS = COMPARED | ATLAS | {n: whole(c) for n, c in PRICED.items() if n not in COMPARED}


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
    their defaults. Of several contenders of a row it is the one that has all of these knobs. Raises
    SpecError if there is none."""
    compared = ROWS[row]
    own = {name: value for name, value in knobs.items() if name != "name"}
    contender = compared.contender
    for other in compared.others:
        if own.keys() <= other.knobs.__dataclass_fields__.keys():
            contender = other
    made = validated(contender.knobs, own | {"name": contender.name}, "setting.knobs")
    return compared, contender, Candidate(made, microbatch_size)
