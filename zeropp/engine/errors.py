"""Work that all ranks do at the same time, and that fails on all ranks or on none.

If only one rank raised, the others would wait for it in their next collective until the process
group's timeout. So where a person's input is looked at (in ``parallelize``, before a step, around
checkpoints) every rank learns whether it was accepted everywhere; if not, every rank raises. An
error in the middle of a step is another matter: the rank that fails raises and ends, and its
launcher, or the timeout of the process groups, ends the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from zeropp.engine.collectives import all_gather_single
from zeropp.types.layout import InfeasibleError

T = TypeVar("T")
_REPORT = timedelta(seconds=10)  # for the ranks that have come to say so, once one is late


class PeerError(RuntimeError):
    """Another rank raised during work that all ranks do; the message says which rank and what."""


def together(work: Callable[[], T]) -> T:
    """The result of ``work`` on this rank, if it succeeded on all ranks. All ranks must call it.

    ``work`` must not run a collective that only some ranks reach. If it raises on any rank, every
    rank raises: the same InfeasibleError everywhere if one was raised, otherwise each rank's own
    error, and ``PeerError`` on ranks without an error.
    """
    failed = torch.zeros((), device=_control_device())  # first, as memory may run out
    result, failure = _attempt(work)
    failed += failure is not None
    dist.all_reduce(failed)
    if failure is not None or float(failed):
        _raise_everywhere(failure, None)
    return result[0]


class ErrorBarrier:
    """Where ranks meet before a step or an evaluation; all ranks must construct it.

    It has process groups of its own on the CPU, so that the host does not wait for the GPU.
    ``timeout``: how long a rank may come later than the others. ``count``: of a result's numbers.
    """

    def __init__(self, timeout: timedelta | None, count: int) -> None:
        self._count = count
        backend = "gloo" if "nccl" in str(dist.get_backend_config()) else None
        self._groups = [
            dist.new_group(backend=backend, timeout=timeout, group_desc=f"zeropp {name}")
            for name in ("barrier", "late ranks")
        ]

    def run(
        self,
        call: str,
        work: Callable[[], T],
        numbers: Callable[[T], Sequence[int]] | None = None,
    ) -> tuple[T, list[list[int]]]:
        """The result of ``work`` on this rank, if it succeeded on all ranks, as in ``together``;
        and the ``numbers`` of every rank's result (zeros without them).

        Raises RuntimeError on every rank if other ranks are in another ``call``, and on the ranks
        that have waited for others until the timeout.
        """
        result, failure = _attempt(work)
        code = sum(map(ord, call))
        # As many in every call, because ranks that are in different calls meet here, too.
        own = numbers(result[0]) if result and numbers else [0] * self._count
        rows = self.exchange([code, failure is not None, *own])
        elsewhere = [rank for rank, (other, *_) in enumerate(rows) if other != code]
        if elsewhere:
            raise RuntimeError(
                f"{call}: ranks {elsewhere} have called another method (all ranks must call the "
                "same methods in the same order)"
            )
        if any(failed for _, failed, *_ in rows):
            _raise_everywhere(failure, self._groups[0])
        return result[0], [rank_numbers for _, _, *rank_numbers in rows]

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, as many on each, by rank; collective. Raises RuntimeError that
        names late ranks, if rank 0 is not among them, on rank 0."""
        if dist.get_world_size() == 1:
            return [list(numbers)]
        sent = torch.tensor(numbers)
        every = torch.empty(dist.get_world_size() * len(numbers), dtype=torch.long)
        try:
            all_gather_single(every, sent, group=self._groups[0])
        except RuntimeError as error:
            dist.monitored_barrier(self._groups[1], timeout=_REPORT, wait_all_ranks=True)
            raise RuntimeError("lost the connection to a rank, or it timed out") from error
        return every.view(-1, len(numbers)).tolist()

    @property
    def is_closed(self) -> bool:
        """Whether its process groups were destroyed."""
        return not self._groups

    def close(self) -> None:
        """Destroy the process groups; all ranks must call it."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())


def gathered_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The texts of all ranks, by rank. All ranks must call it."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text, group=group)
    return texts


def free_frames(error: BaseException) -> None:
    """Free what the frames of failed work keep: tensors, and hooks of a failed checkpoint, which
    torch 2.11 would apply to others until its frame is gone."""
    traceback.clear_frames(error.__traceback__)


def _attempt(work: Callable[[], T]) -> tuple[list[T], Exception | None]:
    """What ``work`` gives, in a list, and what it raises."""
    try:
        return [work()], None
    except Exception as error:
        free_frames(error)
        return [], error


def _raise_everywhere(error: Exception | None, group: dist.ProcessGroup | None) -> NoReturn:
    """After work that failed on some rank, raise what reports it on this rank."""
    refusals = gathered_texts(str(error) if isinstance(error, InfeasibleError) else "", group)
    for rank, refusal in enumerate(refusals):
        if refusal:
            everywhere = len(set(refusals)) == 1
            raise InfeasibleError(refusal if everywhere else f"{refusal} (on rank {rank})")
    lines = str(error).strip().splitlines()[:1] if error is not None else []
    summary = "" if error is None else ": ".join([type(error).__name__, *lines])
    summaries = gathered_texts(summary, group)
    if error is not None:
        raise error
    rank, line = next((rank, line) for rank, line in enumerate(summaries) if line)
    raise PeerError(f"rank {rank} raised {line}")


def _control_device() -> torch.device:
    """The device for small collectives of the default group: the CPU if its backend accepts CPU
    tensors, otherwise this process's CUDA device."""
    devices = {entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")}
    return torch.device("cpu" if "cpu" in devices else "cuda")
