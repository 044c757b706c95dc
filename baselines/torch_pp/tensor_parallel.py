"""Tensor parallelism of a model piece by DTensor, with or without sequence parallelism.

As in Megatron-LM (arXiv 1909.08053), projections into attention heads and into the MLP are
column-parallel, those out of them are row-parallel, and embedding and logits are cut by the
vocabulary. With sequence parallelism (arXiv 2205.05198) the activations between these regions are
sharded over the sequence, and so are the activations that pipeline stages send each other.
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
    """Cut a piece of ``zeropp.model`` (embedding, block or head) in place over a 1-D mesh."""
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    if isinstance(piece, Block | HalfBlock):
        styles = _block_styles(between)
    elif isinstance(piece, Embedding):
        styles = _embedding_styles(between)
    else:
        # Logits stay cut by the vocabulary: ``loss_parallel`` computes the loss on the parts.
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
    # The input of a region (attention or MLP) is gathered once for all of its projections.
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
    if between == Shard(1):  # the position embedding has no batch dimension: dimension 0 is seq
        styles["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    return styles


def _has(piece: nn.Module, name: str) -> bool:
    first, _, rest = name.partition(".")
    child = getattr(piece, first, None)
    return child is not None and (not rest or _has(child, rest))
