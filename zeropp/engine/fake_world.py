"""One rank of a large job, alone in a process, over torch's ``fake`` process group.

The group answers at once. A gather copies this rank's part into the place of every part, and a
reduction returns this rank's part. The group does not write into received tensors; the caller of
this module can do so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zeropp.engine.lanes import inline_lanes

Fill = Callable[[Tensor], None]


@contextmanager
def fake_world(rank: int, size: int, fill_integers: Fill | None = None) -> Iterator[None]:
    """Inside this context the process is rank ``rank`` of ``size``, for torch and in the usual
    environment variables.

    ``fill_integers`` fills a received message of integers with what peers would have sent; messages
    of floating-point numbers are random, because products of zeros are faster on a GPU. With None,
    messages are not filled (fake tensors have no values).
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=size)
    originals = {name: getattr(distributed_c10d, name) for name in ("recv", "irecv")}
    work: Any = type(dist.all_reduce(torch.zeros(1), async_op=True))
    completed = work.is_completed
    # A send ends at once; otherwise its tensor would be kept until the end of the step.
    work.is_completed = lambda _: True
    try:
        if fill_integers is not None:
            _replace({n: _filled(original, fill_integers) for n, original in originals.items()})
        with inline_lanes():
            yield
    finally:
        _replace(originals)
        work.is_completed = completed
        dist.destroy_process_group()


def _filled(original: Any, fill_integers: Fill) -> Any:
    def receive(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                fill_integers(tensor)
        return original(tensor, *arguments, **keywords)

    return receive


def _replace(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        for module in (dist, distributed_c10d):  # torch's batched messages compare them by identity
            setattr(module, name, function)
