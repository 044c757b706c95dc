"""Faults inside of contenders that raise no error: gradients that are reduced wrongly, and what a
careless adapter of Megatron-Core does."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as instructions
from torch import Tensor, nn

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.pipeline import PipelineTrainer
from baselines.megatron_core import trainer as megatron
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import open_batches
from benchmarks.worker.gate import run_gate
from tests.gloo.gate_place import Fault, Place, Prepare, patched, prepared

_TIED = (
    "zeropp.engine.parameters.tied.TiedWeights.sum_gradients",
    "baselines.torch_pp.trainer.TiedEnds.sum_gradients",
    "megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads",
)


def tied_gradients(times: int) -> Fault:
    """The gradients of tied weights are summed this many times: 0 leaves each end its own half."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        def prepare(trainer: Any) -> Any:
            if isinstance(trainer, PipelineTrainer):
                # DeepSpeed's table of handlers: the only place between two of its instructions.
                handlers = trainer._engine._INSTRUCTION_MAP
                kind = instructions.ReduceTiedGrads
                handlers[kind] = _repeated(handlers[kind], times)
            return trainer

        with ExitStack() as stack:
            for path in _TIED:
                owner, _, name = path.rpartition(".")
                original = getattr(pkgutil.resolve_name(owner), name)
                stack.enter_context(mock.patch(path, _repeated(original, times)))
            yield prepare

    return fault


def _repeated(function: Callable[..., Any], times: int) -> Callable[..., None]:
    """A function that runs this many times whenever it is called."""

    def repeated(*arguments: Any, **keywords: Any) -> None:
        for _ in range(times):
            function(*arguments, **keywords)

    return repeated


@contextmanager
def dropped_reduction(place: Place) -> Iterator[Prepare]:
    """One reduction of gradients in each step is lost."""
    calls = [0]

    def losing(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(*arguments: Any, **keywords: Any) -> Any:
            work = original(*arguments, **keywords)
            output = keywords["output"] if "output" in keywords else arguments[0]
            if calls[0] == 0:
                if work is not None:
                    work.wait()
                output.zero_()
            calls[0] += 1
            return work

        return reduce

    def prepare(trainer: Any) -> Any:
        step = trainer.step

        def counted(inputs: Tensor, targets: Tensor) -> Any:
            calls[0] = 0
            return step(inputs, targets)

        trainer.step = counted
        if isinstance(trainer, PipelineTrainer) and place.pp == 0:
            handlers = trainer._engine._INSTRUCTION_MAP
            handlers[instructions.ReduceGrads] = _alone(handlers[instructions.ReduceGrads])
        if isinstance(trainer, OrdinaryTrainer):
            engine = trainer._engine
            engine.allreduce_gradients = _alone(engine.allreduce_gradients)
        if isinstance(trainer, megatron.MegatronTrainer) and place.pp == 0:
            buckets = trainer._chunks[0].bucket_groups[0]
            buckets.finish_grad_sync = _emptied(buckets)
        return trainer

    with ExitStack() as stack:
        for module, name in _reductions():
            wrapped = losing(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield prepare


def _reductions() -> Iterator[tuple[Any, str]]:
    """Where reduce-scatters are called: torch's own functions, and what modules made of them. One
    of DeepSpeed's modules keeps torch's from when it was made, and is called by its own name."""
    yield deepspeed.comm, "reduce_scatter_fn"
    for module in (dist, *(m for n, m in sys.modules.items() if n.startswith("zeropp.engine."))):
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(module, name):
                yield module, name


def _emptied(buckets: Any) -> Callable[..., None]:
    """The end of a reduction of Megatron-Core's, whose result is lost."""
    finish = buckets.finish_grad_sync

    def run(**keywords: Any) -> None:
        finish(**keywords)
        for bucket in buckets.buckets:
            bucket.grad_data.zero_()

    return run


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose all-reduces do nothing."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with mock.patch.object(dist, "all_reduce", mock.MagicMock()):
            return function(*arguments, **keywords)

    return run


def _without_norm(place: Place, trainer: Any) -> None:
    """Without clipping, the optimizer that others are chained around takes no norm."""
    (inner,) = trainer._inner
    inner.config.clip_grad = 0.0
    trainer._optimizer.step = lambda: (True, inner.step()[1] or 0.0, None)


def _with_stale_weights(place: Place, trainer: Any) -> None:
    for chunk in trainer._chunks:
        chunk.start_param_sync = lambda *_, **__: None


def _with_batched_messages(place: Place, trainer: Any) -> None:
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


def _uninitialised(place: Place, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: replace(original(*arguments), perform_initialization=False)


class _UnmarkedNorm:
    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return nn.LayerNorm(hidden_size, eps=eps)


MEGATRON_FAULTS: dict[str, Fault] = {
    "no clipping, and so no norm": prepared(_without_norm),
    "weights read before they are gathered": prepared(_with_stale_weights),
    "messages of interleaved stages batched": prepared(_with_batched_messages),
    "the loss divided by the schedule": patched(
        megatron, "_forward_step", lambda *_: _aliased_loss
    ),
    "parameters not initialised by Megatron-Core": patched(
        megatron, "_transformer_config", _uninitialised
    ),
    "norms not marked for sequence parallelism": patched(
        megatron, "Norm", lambda *_: _UnmarkedNorm
    ),
    "Megatron-Core's own Adam": patched(megatron, "_step_with", lambda *_: lambda *__: None),
}
