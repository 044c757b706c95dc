"""The keyword arguments of ``parallelize`` in addition to layers, loss, sample and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from numbers import Integral
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropp.cluster import Cluster, named_cluster
from zeropp.contender.contender import ZeroppKnobs
from zeropp.engine.options import EngineOptions, MakeOptimizer, one_group
from zeropp.engine.preflight import Tied, degrees_of
from zeropp.engine.sharding import GroupOf
from zeropp.layer_costs import Conditions
from zeropp.layout import InfeasibleError
from zeropp.literals import (
    Auto,
    LossReduction,
    Placement,
    Precision,
    Recompute,
    ReduceEvery,
    WireType,
    if_auto,
)
from zeropp.training import OptimizerConfig

# The keyword arguments of ``zeropp.parallelize`` that set ZeroPP's knobs. Imports no torch.


class Keywords(TypedDict, total=False):
    """The knobs of ``ZeroppKnobs`` that the API has; degrees and chunks are 1 by default. ``auto``
    is chosen from what the layers take on the cluster that is named."""

    pp: int | Auto
    shard: int | Auto
    replicate: int | Auto
    replicate_zero: Literal[0, 1]
    chunks: int | Auto
    unit: int | Auto
    activation_cap: int
    reduce_every: ReduceEvery
    reduce_dtype: WireType
    prefetch: int
    split_backward: bool
    placement: Placement
    recompute: Recompute | Auto
    compile: bool


def knobs_of(keywords: Mapping[str, Any], also: Iterable[str] = ()) -> ZeroppKnobs:
    """The knobs that these keyword arguments set; ``also`` names other arguments, for the message.

    Raises TypeError for the first unknown keyword, and InfeasibleError for a value that its keyword
    cannot have; the message is one line.
    """
    known = get_type_hints(Keywords)
    for name, value in keywords.items():
        if name not in known:
            raise TypeError(
                f"parallelize() got an unexpected keyword argument {name!r} "
                f"(there are: {', '.join([*sorted(also), *known])})"
            )
        check(name, value, known[name])
    return ZeroppKnobs(**{"pp": 1, "shard": 1, "replicate": 1, "chunks": 1, **keywords})


def check(field: str, value: object, kind: Any) -> None:
    """Refuse a value that an argument of this type cannot have; raises InfeasibleError."""
    parts = (kind,) if kind in (bool, int) or get_origin(kind) is Literal else get_args(kind)
    words = [word for part in parts for word in ((False, True) if part is bool else get_args(part))]
    if value in words:
        return
    if int not in parts:
        known = ", ".join(map(repr, words))
        raise InfeasibleError(f"{field}={value!r}: must be one of {known}")
    if type(value) is not int:
        more = "".join(f" or {word!r}" for word in words)
        raise InfeasibleError(f"{field}={value!r}: must be a whole number{more}")
    annotated = get_type_hints(ZeroppKnobs, include_extras=True)[field]
    for limit in get_args(annotated)[1:] if get_origin(annotated) is Annotated else ():
        try:
            limit.check(value)
        except ValueError as error:
            raise InfeasibleError(f"{field}={value!r}: {error}") from None


class Arguments(Keywords, total=False):
    """The keyword arguments of ``parallelize``, for editors and type checkers.

    The knobs of the schedule are those of ``Keywords``.
    """

    mesh: DeviceMesh | None
    """A mesh with axes among ``pp``, ``shard`` and ``replicate``, instead of these degrees."""
    optimizer: OptimizerConfig | MakeOptimizer
    """A configuration, or a function that makes any optimizer of ``torch.optim`` which works
    element by element, from flat fp32 tensors by group: ``lambda groups:
    torch.optim.AdamW([{"params": groups["all"]}], lr=1e-3)``. Clipping needs a configuration."""
    group_of: GroupOf
    """The optimizer group of a parameter, given its (layer, name) and itself."""
    precision: Precision
    """``bf16``: layers compute in bf16 (their floating-point inputs are cast to it, as FSDP2 casts
    them); masters, gradient sums and the optimizer stay fp32."""
    loss_reduction: LossReduction
    """What the loss function does over a microbatch's rows. ``mean``: the loss of a batch is the
    mean over its rows; ``sum``: their sum."""
    sample_keywords: Mapping[str, Tensor]
    """The keyword inputs of one microbatch, by name, for their shapes; [rows, ...] each."""
    weights: Sequence[float] | None
    """The layers' relative costs; by default their durations on ``cluster``, or, without one,
    their numbers of parameters."""
    cluster: str | Cluster | None
    """What the job runs on: a name among ``conf/cluster`` (``"a800"``, ``"h100"``) or a
    ``zeropp.Cluster``. Layers are then cut by their durations there, and the order of a step is
    the better of the one for equal durations and the one planned with them."""
    tied: Tied | None
    """Two parameters that are one in the model, as (layer, name), one of the first layer and one
    of the last, in either order. Both begin with the first layer's values."""
    device: torch.device | str | None
    """By default the mesh's, or this process's CUDA device where the process group has NCCL, else
    the CPU. A CUDA device becomes the current one of this process (``torch.cuda.set_device``)."""
    lr_schedule: Callable[[int], float] | None
    """The factor on the learning rate, given the number of steps done."""
    dropout_seed: int
    """What the model draws is a function of this number, the step and the microbatch."""
    timeout: timedelta | None
    """How long this model's collectives and messages wait for their peers; by default as long as
    those of torch's new groups (30 minutes on gloo, 10 on NCCL)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The ``Arguments`` with their defaults, and with the knobs as one object.

    ``open`` are the knobs that were asked for as ``auto``. The others that are ``auto`` in
    ``knobs`` have simple defaults. ``chosen`` says in a few words what ``auto`` has become.
    """

    knobs: ZeroppKnobs
    open: frozenset[str] = frozenset()
    chosen: str = ""
    mesh: DeviceMesh | None = None
    optimizer: OptimizerConfig | MakeOptimizer = field(default_factory=OptimizerConfig)
    group_of: GroupOf = one_group
    precision: Precision = "fp32"
    loss_reduction: LossReduction = "mean"
    sample_keywords: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Sequence[float] | None = None
    cluster: Cluster | None = None
    tied: Tied | None = None
    device: torch.device | str | None = None
    lr_schedule: Callable[[int], float] | None = None
    dropout_seed: int | None = None
    timeout: timedelta | None = None

    def described(self) -> object:
        """What must be equal on all ranks."""
        config = self.optimizer
        asked = config if isinstance(config, OptimizerConfig) else "of the caller's own"
        keywords = {
            name: (tuple(value.shape), value.dtype) for name, value in self.sample_keywords.items()
        }
        kinds = self.precision, self.loss_reduction, self.cluster
        return self.knobs, asked, *kinds, self.weights, self.tied, self.dropout_seed, keywords

    def conditions(self) -> Conditions | None:
        """What durations depend on; None where no cluster was named."""
        if self.cluster is None:
            return None
        recompute: Recompute = if_auto(self.knobs.recompute, "none")
        return Conditions(self.cluster, self.precision, recompute, self.knobs.reduce_dtype)

    def engine_options(self) -> EngineOptions:
        """The options of the engine."""
        seed = self.dropout_seed
        if seed is None and not self.knobs.compile:
            seed = 0
        return EngineOptions(
            precision=self.precision,
            recompute=if_auto(self.knobs.recompute, "none"),
            reduce_dtype=self.knobs.reduce_dtype,
            tied=self.tied,
            lr_schedule=self.lr_schedule,
            dropout_seed=seed,
            compile=self.knobs.compile,
            group_of=self.group_of,
            loss_reduction=self.loss_reduction,
            timeout=self.timeout,
        )


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer": (
        lambda value: (
            isinstance(value, OptimizerConfig) or (callable(value) and not isinstance(value, type))
        ),
        "a zeropp.OptimizerConfig, or a function from the groups to an optimizer (lambda groups: "
        "torch.optim.AdamW(groups['all'], lr=1e-3))",
    ),
    "group_of": (callable, "a function of a parameter's (layer, name) and the parameter"),
    "lr_schedule": (callable, "a function from the number of steps done to a factor"),
    "dropout_seed": (lambda value: isinstance(value, Integral), "a whole number"),
    "timeout": (lambda value: isinstance(value, timedelta), "a datetime.timedelta"),
}


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse arguments of another kind than is needed; raises InfeasibleError."""
    for name, (fits, wanted) in _WANTED.items():
        if name in given and not fits(given[name]):
            shown = repr(given[name])
            if "\n" in shown:
                shown = f"a {type(given[name]).__name__}"
            raise InfeasibleError(f"{name}={shown}: must be {wanted}")


def request_of(arguments: Mapping[str, Any]) -> Request:
    """The request of these arguments, which are checked.

    Raises TypeError for an unknown argument, and InfeasibleError for a value that an argument
    cannot have; the message is one line.
    """
    own = {one.name for one in fields(Request)} - {"knobs", "open", "chosen"}
    given = {name: value for name, value in arguments.items() if name in own and value is not None}
    keywords = {name: value for name, value in arguments.items() if name not in own}
    knobs = knobs_of(keywords, also=own)
    for name, kind in (("precision", Precision), ("loss_reduction", LossReduction)):
        if name in given:
            check(name, given[name], kind)
    _check_kinds(given)
    if "dropout_seed" in given:
        given["dropout_seed"] = int(given["dropout_seed"])
    if "mesh" in given:
        knobs = replace(knobs, **degrees_of(given["mesh"], keywords))
    if isinstance(given.get("cluster"), str):
        given["cluster"] = named_cluster(given["cluster"])
    if "tied" in given:
        first, second = sorted(given["tied"])
        given["tied"] = (first, second)
    left_open = frozenset(name for name, value in keywords.items() if value == "auto")
    return Request(knobs=knobs, open=left_open, **given)
