"""Times kernels on the CPU that is here: those of a rank's log, each with real tensors of the
shapes and strides that the emulated one had."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropp.emulate.device import Tensors
from zeropp.emulate.log import Kernel

_WARMUP, _REPEATS = 2, 9
_TOO_LARGE_FOR_CACHES = 64 * 2**20  # bytes


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


def seconds_of(kernel: Kernel) -> float:
    """The median of some calls of a kernel. They take turns over so many sets of tensors that a
    call does not find its own in the caches, as in a step."""
    space, _, operator = kernel.name.partition("::")
    function = getattr(getattr(torch.ops, space), operator)
    size = sum(known.elements * known.dtype.itemsize for known in _tensors(kernel.call))
    sets = [
        {key: _with_values(value) for key, value in kernel.call}
        for _ in range(max(1, min(_REPEATS, _TOO_LARGE_FOR_CACHES // max(1, size))))
    ]
    with torch.no_grad():
        samples = [_timed(function, sets[i % len(sets)]) for i in range(_WARMUP + _REPEATS)]
    return median(samples[_WARMUP:])


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


def _tensors(value: Any) -> list[_Strided]:
    if isinstance(value, _Strided):
        return [value]
    return [t for part in value for t in _tensors(part)] if isinstance(value, tuple) else []


def _with_values(value: Any) -> Any:
    """Random numbers; indices are zeros, which are in every table."""
    if isinstance(value, _Strided):
        values = torch.zeros(value.elements, dtype=value.dtype)
        if value.dtype.is_floating_point:
            values.normal_()
        return values.as_strided(value.shape, value.stride)
    return [_with_values(part) for part in value] if isinstance(value, tuple) else value
