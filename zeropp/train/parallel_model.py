"""What ``parallelize`` gives: this rank's part of a model, to train, evaluate, save and load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from signal import SIGTERM, SIGUSR1, signal
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.engine import Engine
from zeropp.engine.evaluator import Outputs
from zeropp.engine.layers.values import Value, said_of
from zeropp.engine.loss import Microbatches
from zeropp.schedule.plan import Plan
from zeropp.types.training import StepResult

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from zeropp.engine.checkpoint import Checkpointer
    from zeropp.train.stages import Planned


class ParallelModel:
    """This rank's part of the model, with its optimizer.

    All ranks must call every method together, except for ``close``. ``rows`` is this rank's slice
    of a global batch: part ``data_parallel_rank`` of ``data_parallel_size`` equal parts, as a
    ``DistributedSampler`` numbers them. Ranks that divide sequences (``context``) are given the
    same rows with all of their tokens, and each takes its own. ``plan`` is what every rank
    does in a step, and ``summary`` one line with its degrees and knobs, whether they were given,
    chosen or are defaults.
    """

    def __init__(
        self,
        engine: Engine,
        planned: Planned,
        keywords: frozenset[str],
        without_tokens: frozenset[str],
    ) -> None:
        """``keywords`` are the names of the keyword inputs; those ``without_tokens`` have no number
        per token."""
        plan, chosen, self._element_mfu = planned
        self.engine, self.plan = engine, plan
        self.summary = f"{describe(plan)}; {chosen}" if chosen else describe(plan)
        self.data_parallel_rank = plan.layout.dp_index(dist.get_rank())
        self.data_parallel_size = plan.layout.dp
        rows = plan.num_microbatches * plan.microbatch_size
        first = rows * self.data_parallel_rank
        self.rows = slice(first, first + rows)
        self._keywords, self._without_tokens = keywords, without_tokens
        self._has_looked = False
        self._save_to: Path | str | None = None
        self._stepped_at = 0.0  # when the last step returned
        self._calls = -1  # how many calls there had been by then

    def train_step(self, inputs: Tensor, targets: Tensor, **keyword_inputs: Tensor) -> StepResult:
        """Train one step on this rank's ``rows`` of the global batch.

        ``inputs``, ``targets`` and every keyword input are [rows, ...]; with b rows per microbatch,
        microbatch j is the rows j*b .. (j+1)*b-1. A keyword input goes to the layers whose
        ``forward``, or that of a module which it hands ``**kwargs`` on to, names it, and to the
        loss function if that names it. Returns the loss of the global batch and the gradient's
        norm before clipping, equal on every rank, and rates (``StepResult``).

        Raises ValueError for another number of rows, a batch on another device, or other rows than
        those of a rank with the same ``data_parallel_rank`` (on a GPU in the next step), TypeError
        for something that is not a tensor or other keyword inputs than ``sample_keywords`` had, and
        RuntimeError under ``torch.no_grad`` and under ``torch.autocast``, whose copies of the
        weights would outlive an update. The other ranks then raise PeerError, which is a
        RuntimeError, and nothing has run. A rank on which a step raises while it runs is to end,
        and its launcher ends the others; on it every further call raises RuntimeError.
        """
        batch = self.engine.agree(
            "train_step", lambda: self.training_batch(inputs, targets, **keyword_inputs)
        )
        result = self.engine.step(batch)
        if self._save_to is not None and self.engine.agreed_signal:
            self.save(self._save_to)
            raise SystemExit(128 + self.engine.agreed_signal)
        before, self._stepped_at = self._stepped_at, perf_counter()
        calls, self._calls = self._calls, self.engine.barrier.calls
        if self._calls != calls + 1:  # something else took a part of this time
            return result
        rate = self.engine.elements / (self._stepped_at - before)
        return replace(
            result,
            tokens_per_s=None if inputs.is_floating_point() or inputs.dim() != 2 else rate,
            mfu=self._element_mfu and self._element_mfu * rate,
        )

    @overload
    def eval_step(
        self, inputs: Tensor, targets: Tensor, *, outputs: None = None, **keyword_inputs: Tensor
    ) -> float: ...

    @overload
    def eval_step(
        self, inputs: Tensor, targets: Tensor, *, outputs: Outputs, **keyword_inputs: Tensor
    ) -> tuple[float, Value]: ...

    def eval_step(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        outputs: Outputs | None = None,
        **keyword_inputs: Tensor,
    ) -> float | tuple[float, Value]:
        """The loss of a batch, forward only: no gradients, every module in evaluation mode.

        The number of rows may be any, also 0, and may differ between data-parallel ranks; ranks
        with the same ``data_parallel_rank`` give the same rows. Returns the mean over all rows of
        all ranks, or what ``loss_reduction`` says, equal on every rank; with ``outputs`` also what
        ``forward_only`` gives. It changes no state: a training run with evaluations in it is the
        same as one without. Raises ValueError where ranks of one pipeline have different rows, and
        otherwise what ``train_step`` does.
        """

        def given() -> Microbatches:
            parts = self._evaluation_batch(inputs, targets, keyword_inputs)
            self._check_targets(inputs, targets)
            return parts

        parts = self.engine.agree("eval_step", given)
        loss, value = self.engine.evaluate(parts, outputs)
        return loss if outputs is None else (loss, value)

    def forward_only(
        self, inputs: Tensor, *, outputs: Outputs = lambda output: output, **keyword_inputs: Tensor
    ) -> Value:
        """What the last layer gives for this rank's rows, as ``eval_step`` runs it, on every rank
        of a pipeline. ``outputs`` makes less of it before it is sent to them: from the output of a
        microbatch to tensors [rows, ...] (``lambda logits: logits[:, -1].argmax(-1)``)."""
        parts = self.engine.agree(
            "forward_only", lambda: self._evaluation_batch(inputs, inputs, keyword_inputs)
        )
        return self.engine.evaluate(replace(parts, targets=()), outputs)[1]

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        resume: bool = True,
        drop_last: bool = True,
        **more: Any,
    ) -> DataLoader[Any]:
        """This rank's rows of a data set with a length, step by step, from ``steps_done`` to the
        end of that epoch; a new loop begins the next one. Which rows a step has depends on ``seed``
        and its number alone: not on the topology, nor on where a run was interrupted. With
        ``resume=False`` every loop goes over the first epoch from its first row, as over rows that
        are not trained on. Rows that fill no batch are left out; without ``drop_last`` the last
        batch has them, too, which ``eval_step`` takes. ``more`` are options of
        ``torch.utils.data.DataLoader``. Raises InfeasibleError where ranks differ."""
        from zeropp.train.loader import make_loader

        order = {"shuffle": shuffle, "seed": seed, "resume": resume, "drop_last": drop_last}
        return make_loader(self, dataset, order, **more)

    @property
    def steps_done(self) -> int:
        """The steps that the model has been trained, with those of the checkpoint it was loaded
        from."""
        return self.engine.steps_done

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's shards, for ``torch.optim.lr_scheduler``. Where several were
        given it has the groups of all."""
        return self.engine.updater.optimizer

    def parameters(self) -> Iterator[nn.Parameter]:
        """The tensors that this rank's optimizer updates: one flat shard per group and buffer, and
        those that an optimizer gets whole. Over the ranks of a replica (over all ranks with
        ``replicate_zero``) they add up to the model's trained parameters, and padding.
        ``full_parameters`` has the layers' own, by name."""
        return self.engine.update.parameters()

    def train(self, mode: bool = True) -> Self:
        """Set the mode in which ``train_step`` runs this rank's layers, as ``nn.Module.train``
        does: of every module in them. At first they have the modes that they came with. An
        ``eval_step`` needs no call, and leaves modes as they are."""
        for layer in self.engine.layers.values():
            layer.train(mode)
        return self

    def eval(self) -> Self:
        """``train(False)``: training steps drop nothing until ``train()``."""
        return self.train(False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks by their global norm, the L2 norm by default, which is
        returned, as FSDP's method of this name does; for a hook of
        ``model.optimizer.register_step_pre_hook``, where the largest norm changes from step to
        step. Raises RuntimeError outside of an update, and ValueError for a ``norm_type`` (which
        may be infinite) that is not more than 0."""
        return self.engine.update.clip_grad_norm(max_norm, norm_type)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies of this rank's layers, named ``{layer}.{parameter}``."""
        return self.engine.on_all_ranks("full_parameters", self.engine.full_parameters)

    def full_state_dict(self) -> dict[str, Tensor]:
        """On rank 0 all parameters, unsharded, fp32 and on the CPU, and all persistent buffers,
        named ``{layer}.{parameter}``; empty on the other ranks. A tied parameter is there under
        each of its names, as in a plain model's state dict. For models that fit into one machine's
        memory."""
        rank, own_part = dist.get_rank(), self.engine.full_state()
        parts: list[dict[str, Tensor]] | None = [{}] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(own_part if self.plan.layout.is_first(rank) else {}, parts, dst=0)
        return {name: value for part in parts or [] for name, value in part.items()}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded CPU copies of the last step's gradients of this rank's layers, after clipping,
        named ``{layer}.{parameter}``: from ``train_step`` until the next one begins."""
        return self.engine.on_all_ranks("gradients", self.engine.full_gradients)

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps have updated nothing because their gradients were not finite."""
        return self.engine.skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of everything, for ``torch.distributed.checkpoint``, which takes the
        model as it is: ``dcp.save({"model": model}, checkpoint_id=folder)``.

        Parameters and persistent buffers are named as in the unsharded model
        (``{layer}.{parameter}``), beside ``optimizer``, ``steps_done`` and ``skipped_steps``. Each
        parameter has the unsharded shape and the values that this rank keeps, so any topology, or
        one process with a plain state dict, reads what another has written.
        """
        return self._checkpointer.named(self._checkpointer.state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``torch.distributed.checkpoint.load`` has read into ``state_dict()``, or whole
        tensors by name: all parameters and buffers of this rank and, if given, the optimizer's
        state. More names than a rank needs may be given.

        Raises ValueError, the same on every rank and before anything is changed, if a name is
        missing, if no rank knows it, or if its tensor has another shape.
        """
        self._checkpointer.load_named(state_dict)

    def save(self, directory: Path | str) -> None:
        """Write a checkpoint that any topology can load: parameters, persistent buffers, optimizer,
        steps done. ``torch.distributed.checkpoint.load({"model": model}, ...)`` reads it, too.

        An interrupted save leaves no half checkpoint: the last one with that name stays until this
        one is complete. Raises CheckpointError where other files have that name, or lie in its
        folder.
        """
        self._checkpointer.save(directory)

    def load(self, directory: Path | str, *, weights_only: bool = False) -> None:
        """Read a checkpoint of this topology or another, of ``save`` or of
        ``torch.distributed.checkpoint.save({"model": model}, ...)``; with ``weights_only`` its
        parameters and buffers alone, without optimizer and number of steps. Raises CheckpointError
        where a file of ``save`` is missing or is not as it was written, or where it has other
        layers or another optimizer's state."""
        self._checkpointer.load(directory, weights_only=weights_only)

    def save_on_signal(
        self, directory: Path | str, signals: Sequence[int] = (SIGTERM, SIGUSR1)
    ) -> None:
        """Save and end when a job is to be preempted: once a rank has been sent one of ``signals``,
        the next ``train_step`` to begin ends with a checkpoint in ``directory`` and SystemExit of
        128 and the signal's number, on all ranks. All ranks must call it, in their main threads.
        Raises CheckpointError as ``save``."""
        from zeropp.engine.checkpoint import place_of  # now: at the signal it would be too late

        self.engine.on_all_ranks("save_on_signal", lambda: place_of(directory))
        self._save_to = directory
        for number in signals:
            signal(number, lambda sent, frame: setattr(self.engine, "signal", int(sent)))

    def close(self) -> None:
        """End this model's threads and process groups; it cannot be used afterwards."""
        self.engine.close()

    def __reduce__(self) -> NoReturn:
        """Refuse copies; raises TypeError."""
        raise TypeError(
            "a model of parallelize has process groups, so that it cannot be copied or pickled "
            "(take save, state_dict or full_state_dict)"
        )

    def __enter__(self) -> ParallelModel:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:  # else peers may wait for this rank, and closing would wait for them
            self.close()

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        from zeropp.engine.checkpoint import Checkpointer  # which takes torch long to import

        return Checkpointer(self.engine)

    def _check_ready(self) -> None:
        device = self.engine.lanes.device
        if device.type == "cuda":  # each thread has a current device, whose streams a step uses
            torch.cuda.set_device(device)
        if torch.is_autocast_enabled(device.type):
            # It would compute in copies of the weights from before the last update.
            raise RuntimeError(
                "train_step, eval_step: torch.autocast is enabled (leave it, and ask parallelize "
                "for precision='bf16', or enter it inside the layers' forward)"
            )

    def training_batch(
        self, inputs: Tensor, targets: Tensor, **keyword_inputs: Tensor
    ) -> Microbatches:
        """This rank's microbatches of a step; raises as ``train_step`` does."""
        self._check_ready()
        if not torch.is_grad_enabled():
            raise RuntimeError("train_step: gradients are disabled (leave torch.no_grad first)")
        self.engine.updater.check_rates()
        parts = self._microbatches(inputs, targets, keyword_inputs)
        self._check_targets(inputs, targets)
        rows = self.rows.stop - self.rows.start
        for name, part in {"inputs": inputs, "targets": targets, **keyword_inputs}.items():
            if len(part) != rows:
                raise ValueError(
                    f"{name}: {len(part)} rows, but this rank trains on {rows} rows per step; give "
                    "it its own part of the global batch (see `rows`, `data_parallel_rank`)"
                )
            if part.requires_grad:
                raise ValueError(
                    f"{name}: needs a gradient, which no rank would add up (put what it is "
                    "computed from into the first layer, or detach the batch)"
                )
        return parts

    def _check_targets(self, inputs: Tensor, targets: Tensor) -> None:
        """Let a loss function that can look at the first targets do so."""
        look = said_of(self.engine.loss.function, "check_targets")
        if look is not None and len(inputs) and not self._has_looked:
            few = self.plan.microbatch_size
            look(inputs[:few], targets[:few])
            self._has_looked = True  # unless it raises, so that it does so again

    def _evaluation_batch(
        self, inputs: Tensor, targets: Tensor, keyword_inputs: Mapping[str, Tensor]
    ) -> Microbatches:
        self._check_ready()
        parts = self._microbatches(inputs, targets, keyword_inputs)
        counts = {name: len(part) for name, part in parts.whole.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"inputs: numbers of rows differ ({counts})")
        return parts

    def _microbatches(
        self, inputs: Tensor, targets: Tensor, keyword_inputs: Mapping[str, Tensor]
    ) -> Microbatches:
        """The parts of a batch, after a check that all are tensors on the right devices."""
        if set(keyword_inputs) != self._keywords:
            raise TypeError(
                f"keyword inputs are {sorted(keyword_inputs)}, but parallelize got "
                f"{sorted(self._keywords)} (sample_keywords)"
            )
        device = self.engine.lanes.device
        whole = {"inputs": inputs, "targets": targets, **keyword_inputs}
        for name, part in whole.items():
            is_dense = isinstance(part, Tensor) and part.layout is torch.strided
            if not is_dense or part.is_nested or not part.dim():
                raise TypeError(
                    f"{name}: must be a dense tensor with this rank's rows in dimension 0, but is "
                    f"{type(part).__name__} (also on pipeline ranks whose layers do not read it)"
                )
            if part.device != device:
                raise ValueError(
                    f"{name}: is on {part.device}, but this rank trains on {device} (move the "
                    f"batch there: .to({str(device)!r}))"
                )
        if not len(inputs):
            return Microbatches((), (), whole=whole)
        context, memory = self.engine.context, inputs.untyped_storage()
        for name, part in whole.items() if self.plan.logits_slices > 1 else ():
            if name not in self._without_tokens and part.shape[1:2] != inputs.shape[1:2]:
                raise ValueError(
                    f"{name}: {tuple(part.shape)} are not divided as inputs {tuple(inputs.shape)} "
                    f"are, which logits_slices={self.plan.logits_slices} needs (take 1)"
                )
        own = dict(whole) if context is None else context.parts(whole)
        if any(own[name].untyped_storage() is memory for name in own if name != "inputs"):
            own["inputs"] = own["inputs"].clone()  # a layer may change these on one rank alone
        return Microbatches.cut(own, self.plan.microbatch_size, whole)


def describe(plan: Plan) -> str:
    """The degrees and knobs of a plan, and its layers per stage, in one line."""
    layout, order = plan.layout, plan.schedule
    context = f"context={layout.context} " if layout.context > 1 else ""
    counts = " ".join(str(end - begin) for begin, end in pairwise(plan.cuts))
    return (
        f"pp={layout.pp} shard={layout.shard} {context}replicate={layout.replicate} "
        f"chunks={layout.chunks} "
        f"unit={order.unit} activation_cap={plan.activation_cap} recompute={plan.recompute}; "
        f"{order.num_microbatches} microbatches, layers per stage: {counts}"
    )
