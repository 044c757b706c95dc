"""A tensor of the unsharded model of which this rank holds some boxes, for torch's checkpoints.

A flat buffer is cut without regard to rows, so a rank's stretch of it is, in each parameter, a few
boxes: part of a row, whole rows, part of a row. No DTensor describes that. ``Part`` tells
``torch.distributed.checkpoint`` where its boxes lie, through the three methods by which DTensor
does so (``torch/distributed/checkpoint/planner_helpers.py``); torch then writes and reads each box
as it lies in memory, so nothing is gathered and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], Tensor]  # offsets in the whole tensor, values


class Part(Tensor):
    """Has the shape and type of the whole tensor, but the values of ``boxes`` alone."""

    boxes: tuple[Box, ...]

    def is_cut_as(self, other: Part) -> bool:
        """Whether another part of the same tensor has the same boxes."""
        return [offsets for offsets, _ in other.boxes] == [offsets for offsets, _ in self.boxes]

    @torch.no_grad()
    def load(self, value: Tensor) -> None:
        """Copy this rank's boxes out of a whole tensor of this shape, or out of a part that is cut
        in the same way."""
        if not isinstance(value, Part):
            for offsets, box in self.boxes:
                ends = zip(offsets, box.shape, strict=True)
                box.copy_(value[tuple(slice(begin, begin + size) for begin, size in ends)])
            return
        for (_, mine), (_, theirs) in zip(self.boxes, value.boxes, strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        held = sum(box.numel() for _, box in self.boxes)
        return f"Part(shape={tuple(self.shape)}, {held} of {self.numel()} elements)"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(box), self.size()
                ),
            )
            for chunk, (_, box) in zip(self.__create_chunk_list__(), self.boxes, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), box.size()) for o, box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for offset, box in self.boxes if offset == tuple(index.offset or ()))


def make_part(shape: Sequence[int], boxes: Sequence[Box]) -> Part:
    """A part of a tensor of this shape; the boxes share memory with what they describe."""
    one = torch.empty((), dtype=boxes[0][1].dtype)
    part = one.expand(tuple(shape)).as_subclass(Part)
    part.boxes = tuple(boxes)
    return part
