"""Work that all ranks do at the same time, and that fails on all ranks or on none.

If only one rank raised, the others would wait for it in their next collective until the process
group's timeout. So after the work every rank learns whether it succeeded everywhere; if not, every
rank raises.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.layout import InfeasibleError

# What an error keeps after work that failed: the frames of the work, with all that is in them.


def free_frames(error: BaseException) -> None:
    """Free the tensors and process groups in the frames of failed work, and in those of the errors
    during whose handling this one was raised.

    Torch, for example, writes a failed collective into its log, which fails in its turn if the
    process group was destroyed meanwhile.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]


T = TypeVar("T")
_PEER_IS_GONE = "the connections of another rank ended, or it is late"


class PeerError(RuntimeError):
    """Another rank raised during work that all ranks do; the message says which rank and what."""


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of ``work`` on this rank, if it succeeded on all ranks. All ranks must call it.
    ``group``: a group of all ranks, in which they tell each other; None: torch's default group.

    ``work`` must not run a collective that only some ranks reach. If it raises on any rank, every
    rank raises: the same InfeasibleError everywhere if one was raised, otherwise each rank's own
    error, and ``PeerError`` on ranks without an error.
    """
    failed = torch.zeros((), device=_control_device())  # allocated first, as memory may run out
    try:
        result = work()
    except Exception as error:
        failed += 1
        free_frames(error)
        dist.all_reduce(failed, group=group)
        _raise_everywhere(error, group)
        raise
    dist.all_reduce(failed, group=group)
    if float(failed):
        _raise_everywhere(None, group)
    return result


class Meeting:
    """Where ranks meet after work in which they wait for each other.

    Such work holds all ranks as soon as one of them raises. So that rank gives up (``give_up`` is
    to end the waiting of its peers, which then raise, too), and then all meet. ``group`` is a group
    of all ranks that the work does not use, and ``before`` one for what they agree on before it, in
    which a rank may come late by more than the work's timeout. Without ``give_up`` (NCCL, where a
    rank cannot end its peers' waiting) a rank raises at once, and its peers wait until their
    timeout.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        give_up: Callable[[], None] | None = None,
        *,
        before: dist.ProcessGroup | None = None,
    ) -> None:
        self._device, self._group, self._give_up = device, group, give_up
        self.before = before  # None: torch's default group
        self._given_up = self._updated = False

    def check(self) -> None:
        """Raise RuntimeError if a rank has given up, so that collectives are not possible."""
        if self._given_up:
            raise RuntimeError(
                "an earlier error ended the connections of this model's ranks (save still works; "
                "build the model anew and load a checkpoint)"
            )

    def sum(self, work: Callable[[], Tensor], size: int) -> Tensor:
        """The sum over all ranks of what ``work`` gives: ``size`` numbers in fp64.

        If it raises on any rank, every rank raises: its own error, or ``PeerError`` with the first
        error of another rank where its own only says that a peer has given up.
        """
        self.check()
        sums = torch.zeros(1 + size, dtype=torch.float64, device=self._device)
        failure: Exception | None = None
        with self.left_by_interrupts():
            try:
                sums[1:] = work()
            except Exception as error:
                if self._give_up is None:
                    raise
                self._end_work(error)
                failure = error
                sums[0] = 1.0
            self._meet(sums, failure)
        if float(sums[0]):
            _raise_everywhere(failure, self._group)
        if failure is not None:
            raise failure
        return sums[1:]

    def run(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on this rank, if it succeeded on all ranks; see ``sum``."""
        results: list[T] = []

        def keep() -> Tensor:
            results.append(work())
            return torch.empty(0)

        self.sum(keep, 0)
        return results[0]

    def agree(self, work: Callable[[], T]) -> T:
        """``together(work)``, in which a rank that is interrupted does not hold its peers. An error
        of ``work`` ends no connections."""
        with self.left_by_interrupts():
            try:
                return together(work, self.before)
            except RuntimeError as error:
                if self._give_up is None or not _is_of_a_peer(error):
                    raise
                self._end_work(error)
                self.close()
                raise PeerError(_PEER_IS_GONE) from error

    @contextmanager
    def left_by_interrupts(self) -> Iterator[None]:
        """Inside this context an interrupt of this rank ends its peers' waiting for it, also where
        they wait in a meeting."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if self._give_up is not None and not self._given_up:
                self._end_work(error)
                self.close()
            raise

    def update(self, work: Callable[[], object]) -> None:
        """Run an optimizer's step, in which no rank waits for another; if it raises on any rank,
        every rank raises, as in ``run``.

        Where ranks cannot give up (NCCL), this holds only for the first update, in which the
        optimizer makes its state: the host would wait in every step until the device has done the
        update.
        """
        if self._give_up is not None:
            self.run(work)
        elif self._updated:
            work()
        else:
            together(work)
        self._updated = True

    def close(self) -> None:
        """Destroy the process groups; all ranks must call it. On gloo this also ends the waiting of
        peers, as in ``DataGroups.close``."""
        groups = [self._group, self.before]
        self._group = self.before = None
        while groups:
            if (group := groups.pop()) is not None:
                dist.destroy_process_group(group)

    def _meet(self, sums: Tensor, failure: Exception | None) -> None:
        """Add up the sums of all ranks. A rank that does not meet its peers ends the connections of
        the meeting, too, because some peers may wait in it for this rank alone."""
        try:
            dist.all_reduce(sums, group=self._group)
        except Exception as late:
            if self._give_up is None:
                raise
            self._end_work(late)
            self.close()
            if failure is None and not _is_of_a_peer(late):
                raise
            if failure is None or _is_of_a_peer(failure):
                raise PeerError(_PEER_IS_GONE) from late
            raise failure  # noqa: B904 - the first error is what a person needs

    def _end_work(self, error: BaseException) -> None:
        """Give up, after an error, so that no peer waits for this rank in the work."""
        assert self._give_up is not None
        free_frames(error)
        self._give_up()
        self._given_up = True
        gc.collect()  # the frames of failed work, whose groups end with their last reference


def largest_of_all(number: int) -> int:
    """The largest of all ranks' numbers. All ranks must call it."""
    largest = torch.tensor(float(number), device=_control_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return max(number, int(float(largest)))  # fake tensors have no values


def sum_of_all(numbers: Tensor) -> Tensor:
    """The sum of all ranks' numbers. All ranks must call it."""
    numbers = numbers.to(_control_device())
    dist.all_reduce(numbers)
    return numbers


def _raise_everywhere(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """After work that failed on some rank, raise the InfeasibleError or PeerError that reports it
    on this rank. Returns only on a rank that has another error of its own to raise."""
    refusals = gathered_texts(str(error) if isinstance(error, InfeasibleError) else "", group)
    for rank, refusal in enumerate(refusals):
        if refusal:
            everywhere = len(set(refusals)) == 1
            raise InfeasibleError(refusal if everywhere else f"{refusal} (on rank {rank})")
    own = error is not None and not _is_of_a_peer(error)
    others = gathered_texts(_one_line(error) if error is not None and own else "", group)
    if own:
        return
    for rank, line in enumerate(others):
        if line:
            raise PeerError(f"rank {rank} raised {line}") from error
    if error is None:
        raise PeerError("the connections of another rank ended, and no rank reports another cause")


def _is_of_a_peer(error: Exception) -> bool:
    """Whether an error says no more than that a peer is gone: gloo's errors, whose messages name
    gloo's source files."""
    return isinstance(error, RuntimeError) and "third_party/gloo/" in str(error)


def gathered_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The texts of all ranks, by rank. All ranks must call it."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text, group=group)
    return texts


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _control_device() -> torch.device:
    """The device for small collectives of the default group: the CPU if its backend accepts CPU
    tensors, otherwise this process's CUDA device."""
    devices = {entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")}
    return torch.device("cpu" if "cpu" in devices else "cuda")
