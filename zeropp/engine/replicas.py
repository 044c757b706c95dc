"""Replicas of a shard group: how gradients cross them, and which rows each replica updates.

Without ZeRO-1 gradients are all-reduced and every replica updates its whole shard. With it
(arXiv 1910.02054) they are reduce-scattered, a replica updates its rows of every shard and holds
optimizer state for those alone, and the updated rows are gathered. Either way the optimizer sees
plain local tensors that share memory with the shards, so its step costs no dispatch through
DTensor, and ``distributed`` says what part of the whole they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from zeropp.engine.sharding import ChunkShards, local

Name = tuple[int, str]  # piece, parameter


class Replicas:
    """What this replica updates of one chunk.

    ``mesh`` has the dimensions ``shard`` and ``replicate``, in this order.
    """

    def __init__(
        self, parameters: Mapping[Name, nn.Parameter], mesh: DeviceMesh, zero: bool
    ) -> None:
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._mesh = mesh
        self._group = mesh.get_group("replicate")
        self._count, self._rank = self._group.size(), self._group.rank()
        self._zero = zero and self._count > 1
        self.owned = {name: self._own(p) for name, p in self._parameters.items()}
        self._buffer: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if mesh.device_type == "cuda" and self._count > 1:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def start_reduce(self, shards: ChunkShards) -> None:
        """Start to bring the chunk's gradients across the replicas, behind its reductions; those
        of one step add up."""
        if self._count == 1:
            return
        with self._beside_compute(shards):
            gradients = [self._local_gradient(parameter) for parameter in self._parameters.values()]
            if self._zero:
                parts = [self._rows(gradient) for gradient in gradients]
                slots = [rows[0].numel() for rows in parts]
                whole = torch.cat(
                    [_pack([rows[i] for rows in parts], slots) for i in range(self._count)]
                )
                reduced = whole.new_empty(sum(slots))
                dist.reduce_scatter_tensor(reduced, whole, group=self._group)
            else:
                reduced = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(reduced, group=self._group)
            reduced /= self._count
            self._buffer = reduced if self._buffer is None else self._buffer.add_(reduced)
            for parameter in self._parameters.values():
                parameter.grad = None

    def finish_reduce(self) -> None:
        """Give every owned parameter its gradient."""
        if self._count == 1:
            for name, parameter in self._parameters.items():
                gradient = parameter.grad
                self.owned[name].grad = None if gradient is None else local(gradient)
            return
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        assert self._buffer is not None
        offset = 0
        for owned, parameter in zip(self.owned.values(), self._parameters.values(), strict=True):
            owned.grad = self._buffer[offset : offset + owned.numel()].view_as(owned)
            rows = self._rows(local(parameter.detach())) if self._zero else [owned]
            offset += rows[0].numel()
        self._buffer = None

    def gather(self) -> None:
        """Bring the updated rows of all replicas into every shard."""
        if not self._zero:
            return
        with torch.no_grad():
            shards = [self._rows(local(parameter)) for parameter in self._parameters.values()]
            mine = _pack(
                [rows[self._rank] for rows in shards], [rows[0].numel() for rows in shards]
            )
            whole = mine.new_empty(self._count, mine.numel())
            dist.all_gather_into_tensor(whole.flatten(), mine, group=self._group)
            offset = 0
            for rows in shards:
                for target, source in zip(rows, whole, strict=True):
                    target.copy_(source[offset : offset + target.numel()].view_as(target))
                offset += rows[0].numel()

    def distributed(self, name: Name, tensor: Tensor) -> Tensor:
        """A tensor shaped like an owned parameter, as this rank's part of the whole."""
        parameter = self._parameters[name]
        mesh, placements = self._placement(parameter)
        if mesh is None or tensor.dim() == 0:
            return tensor
        return DTensor.from_local(
            tensor,
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _placement(self, parameter: Tensor) -> tuple[DeviceMesh | None, list[Placement]]:
        sharded = isinstance(parameter, DTensor)
        if sharded and self._zero:
            return self._mesh, [Shard(0), Shard(0)]
        if sharded:
            return self._mesh["shard"], [Shard(0)]
        return (self._mesh["replicate"], [Shard(0)]) if self._zero else (None, [])

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        mine = local(parameter.detach())
        return nn.Parameter(self._rows(mine)[self._rank] if self._zero else mine)

    def _rows(self, shard: Tensor) -> list[Tensor]:
        """A shard's rows by replica, as ``torch.chunk`` cuts them; the last may be empty."""
        size = -(-shard.shape[0] // self._count)
        return [shard[i * size : (i + 1) * size] for i in range(self._count)]

    def _local_gradient(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad is None:
            return torch.zeros_like(local(parameter.detach()))
        gradient = local(parameter.grad)
        if self._stream is not None:
            gradient.record_stream(self._stream)
        return gradient

    def _beside_compute(self, shards: ChunkShards) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        shards.follow_reductions(self._stream)
        return torch.cuda.stream(self._stream)


def _pack(parts: list[Tensor], slots: list[int]) -> Tensor:
    """Parts one after another, each padded with zeros to its slot."""
    packed = parts[0].new_zeros(sum(slots))
    for part, target in zip(parts, torch.split(packed, slots), strict=True):
        target[: part.numel()] = part.flatten()
    return packed
