"""Work that every rank does at the same time, and that fails on all ranks or on none.

A rank that raises alone would leave the others waiting for it in their next collective until the
process group's timeout. So after the work every rank learns whether it worked everywhere, and
every rank raises.
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
    """Another rank raised while all ranks did the same work; one line says which and what."""


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives on this rank, once it has worked on every rank; collective.

    ``work`` runs no collective that only some ranks reach. Where it raises on any rank, every rank
    raises: the same InfeasibleError everywhere if that is what was raised, otherwise a rank's own
    error, and ``PeerError`` on the ranks that have none.
    """
    failed = torch.zeros((), device=_control_device())  # made first: later memory may have run out
    try:
        result = work()
    except Exception as error:
        failed += 1
        traceback.clear_frames(error.__traceback__)  # frees what the work had made
        _raise_everywhere(failed, error)
        raise
    _raise_everywhere(failed, None)
    return result


def _raise_everywhere(failed: torch.Tensor, error: Exception | None) -> None:
    """Raise what a rank that has no error of its own must raise, if any rank has one."""
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
    """Every rank's text, by rank; collective."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _control_device() -> torch.device:
    """Where small collectives of the default group run: the CPU if its backend takes CPU tensors,
    else this process's CUDA device."""
    devices = {entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")}
    return torch.device("cpu" if "cpu" in devices else "cuda")
