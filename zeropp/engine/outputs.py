"""What a model gives for a batch, on every rank of the pipeline that has run it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.values import TensorShape, Value, tensors_of
from zeropp.types.layout import Layout


def on_pipelines(
    parts: Sequence[Value],
    layout: Layout,
    last: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Value:
    """The rows of ``parts``, which the rank ``last`` of a pipeline has, on all ranks of it. Where a
    pipeline had no rows, tensors as another one's, without rows. All ranks must call it."""
    whole = [torch.cat(same) for same in zip(*map(tensors_of, parts), strict=True)]
    own = [TensorShape(one.shape, one.dtype) for one in whole]
    told: list[tuple[list[TensorShape], bool]] = [([], True)] * dist.get_world_size(group)
    is_tuple = bool(parts) and isinstance(parts[0], tuple)
    dist.all_gather_object(told, (own, is_tuple), group=group)
    rank = dist.get_rank()
    pipeline = next(ranks for ranks in layout.pipelines() if rank in ranks)
    source = pipeline[last]
    known, is_tuple = next(one for one in (told[source], *told) if one[0])
    if not told[source][0]:
        whole = [torch.empty(0, *one.size[1:], dtype=one.dtype, device=device) for one in known]
    elif rank == source:
        whole = [one.contiguous() for one in whole]
    else:
        whole = [one.empty(device) for one in known]
    if told[source][0]:
        _send_or_receive(whole, source, [other for other in pipeline if other != source], group)
    return tuple(whole) if is_tuple else whole[0]


def _send_or_receive(
    tensors: Sequence[Tensor], source: int, others: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    works = []
    for tensor in tensors:
        if dist.get_rank() == source:
            works += [dist.isend(tensor, other, group=group) for other in others]
        else:
            works.append(dist.irecv(tensor, source, group=group))
    for work in works:
        if work is not None:
            work.wait()
