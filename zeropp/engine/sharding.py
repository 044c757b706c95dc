"""Sharded parameters of one chunk: torch's FSDP2, with the engine deciding when it acts.

Each piece is wrapped in a ``Shard`` and ``fully_shard`` is put on that wrapper. The engine calls
the piece inside, so FSDP2's forward and backward hooks never run: gathering, releasing and
reducing happen exactly where the program says. State dicts, mixed precision and checkpoints
remain torch's own.

This is the one file of the engine that touches private parts of FSDP2 (seen with torch 2.11, 2.12
and 2.13): the parameter groups' ``post_backward`` (torch's own pipeline stages call it likewise, in
``perform_reduce_grad``), their gradient accumulators, what their context holds of reductions in
flight, and the root's final callback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zeropp.literals import Precision


class Shard(nn.Module):
    """Wrapper that carries one piece's shards; ``piece`` itself stays as it was written."""

    def __init__(self, piece: nn.Module) -> None:
        super().__init__()
        self.piece = piece


class _Root(nn.Module):
    """Holds a chunk's shards together; has no parameters of its own."""

    def __init__(self, shards: Iterable[Any]) -> None:
        super().__init__()
        self.shards = nn.ModuleList(shards)


class ChunkShards:
    """The shards of one chunk: gather, release, reduce.

    ``mesh`` (1-D) None means that parameters are whole on every rank and gradients are nobody
    else's. A mesh of one rank still casts: fp32 masters are kept, bf16 copies are made on gather.
    """

    def __init__(
        self, pieces: list[nn.Module], mesh: DeviceMesh | None, precision: Precision
    ) -> None:
        self.pieces = pieces
        self._shards: list[FSDPModule] = []
        self._root: FSDPModule | None = None
        self._handles: list[Any] = []
        if mesh is None:
            return
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrap = partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._shards = [wrap(Shard(piece)) for piece in pieces]
        # Every root takes four streams from torch's pool of 32, which NCCL's come from, too: with a
        # root a piece a message that waits for its sender could share one with what must not wait.
        self._root = wrap(_Root(self._shards))
        self._root.set_reshard_after_backward(False)
        self._root._get_fsdp_state()._lazy_init()

    def unshard(self) -> None:
        """Start to gather the parameters, once compute so far is done; ``wait`` before use.

        Asked for by hand, FSDP2 gathers from the current stream; casts and copies of shards would
        stand in compute's way there.
        """
        if self._root is None:
            return
        context = self._root._get_fsdp_state()._comm_ctx
        context.all_gather_stream.wait_stream(context.device_handle.current_stream())
        with context.device_handle.stream(context.all_gather_stream):
            self._handles = [shard.unshard(async_op=True) for shard in self._shards]

    def wait(self) -> None:
        """Make the current stream wait for the gather that was started."""
        for handle in self._handles:
            handle.wait()
        self._handles = []

    def reshard(self) -> None:
        """Drop the gathered parameters; gradients stay."""
        for shard in self._shards:
            shard.reshard()

    def accumulate(self) -> None:
        """Move fresh gradients into the accumulators of the reduction's type (fp32 under bf16)."""
        for parameter in self._fsdp_parameters():
            if parameter.unsharded_accumulated_grad is None:
                parameter.to_accumulated_grad_if_needed()
            else:
                parameter.accumulate_unsharded_grad_if_needed()

    def reduce(self) -> None:
        """Reduce-scatter the accumulated gradients (mean) into the sharded ones and free them."""
        _reduce_together([group for shard in self._shards for group in _groups(shard)])

    def finish(self) -> None:
        """Make the current stream wait for the reductions, and free their buffers."""
        if self._root is not None:
            self._root._get_fsdp_state()._root_post_backward_final_callback()

    def follow_reductions(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the reductions that were started."""
        if self._root is not None:
            stream.wait_stream(self._root._get_fsdp_state()._comm_ctx.reduce_scatter_stream)

    def named_parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """(index of the piece in the chunk, name, parameter), sharded where there are shards."""
        for index, piece in enumerate(self.pieces):
            for name, parameter in piece.named_parameters():
                yield index, name, parameter

    def unsharded_bytes(self) -> int:
        """Bytes of gathered parameters, those on their way included."""
        total = 0
        for shard in self._shards:
            for group in _groups(shard):
                if group._all_gather_result is not None:
                    total += group._all_gather_result.all_gather_output.nbytes
        for parameter in self._fsdp_parameters():
            total += sum(t.untyped_storage().nbytes() for t in parameter.all_gather_outputs)
        return total

    def unsharded_grad_bytes(self) -> int:
        """Bytes of unsharded gradients, those on their way included."""
        total = 0
        for parameter in self._fsdp_parameters():
            if not hasattr(parameter, "_unsharded_param"):
                continue
            for grad in (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad):
                total += grad.nbytes if grad is not None else 0
        return total

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [] if self._root is None else [self._root, *self._shards]

    def _fsdp_parameters(self) -> Iterator[Any]:
        for shard in self._shards:
            for group in _groups(shard):
                yield from group.fsdp_params


def share_streams(chunks: Iterable[ChunkShards]) -> None:
    """One set of streams for all chunks of a rank. It bounds memory, too: a reduction's buffer is
    given back when the next chunk is reduced, not at the end of the step."""
    share_comm_ctx([module for chunk in chunks for module in chunk._fsdp_modules()])


def reduction_buffer_bytes(chunks: Iterable[ChunkShards]) -> int:
    """Bytes that the reductions in flight keep, over all chunks of a rank."""
    contexts = {
        id(context): context
        for chunk in chunks
        for context in (shard._get_fsdp_state()._comm_ctx for shard in chunk._shards)
    }
    reductions = [state for context in contexts.values() for state in _in_flight(context)]
    return sum(
        buffer.nbytes for buffer in tree_leaves([r.reduce_scatter_input for r in reductions])
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _groups(shard: FSDPModule) -> list[Any]:
    state = shard._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11: at most one


def _reduce_together(groups: list[Any]) -> None:
    """Reduce a chunk's groups, none waiting for the one before.

    FSDP2 makes compute wait for what its context says is in flight before it starts a reduction. So
    the first group finds there the chunk before, and the others nothing; then all of this chunk are
    put there as one. They run on one stream, so the last one's event stands for all.
    """
    held: list[Any] = []
    for group in groups:
        group.post_backward()
        held += _in_flight(group.comm_ctx)
        _set_in_flight(group.comm_ctx, [])
    if held:
        buffers = [reduction.reduce_scatter_input for reduction in held]
        whole = held[-1]._replace(reduce_scatter_input=buffers)
        _set_in_flight(groups[-1].comm_ctx, [whole])


def _in_flight(context: Any) -> list[Any]:
    if hasattr(context, "reduce_scatter_states"):
        return list(context.reduce_scatter_states)
    return [context.reduce_scatter_state] if context.reduce_scatter_state else []  # torch 2.11


def _set_in_flight(context: Any, states: list[Any]) -> None:
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states = states
    else:
        context.reduce_scatter_state = states[-1] if states else None
