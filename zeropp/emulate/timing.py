"""Times kernels on the CPU that is here: those of a rank's log, each with real tensors of the
shapes and strides that the emulated one had."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropp.emulate.device import Tensors
from zeropp.emulate.log import Kernel

_WARMUP, _REPEATS = 1, 5


class _Strided(NamedTuple):
    """What a tensor is without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """From the first to the last in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


def called(name: str, reads: Tensors, writes: Tensors, arguments: Mapping[str, Any]) -> Kernel:
    """What the kernel of an operator is called with; for ``VirtualDevice.describe``."""
    del reads, writes
    return Kernel(name, call=tuple((key, _without_values(v)) for key, v in arguments.items()))


def seconds_of(kernels: Sequence[Kernel]) -> dict[Kernel, float]:
    """Seconds of each kernel: the mean of its calls where all run in this order, of some such runs
    the median. So a call finds in the caches what the kernels before it have left there."""
    calls = {kernel: _call_of(kernel) for kernel in kernels}
    means: dict[Kernel, list[float]] = {kernel: [] for kernel in calls}
    with torch.no_grad():
        for _ in range(_WARMUP + _REPEATS):
            samples: dict[Kernel, list[float]] = {kernel: [] for kernel in calls}
            for kernel in kernels:
                samples[kernel].append(_timed(*calls[kernel]))
            for kernel, seconds in samples.items():
                means[kernel].append(fmean(seconds))
    return {kernel: median(found[_WARMUP:]) for kernel, found in means.items()}


def _call_of(kernel: Kernel) -> tuple[Callable[..., Any], dict[str, Any]]:
    space, _, operator = kernel.name.partition("::")
    function = getattr(getattr(torch.ops, space), operator)
    return function, {key: _with_values(value) for key, value in kernel.call}


def _timed(function: Callable[..., Any], arguments: Mapping[str, Any]) -> float:
    begin = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - begin


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Strided(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, torch.Generator):
        return None  # that of its process, which no other has
    return tuple(map(_without_values, value)) if isinstance(value, list | tuple) else value


def _with_values(value: Any) -> Any:
    """Random numbers; indices are zeros, which are in every table."""
    if isinstance(value, _Strided):
        values = torch.zeros(value.elements, dtype=value.dtype)
        if value.dtype.is_floating_point:
            values.normal_()
        return values.as_strided(value.shape, value.stride)
    return [_with_values(part) for part in value] if isinstance(value, tuple) else value
