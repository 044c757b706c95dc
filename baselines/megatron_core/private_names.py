"""Names of Megatron-Core that it does not document, and what lets it run on CPUs.

A release of Megatron-Core may move or change them; for each one
``tests/gloo/test_private_names.py`` says what no longer works without it.

Megatron-Core asks for CUDA devices by name. On a CPU, its modules get a ``torch`` whose CUDA device
is the CPU (``run_on_cpu``): only the global name ``torch`` of modules ``megatron.core.*`` is
replaced, so that torch itself and other contenders in the process stay as they are. Two methods of
tensors, ``.cuda()`` and ``.type()`` (with which Megatron-Core checks that a parameter is on a GPU),
are replaced only while ``tensors_say_cuda`` is open. Nothing that is computed, sent or reduced is
replaced, except the norm of gradients, where Megatron-Core would use neither Transformer Engine's
kernel nor Apex's.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from zeropp.engine.update.update_rules import norm_power
from zeropp.schedule.program import Op

# Functions of Megatron-Core that a GPU runs as one compiled kernel each, where there is none.
NOT_COMPILED: list[Callable[..., Any]] = []


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    NOT_COMPILED.append(function)
    return function


# What is imported does not say that Transformer Engine and Apex are missing, and where there is no
# GPU does not import torch's compiler, with which Megatron-Core decorates functions.
_compile = torch.compile if torch.cuda.is_available() else _as_it_is
with warnings.catch_warnings(action="ignore"), mock.patch.object(torch, "compile", _compile):
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    from megatron.core.optimizer import clip_grads
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers as parallel_layers
    from megatron.core.tensor_parallel import random

_CPU = torch.device("cpu")
_PASSES = {Op.FORWARD: schedules.forward_step, Op.FULL_BACKWARD: schedules.backward_step}


def _l2_norm(size: int, flag: Tensor, lists: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """The norm of gradients where neither Transformer Engine nor Apex gives a kernel for all. In
    place of ``megatron.core.utils.local_multi_tensor_l2_norm``, with which the host waits once per
    gradient, and whose norm of one large tensor is off on a CPU."""
    del size, flag
    (gradients,) = lists
    squares = norm_power(((one, 1) for one in gradients), gradients[0].device)
    return squares.sqrt().float().view(1), None


if clip_grads.l2_norm_impl.__module__ == "megatron.core.utils":
    clip_grads.l2_norm_impl = _l2_norm


def supported_keywords(kind: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those of the keyword arguments that ``kind`` has in this release of Megatron-Core."""
    names = inspect.signature(kind).parameters
    return {name: value for name, value in values.items() if name in names}


def observe_passes(observed: Callable[..., Any]) -> None:
    """Let the schedules call ``observed(op, run, *arguments, **keywords)`` for every forward and
    backward of a microbatch in a chunk, where ``run`` is Megatron-Core's own function."""
    schedules.forward_step = partial(observed, Op.FORWARD, _PASSES[Op.FORWARD])
    schedules.backward_step = partial(observed, Op.FULL_BACKWARD, _PASSES[Op.FULL_BACKWARD])


def output_of_forward(result: Any) -> Tensor:
    """The output tensor in what ``forward_step`` returns; the schedule gives the same object to
    ``backward_step``."""
    return _only(result[0])


def output_of_backward(arguments: tuple[Any, ...]) -> Tensor:
    """The forward's output in the arguments of ``backward_step``."""
    return _only(arguments[1])


