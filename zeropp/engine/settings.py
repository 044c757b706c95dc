"""What a person may set of ``zeropp.parallelize``: one dataclass, whose fields are its keywords.

A plan is made from it, or given in it; what no plan decides (the optimizer, tied parameters, random
numbers) the engine reads here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import torch
from torch import Tensor, nn

from zeropp.engine.layers.values import POSITIONS, said_of
from zeropp.schedule.plan import Plan
from zeropp.types.knobs import StepKnobs
from zeropp.types.layout import InfeasibleError, Layout
from zeropp.types.literals import (
    AT_LEAST_0,
    AT_LEAST_1,
    Auto,
    Axis,
    LossReduction,
    Precision,
    Recompute,
    check_fields,
    if_auto,
)
from zeropp.types.training import OptimizerConfig

if TYPE_CHECKING:
    from zeropp.engine.layers.context import Context
    from zeropp.price.cluster import Cluster
else:
    Cluster = object  # its module is loaded, and looks at the value, where there is one

ParameterName = tuple[int, str]  # layer, and the parameter's name in it
# The optimizer group of a parameter, by its name.
GroupOf = Callable[[ParameterName, nn.Parameter], str]
# From tensors, by the name of their optimizer group, to an optimizer of them, or several.
MakeOptimizer = Callable[
    [Mapping[str, list[nn.Parameter]]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]
AXES: tuple[Axis, ...] = ("pp", "shard", "context", "replicate")
_OF_THIS_RANK = ("device", "timeout")  # what may differ between ranks


def one_group(name: ParameterName, parameter: nn.Parameter) -> str:
    """The optimizer group of every parameter, if there is only one group."""
    del name, parameter
    return "all"


@dataclass(frozen=True, kw_only=True)
class Settings(StepKnobs):
    """The keywords of ``parallelize``. Degrees and chunks are 1 by default; with ``auto`` they, and
    ``unit``, ``recompute`` and ``microbatch_size``, are chosen from what the layers take on the
    ``cluster``.

    Raises InfeasibleError, in one line, for a value that a keyword cannot have.
    """

    sample: Tensor
    """Some inputs [rows, ...], for their shape and type."""
    global_batch: Annotated[int, AT_LEAST_1]
    """Rows per step, over all ranks."""
    microbatch_size: Annotated[int | Auto, AT_LEAST_0] = 0
    """Rows per microbatch: larger ones keep a device busier and take more memory. 0: as many as the
    sample has, since what fits is known only where a cluster is named (``auto``)."""
    pp: Annotated[int | Auto, AT_LEAST_1] = 1
    shard: Annotated[int | Auto, AT_LEAST_1] = 1
    context: Annotated[int, AT_LEAST_1] = 1  # ranks that divide a sequence (Ulysses); never "auto"
    replicate: Annotated[int | Auto, AT_LEAST_1] = 1
    chunks: Annotated[int | Auto, AT_LEAST_1] = 1
    recompute: Recompute | Auto = "none"
    offload_blocks: Annotated[int, AT_LEAST_0] = 0
    """How many blocks of every rank keep in the host's memory what their backward needs."""
    plan: Plan | None = None
    """A finished plan for these layers, instead of all that a plan decides: degrees, knobs,
    ``precision``, ``weights`` and ``cluster``."""
    optimizer: OptimizerConfig | MakeOptimizer = field(default_factory=OptimizerConfig)
    """A configuration, or a function that makes an optimizer, or a list of several, from fp32
    tensors by group: ``lambda groups: torch.optim.AdamW(groups["all"], lr=1e-3)``. The tensors are
    flat shards for those of torch that update element by element, and whole parameters for others,
    unless ``elementwise`` is set. A function is first called with tensors without values."""
    elementwise: bool = False
    """Optimizers of your own update every element by itself, whatever the shape it is in: their
    tensors are flat shards, too."""
    clip_norm: Annotated[float, AT_LEAST_0] = 0.0
    """The largest global L2 norm of a step's gradient, with any optimizer; larger ones are scaled
    down to it. 0: that of an ``OptimizerConfig``, if it has one."""
    compare_replicas: Annotated[int, AT_LEAST_0] = 0
    """After how many steps replicas compare their parameters again. A difference is an error: a
    hook that depends on the rank makes them drift apart. The host waits for it. 0: never."""
    group_of: GroupOf = one_group
    """The optimizer group of a parameter, given its (layer, name) and itself."""
    precision: Precision = "fp32"
    """``bf16``: layers compute in bf16 (their floating-point inputs are cast to it, as FSDP2 casts
    them); masters, gradient sums and the optimizer stay fp32. ``fp8``: so, but linear layers whose
    sides are multiples of 16, except those of the first and the last layer, multiply in 8 bits
    (torchao's ``Float8Linear``, one scale per tensor; CPUs emulate it)."""
    loss_reduction: LossReduction = "mean"
    """What the loss function does over a microbatch's rows. ``mean``: the loss of a batch is the
    mean over its rows; ``sum``: their sum; ``tokens``: the function gives a sum and a count (of the
    labels that are not ignored, for example), and the loss of a batch is the sum over all of it
    divided by the count of all of it. Scalars that layers give are added to what the function gives
    for the same microbatch: to its mean or to its sum."""
    sample_keywords: Mapping[str, Tensor] = field(default_factory=dict)
    """The keyword inputs of the sample, by name, for their shapes; [rows, ...] each. Where tokens
    are divided (``context``, ``logits_slices``), so are those that are [rows, tokens, ...] here;
    give [rows, 1, ...] what is as long by chance."""
    weights: Sequence[float] | None = None
    """The layers' relative costs; by default their durations on ``cluster``, or, without one,
    their numbers of parameters."""
    cluster: str | Cluster | None = None
    """What the job runs on: a name among ``conf/cluster`` (``"a800"``, ``"h100"``) or a
    ``zeropp.Cluster``. Layers are then cut by their durations there, and the order of a step is
    the better of the one for equal durations and the one planned with them."""
    tied: tuple[ParameterName, ParameterName] | None = None
    """Two parameters that are one in the model, as (layer, name), one of the first layer and one
    of the last, in either order. Both begin with the first layer's values."""
    device: torch.device | str | None = None
    """By default this process's CUDA device where the process group has NCCL, else the CPU. A CUDA
    device becomes the current one of this process (``torch.cuda.set_device``)."""
    lr_schedule: Callable[[int], float] | None = None
    """The factor on the learning rate, given the number of steps done."""
    dropout_seed: int | None = 0
    """What the model draws by torch's default generators is a function of this number, of the step,
    the microbatch and the layer, so that every topology draws the same; draws of Python, of numpy
    and of a generator of its own differ. While a step runs no other thread of the process may draw
    from torch's (to train another model, for example). None: its layers draw nothing (one that does
    is refused), and the time of seeding is saved."""
    timeout: timedelta | None = None
    """How long this model's collectives and messages wait for their peers; by default as long as
    those of torch's new groups (30 minutes on gloo, 10 on NCCL)."""

    def __post_init__(self) -> None:
        """Check every field alone, and what several say together."""
        try:
            check_fields(self)
        except ValueError as error:
            raise InfeasibleError(str(error)) from None
        if not self.sample.dim() or not len(self.sample):
            raise InfeasibleError(
                "sample: must be a tensor of inputs, with at least one row in dimension 0"
            )
        for name, value in self.sample_keywords.items():
            if not isinstance(value, Tensor):
                raise InfeasibleError(f"sample_keywords: {name!r} must be a tensor [rows, ...]")
        if self.tied is not None:
            object.__setattr__(self, "tied", tuple(sorted(self.tied)))
        if self.plan is not None:
            self._take_over(self.plan)
        _ = self.layout, self.hardware  # which raise where there is none

    @cached_property
    def layout(self) -> Layout:
        """The degrees that were asked for; 1 for those that are still ``auto``."""
        degrees: dict[str, Any] = {axis: if_auto(getattr(self, axis), 1) for axis in AXES}
        return Layout(
            **degrees,
            placement=if_auto(self.placement, "dp_inner"),
            chunks=if_auto(self.chunks, 1),
            replicate_zero=if_auto(self.replicate_zero, 0),
        )

    @property
    def clipped_to(self) -> float:
        """The largest norm of a gradient, of the optimizer's configuration if not given here."""
        return self.clip_norm or getattr(self.optimizer, "clip_norm", 0.0)

    @property
    def microbatch_rows(self) -> int:
        """The rows of a microbatch; those of the sample while they are still ``auto``."""
        return if_auto(self.microbatch_size, 0) or len(self.sample)

    @property
    def microbatch(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Inputs and keyword inputs like those of the sample, with the rows of a microbatch and the
        tokens of a slice of it."""
        rows = self.microbatch_rows
        named = {"": self.sample, **self.sample_keywords}
        whole = {n: x if len(x) == rows else torch.cat([x] * rows)[:rows] for n, x in named.items()}
        if self.slicing is not None:
            whole = self.slicing.parts(whole)
        return whole.pop(""), whole

    @cached_property
    def without_tokens(self) -> frozenset[str]:
        """The keyword inputs that have no number per token in the sample, and so in no batch,
        however long its sequences are."""
        tokens = self.sample.shape[1:2]
        return frozenset(n for n, x in self.sample_keywords.items() if x.shape[1:2] != tokens)

    @cached_property
    def slicing(self) -> Context | None:
        """The ranks that divide sequences, for a walk over the layers."""
        size, packs = self.layout.context, POSITIONS in self.sample_keywords
        if size == 1:
            return None
        from zeropp.engine.layers.context import Context

        return Context(size, packs=packs, without_tokens=self.without_tokens)

    @cached_property
    def hardware(self) -> Cluster | None:
        """The cluster, if one was named or given."""
        if self.cluster is None:
            return None
        from zeropp.price.cluster import cluster_of

        return cluster_of(self.cluster)

    def described(self) -> dict[str, str]:
        """What must be equal on all ranks, by field. Functions are compared by what they give."""
        return {
            each.name: repr(_described(getattr(self, each.name)))
            for each in fields(self)
            if each.name not in _OF_THIS_RANK
        }

    def _take_over(self, plan: Plan) -> None:
        """Set what a plan decides; refuse one of another batch, or that cannot be run."""
        for name, value in _decided_by(plan).items():
            object.__setattr__(self, name, value)
        rows = self.microbatch_rows
        if plan.layout != self.layout:
            raise InfeasibleError("plan: has tensor parallelism, which nothing here can run")
        if (self.global_batch, rows) != (plan.global_batch, plan.microbatch_size):
            raise InfeasibleError(
                f"plan: is for global_batch={plan.global_batch} in microbatches of "
                f"{plan.microbatch_size} rows, but global_batch={self.global_batch} and "
                f"microbatch_size={rows}"
            )


def read(
    keywords: Mapping[str, Any], layers: object = None, loss_fn: object = None
) -> tuple[Settings, frozenset[str]]:
    """The settings with these keywords, and which of them are to be chosen, as ``auto`` was given
    for them. Layers may know what is ``tied``, and the loss function its ``loss_reduction`` (as
    those of Hugging Face's models do). Raises TypeError for an unknown keyword, and
    InfeasibleError as ``Settings`` does and for a keyword beside a plan that decides otherwise, be
    it ``auto`` or the keyword's default."""
    own = {
        "loss_reduction": said_of(loss_fn, "loss_reduction"),
        "tied": getattr(layers, "tied", None),
    }
    given = {name: value for name, value in keywords.items() if name != "tied" or value}
    known = [each.name for each in fields(Settings)]
    for name in given:
        if name not in known:
            near = [f" (did you mean {one!r}?)" for one in get_close_matches(name, known, 1)]
            raise TypeError(f"parallelize: unexpected keyword argument {name!r}{''.join(near)}")
    settings = Settings(**{name: value for name, value in own.items() if value} | given)
    copies = 1 if settings.layout.replicate_zero else settings.layout.replicate
    if settings.compare_replicas and copies == 1 and settings.replicate != "auto":
        raise InfeasibleError(
            f"compare_replicas={settings.compare_replicas}: no two ranks make the same updates "
            "(leave it out, or take replicate > 1 with replicate_zero=0)"
        )
    if settings.plan is not None:
        for name, value in _decided_by(settings.plan).items():
            if name in keywords and keywords[name] != value:
                raise InfeasibleError(
                    f"{name}={keywords[name]!r}: the plan decides it (leave one of the two out)"
                )
    return settings, frozenset(name for name, value in keywords.items() if value == "auto")


def check_call(settings: Settings, layers: Any, loss_fn: Any) -> None:
    """Raise InfeasibleError for what is no list of layers or is not for as many as the settings
    are, for a loss that is no function, and for one that is a module with parameters of its own."""
    if not isinstance(layers, Sequence | nn.Sequential | nn.ModuleList):
        raise InfeasibleError(
            f"layers: must be a list of modules, or of functions that make them, but is "
            f"{type(layers).__name__}"
        )
    weights, tied = settings.weights, settings.tied
    if weights is not None and (len(weights) != len(layers) or not all(w > 0 for w in weights)):
        raise InfeasibleError(
            f"weights: {len(weights)} numbers for {len(layers)} layers; give one per layer, and "
            "every weight must be more than 0"
        )
    if tied is not None and not 0 <= tied[0][0] < tied[1][0] < len(layers):
        raise InfeasibleError(
            f"tied={tied}: must name parameters of two layers, which are numbered from 0 to "
            f"{len(layers) - 1}"
        )
    if settings.precision == "fp8" and find_spec("torchao") is None:
        raise InfeasibleError(
            "precision='fp8': torchao is not installed here (pip install 'zeropp[fp8]', or use "
            "'bf16')"
        )
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise InfeasibleError(
            f"loss_fn={loss_fn!r}: must be a function of (output of the last layer, targets)"
        )
    for name, parameter in loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ():
        if parameter.requires_grad:
            raise InfeasibleError(
                f"loss_fn: has the parameter {name!r}, which nothing would train (put it into "
                "the last layer, or freeze it)"
            )


def _described(value: Any) -> object:
    if isinstance(value, Plan):  # its text would be long
        return crc32(repr(replace(value, memory=())).encode())
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return {name: _described(inner) for name, inner in value.items()}
    return "a function" if callable(value) else value


def _decided_by(plan: Plan) -> dict[str, Any]:
    """What a plan decides, by the names of the fields of ``Settings``."""
    places = (plan, plan.layout, plan.schedule)
    knobs = {
        name: next(getattr(place, name) for place in places if hasattr(place, name))
        for name in ("precision", *(each.name for each in fields(StepKnobs)))
    }
    return dict.fromkeys(("weights", "cluster")) | knobs
