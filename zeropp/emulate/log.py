"""The log of one rank: what its host issues to its device, in order. It imports no torch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from zeropp.types.operators import Attention, Product

COMPUTE = "compute"  # the stream on which a program begins
STEP = "a step"  # the place in a log where one begins, and where the last one ends

_DEPTH = 4  # frames of the caller that are shown
_NOT_SHOWN = ("/torch/", "zeropp/emulate/", "<frozen", "/site-packages/", f"{sys.base_prefix}/lib/")

Kind = Literal["kernel", "communication", "record", "wait", "sync", "meet", "place"]


@cache
def shown(name: str) -> str:
    """A file of code, as people see it; empty for those of libraries and of this package."""
    return "" if any(part in name for part in _NOT_SHOWN) else "/".join(name.split("/")[-2:])


def here() -> tuple[tuple[CodeType, int], ...]:
    """Where the caller is, outside of torch and of this package; innermost first."""
    frame: FrameType | None = sys._getframe(1)
    places: list[tuple[CodeType, int]] = []
    while frame is not None and len(places) < _DEPTH:
        if shown(frame.f_code.co_filename):
            places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


def line_here() -> str:
    """The innermost of these lines, for people."""
    return next((f" ({shown(code.co_filename)}:{line})" for code, line in here()), "")


class RankPart(NamedTuple):
    """What a communication kernel has in common with the kernels of ``ranks`` ranks: ``key`` is
    equal on all of them. ``content`` (type and shape) must be. ``moved``: its bytes on one rank.
    ``ends``: the ranks that send and receive it, if it is a message."""

    key: Hashable
    ranks: int
    content: str
    moved: int = 0
    ends: tuple[int, int] | None = None

    @property
    def among(self) -> tuple[int, ...]:
        """The ranks that take part."""
        key: Any = self.key
        (_, ranks, *_), _ = key
        return self.ends or ranks


def name_of(key: Any) -> str:
    """A message or a collective, for people."""
    name, number = key
    if isinstance(name, str):  # where hosts meet
        return f"{name} {number}"
    if len(name) == 3:
        return f"message {number} from rank {name[1]} to rank {name[2]}"
    group, ranks = name
    return f"collective {number} of group {group} (ranks {', '.join(map(str, ranks))})"


class Kernel(NamedTuple):
    """What one kernel computes: a matrix product or an attention, or neither, whose elements have
    this many bytes, and this many bytes that it reads and writes beside those of the product."""

    name: str
    moved: int = 0
    product: Product | Attention | None = None
    element: int = 4
    is_backward: bool = False  # of attention
    with_host: bool = False  # a copy between the device and its host


class Issued(NamedTuple):
    """One thing that a host does. ``stream`` is None where the host waits for the whole device;
    ``event`` is the number of a recorded event; ``what`` is for messages to people."""

    kind: Kind
    stream: str | None = None
    event: int = 0
    parts: tuple[RankPart, ...] = ()
    what: str = ""
    kernel: Kernel | None = None  # where somebody wants to know
    where: str = ""  # the same, of communication: the line of the program


Logs = Mapping[int, Sequence[Issued]]  # by rank


class Message(NamedTuple):
    """A message between two ranks of a group, which both name in the same way."""

    group: Hashable
    source: int
    target: int
    content: str
    moved: int = 0  # bytes


class Log:
    """What the host of one rank issues, in order. ``where`` gives the line of a program that is
    running, for messages to people."""

    def __init__(self) -> None:
        self.where: Callable[[], str] = str
        self.issued: list[Issued] = []
        self.open: dict[int, Issued] = {}  # of communication, what has not been left, by its place
        self._events = 0
        self._counts: Counter[Hashable] = Counter()

    def kernel(self, stream: str, what: Kernel | None = None) -> None:
        """Compute on a stream. Several kernels in a row without a description are one, as they
        end alike."""
        kernel = Issued("kernel", stream, kernel=what)
        if what is not None or not self.issued or self.issued[-1] != kernel:
            self.issued.append(kernel)

    def record(self, stream: str) -> int:
        """Record an event on a stream; returns its number."""
        self._events += 1
        self.issued.append(Issued("record", stream, self._events))
        return self._events

    def wait(self, stream: str, event: int) -> None:
        """Let a stream wait for an event."""
        self.issued.append(Issued("wait", stream, event))

    def follow(self, stream: str, other: str) -> None:
        """Let a stream wait for what another one holds so far."""
        self.wait(stream, self.record(other))

    def collective(
        self, stream: str, group: Hashable, ranks: int, what: str, moved: int = 0, size: str = ""
    ) -> None:
        """A collective of a group of ranks, with this many bytes on each; those of one group
        are matched by order. ``size``: what must be equal on all ranks beside ``what``."""
        self._communicate(
            stream, (RankPart(self._next(group), ranks, f"{what}{size}", moved),), what
        )

    def messages(self, stream: str, messages: Sequence[Message], what: str) -> None:
        """Messages in one kernel, in no order among each other, as those of a batch are. Those of
        one pair in one group and direction are matched by order."""
        parts = tuple(
            RankPart(self._next((group, source, target)), 2, content, moved, (source, target))
            for group, source, target, content, moved in messages
        )
        self._communicate(stream, parts, what)

    def _communicate(self, stream: str, parts: tuple[RankPart, ...], what: str) -> None:
        issued = Issued("communication", stream, parts=parts, what=what, where=self.where())
        self.open[len(self.issued)] = issued
        self.issued.append(issued)

    def leave(self, begin: int, end: int | None = None) -> None:
        """The host has waited for what was issued at these places."""
        for place in range(begin, len(self.issued) if end is None else end):
            self.open.pop(place, None)

    def last_entered(self) -> str:
        """What has been entered and not left, the last few, for people."""
        texts = [
            f"{issued.what}: {', '.join(name_of(part.key) for part in issued.parts)}{issued.where}"
            for issued in [*self.open.values()][-3:]
        ]
        return f"entered and not left: {'; '.join(texts) or 'nothing'}"

    def sync(self, stream: str | None, what: str, event: int = 0) -> None:
        """The host waits for a stream, for one event on it, or with None for the whole device."""
        self.issued.append(Issued("sync", stream, event, what=what))

    def meet(self, key: Hashable, ranks: int) -> None:
        """The host waits for the hosts of this many ranks, as where a communicator is made."""
        self.issued.append(
            Issued("meet", parts=(RankPart(self._next(key), ranks, ""),), what=f"meets in {key}")
        )

    def place(self, what: str) -> None:
        """Name what follows, for messages to people."""
        self.issued.append(Issued("place", what=what))

    def _next(self, name: Hashable) -> Hashable:
        """The key of the next thing that some ranks do together under a name."""
        self._counts[name] += 1
        return name, self._counts[name]
