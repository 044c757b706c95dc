"""Work that all ranks do at the same time, and that fails on all ranks or on none.

If only one rank raised, the others would wait for it in their next collective until the process
group's timeout. So after the work every rank learns whether it succeeded everywhere; if not, every
rank raises.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from zeropp.layout import InfeasibleError

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another rank raised during work that all ranks do; the message says which rank and what."""


def together(work: Callable[[], T]) -> T:
    """The result of ``work`` on this rank, if it succeeded on all ranks. All ranks must call it.

    ``work`` must not run a collective that only some ranks reach. If it raises on any rank, every
    rank raises: the same InfeasibleError everywhere if one was raised, otherwise each rank's own
    error, and ``PeerError`` on ranks without an error.
    """
    failed = torch.zeros((), device=_control_device())  # allocated first, as memory may run out
    try:
        result = work()
    except Exception as error:
        failed += 1
        traceback.clear_frames(error.__traceback__)  # frees the tensors of the work
        _raise_everywhere(failed, error)
        raise
    _raise_everywhere(failed, None)
    return result


def _raise_everywhere(failed: torch.Tensor, error: Exception | None) -> None:
    """Raise the error that this rank must raise although it has none, if another rank has one."""
    dist.all_reduce(failed)
    if not float(failed):
        return
    refusals = gathered_texts(str(error) if isinstance(error, InfeasibleError) else "")
    for rank, refusal in enumerate(refusals):
        if refusal:
            everywhere = len(set(refusals)) == 1
            raise InfeasibleError(refusal if everywhere else f"{refusal} (on rank {rank})")
    others = gathered_texts("" if error is None else _one_line(error))
    if error is None:
        rank, line = next((rank, line) for rank, line in enumerate(others) if line)
        raise PeerError(f"rank {rank} raised {line}")


def gathered_texts(text: str) -> list[str]:
    """The texts of all ranks, by rank. All ranks must call it."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _control_device() -> torch.device:
    """The device for small collectives of the default group: the CPU if its backend accepts CPU
    tensors, otherwise this process's CUDA device."""
    devices = {entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")}
    return torch.device("cpu" if "cpu" in devices else "cuda")
