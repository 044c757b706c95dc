"""The end of a step: the optimizer of what one rank updates clips its gradients and updates."""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.private_names import step_hooks
from zeropp.engine.ranks.errors import ErrorBarrier
from zeropp.engine.ranks.given_rows import checksum
from zeropp.engine.ranks.lanes import Lanes
from zeropp.engine.settings import MakeOptimizer
from zeropp.engine.update.update_rules import (
    clip_factor,
    is_plain,
    made_optimizer,
    norm_power,
    parts_of,
)
from zeropp.types.layout import InfeasibleError, Layout
from zeropp.types.training import OptimizerConfig, StepResult

if TYPE_CHECKING:
    from zeropp.engine.parameters.tied import TiedWeights


@dataclass
class Updater:
    """The optimizer of one rank. ``groups``: the name of the optimizer group of a tensor, by the
    tensor's identity. ``clip_norm``: the largest global gradient norm (0: no clipping).
    ``lr_schedule``: the factor on the learning rate, by the number of steps done."""

    optimizer: torch.optim.Optimizer
    groups: dict[int, str]
    clip_norm: float = 0.0
    lr_schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.rates_set: list[Any] = []  # by the schedule, unless a state was loaded since
        # Adagrad's does; a look-up may leave nothing but an empty dict.
        kept = self.optimizer.state.values()
        self.begins_with_state = any(isinstance(one, dict) and one for one in kept)
        self.is_updating = self.has_updated = False
        self.made = [dict(vars(part)) for part in parts_of(self.optimizer)]
        self._objects = [*map(_objects_of, parts_of(self.optimizer))]
        self.optimizer.register_step_pre_hook(self._check_moment)
        self.optimizer.register_load_state_dict_post_hook(lambda _: self.rates_set.clear())

        # What a loss reads of another parameter would be added up by no rank.
        self.optimizer.add_param_group = _refuse_group  # type: ignore[method-assign, assignment]

    def _check_moment(self, *_: object) -> None:
        if not self.is_updating:
            raise RuntimeError("optimizer.step: train_step makes every update (leave it out)")

    @classmethod
    def make(
        cls,
        flats: Sequence[FlatParameters],
        asked: OptimizerConfig | MakeOptimizer,
        device: torch.device,
        names: Iterable[str],
        *,
        whole: Collection[str] = (),
        clip_norm: float,
        lr_schedule: Callable[[int], float] | None,
    ) -> Updater:
        """The optimizer that was asked for, over what this rank updates of the flat buffers; a
        group that this rank has nothing of, among the model's ``names``, has one tensor: an empty
        one, or, in one of the groups ``whole``, a matrix of one number, which stays 0.

        Raises InfeasibleError for an optimizer that has left a group out.
        """
        # Optimizers refuse to have nothing at all.
        groups: dict[str, list[nn.Parameter]] = {name: [] for name in names} or {"all": []}
        for flat in flats:
            for one in flat.owned:
                groups[one.group].append(one.tensor)
        held = {id(one) for members in groups.values() for one in members}
        for name, members in groups.items():
            if not members:
                nothing = torch.zeros((1, 1) if name in whole else 0, device=device)
                members.append(nn.Parameter(nothing))
                members[0].grad = nothing.clone() if name in whole else None
        optimizer = made_optimizer(asked, groups)
        for part in parts_of(optimizer):
            if hasattr(part, "eval") and any(flat.whole for flat in flats):
                raise InfeasibleError(
                    f"optimizer: {type(part).__name__} has an eval(), which changes parameters "
                    "between steps, when whole ones have no values (say elementwise=True, if it "
                    "updates every element by itself)"
                )
        known = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, members in groups.items():
            if any(id(one) in held and id(one) not in known for one in members):
                raise InfeasibleError(
                    f"optimizer: has nothing of group {name!r}, whose parameters would never be "
                    f"updated (give it groups[{name!r}], or freeze these parameters)"
                )
        group_of = {id(one): name for name, members in groups.items() for one in members}
        return cls(optimizer, group_of, clip_norm, lr_schedule)

    @property
    def is_torchs(self) -> bool:
        """Whether torch's own code alone makes an update."""
        every = [self.optimizer, *(parts := parts_of(self.optimizer))]
        known = all(type(part).__module__.startswith("torch.optim.") for part in parts)
        return known and all(hook == self._check_moment for hook in step_hooks(every))

    def described(self) -> str:
        """The optimizer's kind, and the settings of its groups, such as their learning rates;
        without those that are tensors on a device, because to read them the host would wait."""
        groups = [
            {n: v for n, v in group.items() if n != "params" and not getattr(v, "is_cuda", False)}
            for group in self.optimizer.param_groups
        ]
        return f"{type(self.optimizer).__name__} {groups}"

    def set_rates(self, steps_done: int) -> None:
        """Set the learning rates of a step, if there is a schedule."""
        if self.lr_schedule is not None:
            factor = self.lr_schedule(steps_done)
            if not 0 <= factor < math.inf:
                raise InfeasibleError(f"lr_schedule: gives {factor} after {steps_done} steps")
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
            self.rates_set = [group["lr"] for group in self.optimizer.param_groups]

    def check_rates(self) -> None:
        """Raise ValueError where something else has set a learning rate that the schedule sets."""
        for group, rate in zip(self.optimizer.param_groups, self.rates_set, strict=False):
            if group["lr"] is not rate and group["lr"] != rate:
                raise ValueError(
                    f"lr_schedule: has set the learning rate to {float(rate):g}, and a scheduler "
                    f"or your loop to {float(group['lr']):g} since, which the next step would not "
                    "see (leave one of the two out)"
                )

    def update(self, finite: Tensor) -> None:
        """Update, if the gradients are ``finite``. The host waits for the device only if the
        optimizer cannot skip an update by itself, as torch's fused ones can."""
        self.is_updating, optimizer = True, cast("Any", self.optimizer)
        try:
            # As torch's GradScaler asks.
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                optimizer.found_inf = (~finite).float()
                optimizer.step()
                del optimizer.found_inf
            elif bool(finite):
                optimizer.step()
            else:
                return
            if not self.has_updated:
                self._check_state()
            self.has_updated = True
        finally:
            self.is_updating = False

    def _check_state(self) -> None:
        """Refuse, in the first update, what an optimizer keeps and no checkpoint could hold."""
        for part, before in zip(parts_of(self.optimizer), self._objects, strict=True):
            for name, value in vars(part).items():
                if isinstance(value, torch.optim.Optimizer) and value.state is not part.state:
                    raise InfeasibleError(
                        f"optimizer: {type(part).__name__} keeps an optimizer, {name!r}, whose "
                        "state no checkpoint could hold (give that one, or share its state)"
                    )
            now = _objects_of(part)
            for name in (name for name in before if before[name] != now.get(name)):
                warnings.warn(
                    f"optimizer: {type(part).__name__} changes what it keeps in its attribute "
                    f"{name!r}, which no checkpoint has (keep it in its state, or in a number)",
                    stacklevel=2,
                )
        state = (one for one in self.optimizer.state.values() if isinstance(one, dict))
        for name, value in (pair for one in state for pair in one.items()):
            if not (value is None or isinstance(value, bool | int | float | Tensor)):
                raise InfeasibleError(
                    f"optimizer: keeps {name!r} of a parameter, a {type(value).__name__}, so that "
                    "no checkpoint could hold it (take one that keeps tensors and numbers)"
                )


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, value: object) -> str | None:
        """What stands for a tensor."""
        return "a tensor" if isinstance(value, Tensor) else None


