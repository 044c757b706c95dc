"""One rank of a job of any size, alone in its process: the process group without peers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zeropp.emulate.private_names import is_fake, set_numbers, without_modes
from zeropp.engine.errors import ErrorBarrier
from zeropp.engine.interpreter import Evaluator, Passed

Fill = Callable[[Tensor], None]


@contextmanager
def fake_world(rank: int, size: int, fill_integers: Fill | None = None) -> Iterator[None]:
    """Inside this context the process is rank ``rank`` of ``size``, for torch and in the usual
    environment variables. The process group answers at once: a gather copies this rank's part into
    the place of every part, and a reduction returns this rank's part. What peers would say is what
    this rank says, and what would pass between stages is what the walk over the layers has found.

    ``fill_integers`` fills a received message of integers with what peers would have sent. Messages
    of floating-point numbers are random, because products of zeros are faster on a GPU, unless they
    are fake tensors, which have no values.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=size)
    messages = ("recv", "irecv")
    originals = {n: getattr(distributed_c10d, n) for n in (*messages, "all_gather_object")}
    work: Any = type(dist.all_reduce(torch.zeros(1), async_op=True))
    completed = work.is_completed
    # A send ends at once; otherwise its tensor would be kept until the end of the step.
    work.is_completed = lambda _: True
    try:
        _replace({"all_gather_object": _same_everywhere})
        if fill_integers is not None:
            _replace({name: _filled(originals[name], fill_integers) for name in messages})
        with (
            mock.patch.object(ErrorBarrier, "exchange", lambda _, numbers: [list(numbers)] * size),
            mock.patch.object(Evaluator, "boundaries", _known_boundaries),
        ):
            yield
    finally:
        _replace(originals)
        work.is_completed = completed
        dist.destroy_process_group()


def _filled(original: Any, fill_integers: Fill) -> Any:
    @wraps(original)
    def receive(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            if not tensor.is_floating_point():
                _fill(tensor, fill_integers)
            elif not is_fake(tensor):
                tensor.normal_()
        return original(tensor, *arguments, **keywords)

    return receive


def _fill(message: Tensor, fill_integers: Fill) -> None:
    if not is_fake(message):
        fill_integers(message)
        return
    with without_modes():
        numbers = torch.zeros(message.shape, dtype=message.dtype)
        fill_integers(numbers)
    set_numbers(message, numbers)


def _same_everywhere(objects: list[Any], local: Any, group: object = None) -> None:
    del group
    objects[:] = [local] * len(objects)


def _known_boundaries(evaluator: Evaluator, batch: object) -> Passed:
    """The shapes that the chunks were made for: there are no peers to run a microbatch with."""
    del batch
    passed: Passed = {}
    for stage, chunk in evaluator.chunks.items():
        passed |= {stage: chunk.arriving} if chunk.arriving else {}
        passed |= {stage + 1: chunk.leaving} if chunk.leaving else {}
    return passed


def _replace(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        for module in (dist, distributed_c10d):  # torch's batched messages compare them by identity
            setattr(module, name, function)
