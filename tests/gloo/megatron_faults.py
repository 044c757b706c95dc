"""Faults that a careless adapter of Megatron-Core has, and that raise no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from baselines.megatron_core import trainer as megatron
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import open_batches
from benchmarks.worker.gate import run_gate
from tests.gloo.gate_place import Fault, Place, Prepare


def _changing(change: Callable[[Any], None]) -> Fault:
    """Something is changed in a trainer that was built."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        del place

        def prepare(trainer: Any) -> Any:
            change(trainer)
            return trainer

        yield prepare

    return fault


def _replacing(name: str, other: Any) -> Fault:
    """Something in the trainer's module is replaced while trainers are built and run."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        del place
        with mock.patch.object(megatron, name, other):
            yield lambda trainer: trainer

    return fault


def _without_norm(trainer: Any) -> None:
    """Without clipping, the optimizer that others are chained around takes no norm."""
    (inner,) = trainer._inner
    inner.config.clip_grad = 0.0
    trainer._optimizer.step = lambda: (True, inner.step()[1] or 0.0, None)


def _with_stale_weights(trainer: Any) -> None:
    for chunk in trainer._chunks:
        chunk.start_param_sync = lambda *_, **__: None


def _with_batched_messages(trainer: Any) -> None:
    trainer._config.overlap_p2p_comm, trainer._config.batch_p2p_comm = False, True


def _aliased_loss(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    tokens, labels = next(batches)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = per_token.float().mean()
        return mean, {"loss": mean.detach()}

    return model(tokens, positions, None, labels=labels), loss


def gate_without_last_reduction(spec: RunSpec) -> None:
    """On a rank: the gate of a Megatron-Core whose gradients are never finalised."""
    with mock.patch.object(megatron, "finalize_model_grads"):
        run_gate(spec, CONTENDERS[spec.contender.name], open_batches(spec), torch.device("cpu"))


def _uninitialised(*arguments: Any) -> Any:
    return replace(_TRANSFORMER_CONFIG(*arguments), perform_initialization=False)


class _UnmarkedNorm:
    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        del config
        return nn.LayerNorm(hidden_size, eps=eps)


_TRANSFORMER_CONFIG = megatron._transformer_config
MEGATRON_FAULTS: dict[str, Fault] = {
    "no clipping, and so no norm": _changing(_without_norm),
    "weights read before they are gathered": _changing(_with_stale_weights),
    "messages of interleaved stages batched": _changing(_with_batched_messages),
    "the loss divided by the schedule": _replacing("_forward_step", _aliased_loss),
    "parameters not initialised by Megatron-Core": _replacing(
        "_transformer_config", _uninitialised
    ),
    "norms not marked for sequence parallelism": _replacing("Norm", _UnmarkedNorm),
    "Megatron-Core's own Adam": _replacing("_step_with", lambda inner, config: None),
}