def _only(value: Any) -> Tensor:
    return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that one of Megatron-Core's consists of, each with torch's in its
    ``optimizer``."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def master_values(parameter: nn.Parameter, optimizers: list[Any]) -> tuple[Tensor, slice]:
    """(fp32 values of a 16-bit parameter that this rank updates, where they stand in the flattened
    parameter). The distributed optimizer gives each data-parallel rank a part, which may be none;
    otherwise every rank has all of them."""
    main: Tensor | None = getattr(parameter, "main_param", None)
    if main is None:
        return parameter.new_empty(0, dtype=torch.float32), slice(0, 0)
    for optimizer in optimizers:
        if hasattr(optimizer, "_get_model_param_range_map"):
            part = optimizer._get_model_param_range_map(parameter)["param"]
            return main.detach(), slice(part.start, part.end)
    return main.detach().view(-1), slice(0, parameter.numel())


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed with the kernel of Apex that adds weight gradients
    inside their product, which Megatron-Core needs for the output layer."""
    is_installed = importlib.util.find_spec("transformer_engine") is not None
    return is_installed and bool(parallel_layers._grad_accum_fusion_available)


def has_fused_functions(device: torch.device, gates: int) -> bool:
    """Whether functions run that Megatron-Core has fused by hand. On GPUs they are compiled. On
    CPUs torch has GELU as one kernel, and SwiGLU runs operator by operator, if there is no GPU;
    otherwise it would be compiled there, too."""
    return device.type == "cuda" or (gates == 2 and not torch.cuda.is_available())


def overlap_tensor_parallel(tokens: int, hidden: int, tp: int) -> None:
    """Make the buffers through which Transformer Engine's layers overlap tensor-parallel traffic
    with products, for hidden states [tokens, hidden] of a microbatch."""
    from transformer_engine.pytorch.module import base

    base.destroy_ub()
    base.initialize_ub(shape=[tokens, hidden], tp_size=tp, bootstrap_backend="nccl")


class _Proxy(ModuleType):
    """A copy of a module's names, which is as fast as the module, with some of them replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__)
        names = {name: value for name, value in vars(module).items() if name[:2] != "__"}
        self.__dict__.update(names | replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:  # what torch imports lazily
        return getattr(self.__dict__["_module"], name)


def run_on_cpu() -> None:
    """Give every imported module of Megatron-Core a ``torch`` whose CUDA device is the CPU. It may
    be called again."""
    nowhere = SimpleNamespace(wait_stream=nothing, wait_event=nothing)
    streams = {"synchronize": nothing, "current_stream": lambda *_: nowhere}
    give_torch(torch.get_rng_state, torch.set_rng_state, **streams)


def give_torch(
    get_state: Callable[[], Tensor], set_state: Callable[[Tensor], None], **streams: Any
) -> None:
    """As ``run_on_cpu``, with these states of random numbers, and these names of ``torch.cuda``."""
    cuda = _Proxy(
        torch.cuda,
        current_device=lambda: _CPU,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *_: get_state(),
        set_rng_state=lambda state, *_: set_state(state),
        **streams,
    )
    made = {
        name: _on_cpu(getattr(torch, name))
        for name in ("tensor", "zeros", "ones", "empty", "arange")
    }
    proxy = _Proxy(torch, cuda=cuda, get_rng_state=get_state, set_rng_state=set_state, **made)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
    random._get_cuda_rng_state = lambda *_, **__: get_state()
    random._set_cuda_rng_state = lambda state, *_, **__: set_state(state)


def nothing(*_: Any) -> None:
    """All that was given to the only stream of a CPU has ended."""


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*arguments: Any, **keywords: Any) -> Tensor:
        if str(keywords.get("device", "")).startswith("cuda"):
            keywords["device"] = _CPU
        return factory(*arguments, **keywords)

    return make


@contextmanager
def tensors_say_cuda(device: torch.device) -> Iterator[None]:
    """Inside, if ``device`` is a CPU, ``tensor.type()`` says ``torch.cuda.*Tensor`` and
    ``tensor.cuda()`` is the tensor itself."""
    if device.type != "cpu":
        yield
        return
    kind = torch.Tensor.type

    def type_(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = kind(tensor, *arguments, **keywords)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    with mock.patch.multiple(torch.Tensor, type=type_, cuda=lambda tensor, *_, **__: tensor):
        yield
