"""Faults in how gradients are reduced: tied weights that are summed wrongly, a lost reduction."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.runtime.pipe import schedule as instructions
from torch import Tensor

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.pipeline import PipelineTrainer
from baselines.megatron_core.trainer import MegatronTrainer
from tests.gloo.gate_place import Fault, Place, Prepare

_TIED = (
    "zeropp.engine.tied.TiedWeights.sum_gradients",
    "baselines.torch_pp.trainer.TiedEnds.sum_gradients",
    "megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads",
)


def tied_gradients(times: int) -> Fault:
    """The gradients of tied weights are summed so many times: 0 leaves each end its own half."""

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
    """A function that runs so many times whenever it is called."""

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
        if isinstance(trainer, MegatronTrainer) and place.pp == 0:
            buckets = trainer._chunks[0].bucket_groups[0]
            buckets.finish_grad_sync = _emptied(buckets)
        return trainer

    with ExitStack() as stack:
        for module, name in _reductions():
            wrapped = losing(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield prepare


def _reductions() -> Iterator[tuple[Any, str]]:
    """Where reduce-scatters are called: torch's own functions, and what modules made of them."""
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
