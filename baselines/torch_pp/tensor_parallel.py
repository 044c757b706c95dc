"""Tensor parallelism of a model piece by DTensor, with or without sequence parallelism.

Column-parallel projections into heads and MLP, row-parallel out of them, embedding and logits by
the vocabulary (arXiv 1909.08053). With sequence parallelism (arXiv 2205.05198) what lies between
is sharded over the sequence, boundary tensors of the pipeline included.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zeropp.model.blocks import Block, HalfBlock
from zeropp.model.pieces import Embedding


def cut_piece(piece: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a piece of ``zeropp.model`` over a 1-D mesh, in place."""
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    if isinstance(piece, Block | HalfBlock):
        styles = _block_styles(between)
    elif isinstance(piece, Embedding):
        styles = _embedding_styles(between)
    else:
        # Logits stay cut: the loss is computed on them (``loss_parallel``).
        styles = {
            "output": ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1), use_local_output=False
            )
        }
    if sequence_parallel:
        names = [name for name, _ in piece.named_children() if name.endswith("norm")]
        styles |= {name: SequenceParallel() for name in names}
    present = {name: style for name, style in styles.items() if _has(piece, name)}
    parallelize_module(piece, mesh, present)


def _block_styles(between: Placement) -> dict[str, ParallelStyle]:
    # The input of a region is made whole once, for all of its projections.
    styles: dict[str, ParallelStyle] = {
        region: PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        for region in ("attention", "mlp")
    }
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up", "mlp.gate"):
        styles[name] = ColwiseParallel()
    for name in ("attention.output", "mlp.down"):
        styles[name] = RowwiseParallel(output_layouts=between)
    return styles


def _embedding_styles(between: Placement) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    }
    if between == Shard(1):  # positions have no batch dimension
        styles["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    return styles


def _has(piece: nn.Module, name: str) -> bool:
    first, _, rest = name.partition(".")
    child = getattr(piece, first, None)
    return child is not None and (not rest or _has(child, rest))
