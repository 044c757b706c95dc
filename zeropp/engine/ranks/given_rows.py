"""What ranks were given for a step, as numbers that they compare: ranks of one pipeline need the
same rows, because the first stage reads the inputs, the last one the targets.

A checksum is the same on every device. It looks at the bits of every element and at their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.ranks.collectives import as_sent
from zeropp.engine.ranks.errors import ErrorBarrier
from zeropp.types.layout import Layout

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_NOT_COMPARED = 0  # the number of what has no values, or was not read yet


class RowsError(ValueError):
    """Ranks were given rows that do not go together; every rank raises it before anything runs, but
    on a GPU, where the host does not wait for the rows, in the step after it."""


class GivenRows:
    """Compares the rows that ranks of one pipeline were given. ``names``: of all parts of a batch.

    On a GPU a step's checksums are copied to the host while it runs, and compared in the next step:
    by then they have long arrived, unless the host is more than a step ahead of the device. (The
    tests run on CPUs and have not seen this path.)
    """

    def __init__(self, names: Iterable[str], layout: Layout, device: torch.device) -> None:
        self._names, self._layout = sorted(names), layout
        self._is_late = device.type == "cuda"
        self._on_their_way: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def count(self) -> int:
        """How many numbers ``numbers`` gives."""
        return len(self._names)

    def numbers(self, call: str, batch: Mapping[str, Tensor]) -> list[int]:
        """What this rank has to compare in a ``call`` that is given this batch."""
        if self._layout.world == self._layout.dp or not batch:
            return [_NOT_COMPARED] * self.count
        if self._is_late and call == "train_step":
            if self._on_their_way is None:
                return [_NOT_COMPARED] * self.count
            on_host, arrived = self._on_their_way
            arrived.synchronize()
            return [int(number) for number in on_host]
        return [int(checksum(batch[name])) for name in self._names]

    def begin(self, batch: Mapping[str, Tensor]) -> None:
        """Let the checksums of a training batch that all ranks have accepted be on their way."""
        if self._layout.world == self._layout.dp or not self._is_late or not batch:
            return
        on_host = torch.empty(self.count, dtype=torch.long, pin_memory=True)
        for number, name in enumerate(self._names):
            on_host[number].copy_(checksum(batch[name]), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._on_their_way = on_host, arrived

    def check(self, call: str, given: Sequence[Sequence[int]]) -> None:
        """Raise RowsError if ranks of one pipeline have other ``numbers``, which are by rank."""
        late = self._is_late and call == "train_step"
        when = " in the step before this one, which is trained wrongly" if late else ""
        for ranks in self._layout.alike:
            for name, *sums in zip(self._names, *(given[rank] for rank in ranks), strict=True):
                if len({*sums} - {_NOT_COMPARED}) > 1:
                    raise RowsError(
                        f"{call}: ranks of one pipeline were given different rows{when}: {name!r} "
                        f"is not the same on ranks {list(ranks)} (take model.rows of the global "
                        "batch, or a DistributedSampler with rank=model.data_parallel_rank and "
                        "num_replicas=model.data_parallel_size)"
                    )

    def check_apart(self, batch: Mapping[str, Tensor], barrier: ErrorBarrier) -> None:
        """Raise RowsError if all data-parallel ranks were given the same rows, which do differ
        among themselves; collective."""
        if self._layout.dp == 1 or not batch or "fake" in str(dist.get_backend_config()):
            return
        own = [int(checksum(batch[name])) for name in ("inputs", "targets")]
        given = barrier.exchange(own)
        inputs = batch["inputs"]
        if any(numbers != given[0] for numbers in given) or _NOT_COMPARED in own:
            return
        if (inputs != inputs.flatten()[0]).any() and (
            len(inputs) < 2 or (inputs != inputs[0]).any()
        ):
            raise RowsError(
                "train_step: all data-parallel ranks were given the same rows (take model.rows of "
                "the global batch, or a DistributedSampler with rank=model.data_parallel_rank and "
                "num_replicas=model.data_parallel_size; to train on one batch again and again, "
                "make global_batch as large as it)"
            )


def checksum(part: Tensor) -> Tensor:
    """A number, in int64, of a tensor of rows [rows, ...]: a sum of the bits of all elements, each
    times odd numbers of its row and of its place in that, which follow no pattern."""
    if part.is_meta or not part.numel():
        return torch.tensor(_NOT_COMPARED if part.is_meta else 1)
    numbers = as_sent(part.detach()).view(len(part) if part.dim() else 1, -1)
    size = numbers.itemsize if numbers[0].nbytes % 8 else 8
    bits = numbers.view(_INTEGERS[size]).long()
    odd = _odd(bits.shape[1], bits)
    rows = bits.mv(odd) if bits.is_cpu else (bits * odd).sum(1)  # CUDA has no such mv
    total = (rows * _odd(len(rows), rows, first=2**32)).sum() + part.numel()
    return torch.where(total == _NOT_COMPARED, 1, total)


def _odd(count: int, like: Tensor, first: int = 1) -> Tensor:
    """Odd numbers of 64 bits without a pattern (the mixing of splitmix64)."""
    mixed = torch.arange(first, first + count, device=like.device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 27)) | 1
