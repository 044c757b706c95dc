"""Work that all ranks do at the same time, and that fails on all ranks or on none.

If only one rank raised, the others would wait for it in their next collective until the process
group's timeout. So where a person's input is looked at (in ``parallelize``, before a step, around
checkpoints) every rank learns whether it was accepted everywhere; if not, every rank raises. An
error in the middle of a step is another matter: the rank that fails raises and ends, and its
launcher, or the timeout of the process groups, ends the others.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from zeropp.engine.ranks.collectives import all_gather_single
from zeropp.types.layout import InfeasibleError

T = TypeVar("T")
_SHOWN = 60  # characters of a value in a message
_REPORT = timedelta(seconds=10)  # for the ranks that have come to say so, once one is late


class LostRankError(RuntimeError):
    """A rank did not come to a collective, or ended before it. All others raise it."""


_LOST = (
    "lost the connection to a rank, or it did not come in time: the output of the rank that ended "
    "first says why; create a new model and load a checkpoint"
)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Inside this context an error of a backend's connection becomes LostRankError, in one line."""
    try:
        yield
    except RuntimeError as error:
        if re.search(r"closed by peer|reset by peer|[Tt]im(ed|e) ?out|Broken pipe", str(error)):
            raise LostRankError(f"{_LOST} [{str(error).splitlines()[0][:200]}]") from error
        raise


class PeerError(RuntimeError):
    """Another rank raised during work that all ranks do; the message says which rank and what."""


def together(work: Callable[[], T]) -> T:
    """The result of ``work`` on this rank, if it succeeded on all ranks. All ranks must call it.

    ``work`` must not run a collective that only some ranks reach. If it raises on any rank, every
    rank raises: the same InfeasibleError everywhere if one was raised, otherwise each rank's own
    error, and ``PeerError`` on ranks without an error.
    """
    return agree(lambda: (work(), {}))


def agree(work: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
    """What ``work`` gives on this rank, once it has succeeded on all ranks and what it describes
    beside it, by field, is the same on all of them. All ranks must call it.

    Raises what ``together`` raises, and InfeasibleError, with the field's name, on every rank for a
    description that differs.
    """
    result, failure = _attempt(work)
    reports, descriptions = zip(
        *gathered((_report(failure), result[0][1] if result else {})), strict=True
    )
    if any(summary for _, summary in reports):
        _raise_everywhere(failure, reports)
    _compare(descriptions)
    return result[0][0]


def _compare(fields: Sequence[Mapping[str, str]]) -> None:
    """Raise InfeasibleError for a field whose description is not the same on all ranks."""
    for rank, others in enumerate(fields):
        for name, text in fields[0].items():
            if text != others[name]:
                pairs = zip(text, others[name], strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(text))
                begin = max(text.rfind("(", 0, at), text.rfind("'", 0, at - 1), at - _SHOWN // 2, 0)
                ours, theirs = (x[begin : begin + _SHOWN] for x in (text, others[name]))
                raise InfeasibleError(
                    f"{name}: ranks differ: rank 0 has {ours} where rank {rank} has {theirs}; "
                    "every rank must call parallelize with equal arguments and layers of equal "
                    "values"
                )


class ErrorBarrier:
    """Where ranks meet before a step or an evaluation; all ranks must construct it.

    It has process groups of its own on the CPU, so that the host does not wait for the GPU.
    ``timeout``: how long a rank may come later than the others. ``count``: of a result's numbers.
    ``undo`` collects how to destroy the groups, which all ranks must do.
    """

    def __init__(self, timeout: timedelta | None, count: int, undo: ExitStack) -> None:
        self._count = count
        self.calls = 0  # how often ranks have met
        backend = "gloo" if "nccl" in str(dist.get_backend_config()) else None
        self._groups = [
            dist.new_group(backend=backend, timeout=timeout, group_desc=f"zeropp {name}")
            for name in ("barrier", "late ranks")
        ]
        for group in self._groups:
            undo.callback(dist.destroy_process_group, group)
        undo.callback(self._groups.clear)  # else they would live on

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
        self.calls += 1
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
            _raise_everywhere(failure, gathered(_report(failure), self._groups[0]))
        return result[0], [rank_numbers for _, _, *rank_numbers in rows]

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, as many on each, by rank; collective. Raises LostRankError, on
        rank 0 with the late ranks if it is not among them."""
        if dist.get_world_size() == 1:
            return [list(numbers)]
        sent = torch.tensor(numbers)
        every = torch.empty(dist.get_world_size() * len(numbers), dtype=torch.long)
        try:
            all_gather_single(every, sent, group=self._groups[0])
        except RuntimeError as error:
            late = ""
            try:
                # Else a rank has ended, to which that group would try to connect until its timeout.
                if re.search("time(d )?out", str(error), re.IGNORECASE):
                    dist.monitored_barrier(self._groups[1], timeout=_REPORT, wait_all_ranks=True)
            except RuntimeError as report:
                found = re.search(r"Ranks ?[\d, ]+ failed to pass", str(report))
                late = f" ({found[0]} a barrier)" if found else ""
            raise LostRankError(_LOST + late) from error
        return every.view(-1, len(numbers)).tolist()


def gathered(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, by rank, as pickle carries them. All ranks must call it."""
    values: list[T] = [own] * dist.get_world_size()
    dist.all_gather_object(values, own, group=group)
    return values


@contextmanager
def refusal(
    what: str, way_out: str = "", kind: type[InfeasibleError] = InfeasibleError
) -> Iterator[None]:
    """Inside this context an error becomes an InfeasibleError of this ``kind``, in one line: what
    failed, the first line of the error, and the way out."""
    try:
        yield
    except InfeasibleError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        more = f" ({way_out})" if way_out else ""
        raise kind(f"{what}: {lines[0]}{more}") from error


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


def _report(error: Exception | None) -> tuple[str, str]:
    """The refusal that every rank is to raise, if the error is one, and the error in one line."""
    lines = str(error).strip().splitlines()[:1] if error is not None else []
    summary = "" if error is None else ": ".join([type(error).__name__, *lines])
    return str(error) if isinstance(error, InfeasibleError) else "", summary


def _raise_everywhere(error: Exception | None, reports: Sequence[tuple[str, str]]) -> NoReturn:
    """After work that failed on some rank, raise what reports it on this rank."""
    refusals, summaries = zip(*reports, strict=True)
    for rank, refusal in enumerate(refusals):
        if refusal:
            everywhere = len(set(refusals)) == 1
            raise InfeasibleError(refusal if everywhere else f"{refusal} (on rank {rank})")
    if error is not None:
        raise error
    rank, line = next((rank, line) for rank, line in enumerate(summaries) if line)
    raise PeerError(f"rank {rank} raised {line}")