def _objects_of(part: torch.optim.Optimizer) -> dict[str, bytes]:
    """What an optimizer keeps in objects of its own beside tensors, by its attribute, as it is."""
    found = {}
    for name in vars(part).keys() - vars(torch.optim.Optimizer([torch.empty(0)], {})).keys():
        value = vars(part)[name]
        if not is_plain(value) and not callable(value):
            with suppress(Exception):  # what cannot be written cannot be compared
                _WithoutTensors(file := io.BytesIO()).dump(value)
                found[name] = file.getvalue()
    return found


def _refuse_group(*_: object) -> NoReturn:
    raise AttributeError("optimizer.add_param_group: no rank has other parameters")


@dataclass(frozen=True)
class ParameterUpdate:
    """The update of a rank's parameters, which are in ``flats``, and what is done with all of them
    just before and after it. ``world``: the group of all ranks; None if there is one rank.
    ``skipped_steps`` counts, on the device, the updates that were skipped. ``divisor``: the number
    by which losses were divided in place of the batch's count; None where there is no count."""

    flats: Sequence[FlatParameters]
    layout: Layout
    lanes: Lanes
    tied: TiedWeights | None
    updater: Updater
    world: dist.ProcessGroup | None
    skipped_steps: Tensor
    divisor: int | None = None

    def sum_tied(self) -> None:
        """Sum the gradients of tied weights, once they are reduced."""
        assert self.tied is not None
        self.lanes.join_reductions()
        self.tied.sum_gradients()

    def gather_whole(self) -> None:
        """Gather the parameters that are updated whole, with their gradients, once all gradients
        are reduced."""
        self.lanes.join_reductions()
        for flat in self.flats:
            flat.gather_whole()

    def update(self, losses: list[Tensor], counts: list[Tensor]) -> StepResult:
        """Clip the gradients by their global norm and update; add the losses of all ranks up, and
        the counts by which they are divided, if there is a ``divisor``. An update whose norm is not
        finite is skipped."""
        self.lanes.join_reductions()
        for flat in self.flats:
            flat.finish()
        sums = torch.zeros(3, dtype=torch.float64, device=self.lanes.device)
        for place, parts in enumerate((losses, counts)):
            if parts:
                sums[place] = torch.stack(parts).sum()
        sums[2] = norm_power(self._gradients(), self.lanes.device)
        if self.world is not None:
            dist.all_reduce(sums, group=self.world)
        result = StepResult(sums[0], sums[2].sqrt())
        if self.divisor is not None:
            ratio = self.divisor / sums[1]  # infinite without a count, so that nothing is updated
            result = StepResult(result.loss * ratio, result.grad_norm * ratio)
            self._scale(ratio)
        if self.updater.clip_norm:
            self._scale(clip_factor(result.grad_norm, self.updater.clip_norm))
        finite = torch.isfinite(result.grad_norm)
        watch: AbstractContextManager[None] = nullcontext()
        if self.world is not None and not self.updater.is_torchs:  # not loaded for others
            from zeropp.engine.update.hooks import refusing_numbers_of_a_rank

            shards = (one.tensor for flat in self.flats for one in flat.flat_shards)
            watch = refusing_numbers_of_a_rank(shards)
        with watch:
            self.updater.update(finite)
        self.skipped_steps.add_(~finite)
        return result

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> Tensor:
        """As ``ParallelModel.clip_grad_norm_``, which says what it raises."""
        if not self.updater.is_updating:
            raise RuntimeError(
                "clip_grad_norm_: no update is under way (call it in a hook of "
                "model.optimizer.register_step_pre_hook, or give parallelize clip_norm=)"
            )
        if not norm_type > 0:
            raise ValueError(f"clip_grad_norm_: norm_type={norm_type}: must be more than 0")
        from zeropp.engine.update.hooks import allowed

        with allowed():
            norm = norm_power(self._gradients(), self.lanes.device, norm_type)
        is_largest = math.isinf(norm_type)
        if self.world is not None:
            kind = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            dist.all_reduce(norm, kind, group=self.world)
        norm = norm if is_largest else norm ** (1 / norm_type)
        self._scale(clip_factor(norm, max_norm))
        return norm

    def gather_updated(self) -> None:
        """Start to gather what other ranks have updated."""
        for flat in self.flats:
            flat.gather_updated()

    def compare_replicas(self, barrier: ErrorBarrier, step: int) -> None:
        """Raise RuntimeError, on all ranks, where replicas have other parameters after a step."""
        sums = repr([int(checksum(flat.master)) for flat in self.flats])
        every = barrier.exchange([crc32(sums.encode())])
        for rank, found in enumerate(every):
            first = self.layout.rank_at(self.layout.coordinates(rank) | {"replicate": 0})
            if found != every[first] and not self.layout.replicate_zero:  # else none are the same
                raise RuntimeError(
                    f"compare_replicas: after step {step} rank {rank} has other parameters than "
                    f"rank {first}, its replica (what acts on gradients or parameters, as a hook "
                    "of the optimizer, must do the same on all ranks)"
                )

    def _scale(self, factor: Tensor) -> None:
        for flat in self.flats:
            flat.scale_gradients(factor)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank updates; of tied weights one end's copy."""
        for flat in self.flats:
            if self.tied is None or flat is not self.tied.copy:
                yield from (shard.tensor for shard in flat.owned)

    def _gradients(self) -> Iterator[tuple[Tensor, float]]:
        """The gradients of what this rank updates, and how many ranks have the same."""
        copies = 1 if self.layout.replicate_zero else self.layout.replicate
        return ((one.grad, copies) for one in self.parameters() if one.grad is not None)
