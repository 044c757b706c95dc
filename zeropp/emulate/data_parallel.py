"""DDP with fake tensors: torch's own reducer is C++ and does not see them.

As in ``torch/csrc/distributed/c10d/reducer.cpp``: gradients are scaled into buckets as they become
ready, a full bucket is reduced beside the rest of the backward, buckets in order; the backward's
end waits for all of them. After the first reduction the buckets are rebuilt in the order in which
gradients became ready, unless unused parameters are looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.emulate.kernels import tensors_in
from zeropp.emulate.private_names import after_backward
from zeropp.emulate.world import replaced

_MIB = 1 << 20
_BROADCAST_BYTES = 250 * _MIB  # of buffers that are broadcast together


def buckets_of(tensors: Iterable[Tensor], limits: Sequence[int]) -> list[list[Tensor]]:
    """Tensors in buckets of one type each, which are full at the first limit for the first bucket
    of a type, at the next for the next, and at the last for all others."""
    full: list[list[Tensor]] = []
    open_: dict[torch.dtype, list[Tensor]] = {}
    count: dict[torch.dtype, int] = {}
    for tensor in tensors:
        kind = tensor.dtype
        bucket = open_.setdefault(kind, [])
        bucket.append(tensor)
        if sum(part.nbytes for part in bucket) >= limits[min(count.get(kind, 0), len(limits) - 1)]:
            full.append(open_.pop(kind))
            count[kind] = count.get(kind, 0) + 1
    return full + list(open_.values())


class DataParallel(nn.Module):
    """Stands for ``torch.nn.parallel.DistributedDataParallel``."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        device_mesh: Any = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        del device_ids, output_device, dim, init_sync, check_reduction
        if given := [name for name, value in unknown.items() if value not in (None, False, [])]:
            raise NotImplementedError(f"DistributedDataParallel({given[0]}=...): leave it out")
        self.module, self.require_backward_grad_sync = module, True
        self.require_forward_param_sync = True  # of buffers, by the forward before
        self.device, self.gradient_as_bucket_view = torch.device("cpu"), gradient_as_bucket_view
        self.process_group = device_mesh.get_group() if device_mesh else process_group
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self._parameters_of = [
            p for name, p in module.named_parameters() if p.requires_grad and name not in ignored
        ]
        if not self._parameters_of:
            raise RuntimeError("DistributedDataParallel: no parameter requires a gradient")
        self._buffers_of = [
            b for name, b in module.named_buffers() if broadcast_buffers and name not in ignored
        ]
        self._find_unused = find_unused_parameters and not static_graph
        cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * _MIB)
        self._limits = [_MIB, cap] if bucket_cap_mb is None else [cap]
        self._ready: list[Tensor] = []  # in this backward, in order
        self._order: list[Tensor] = []  # in the first one
        self._is_syncing = self._is_queued = self._is_rebuilt = False
        self._works: list[Any] = []
        self._set_buckets(
            buckets_of(self._parameters_of, self._limits if self._find_unused else [1 << 60])[::-1]
        )
        for parameter in self._parameters_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _set_buckets(self, buckets: list[list[Tensor]]) -> None:
        self._buckets = buckets
        self._flat, self._views = list[Tensor](), dict[Tensor, Tensor]()  # frees those before
        self._flat = [b[0].new_empty(sum(p.numel() for p in b)) for b in buckets]
        self._views = {
            parameter: part.view(parameter.shape)
            for bucket, flat in zip(buckets, self._flat, strict=True)
            for parameter, part in zip(
                bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True
            )
        }

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refused: what a hook does to a bucket is C++ as well."""
        raise NotImplementedError("DistributedDataParallel.register_comm_hook: leave the hook out")

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside this context gradients are not reduced."""
        return replaced((self, "require_backward_grad_sync", False))

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module; the backward of its output reduces gradients."""
        reduces = self.require_backward_grad_sync and torch.is_grad_enabled()
        if reduces and self._order and not (self._find_unused or self._is_rebuilt):
            self._set_buckets(buckets_of(self._order, self._limits))
            self._is_rebuilt = True
        if self.require_forward_param_sync and self._buffers_of:
            with torch.no_grad():
                for bucket in buckets_of(self._buffers_of, [_BROADCAST_BYTES]):
                    flat = torch.cat([buffer.reshape(-1) for buffer in bucket])
                    dist.broadcast(flat, group_src=0, group=self.process_group)
                    parts = torch.split(flat, [buffer.numel() for buffer in bucket])
                    for buffer, part in zip(bucket, parts, strict=True):
                        buffer.copy_(part.view(buffer.shape))
        output = self.module(*inputs, **keywords)
        self.require_forward_param_sync = reduces
        if reduces:  # also of what a forward in no_sync adds later
            self._is_syncing, self._ready, self._works = True, [], []
            if self._find_unused:
                used = _reached(output)
                for parameter in self._parameters_of:
                    if parameter not in used:
                        self._mark(parameter)
        return output

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_syncing:
            return
        if not self._is_queued:
            self._is_queued = True
            after_backward(self._finish)
        self._mark(parameter)

    def _mark(self, parameter: Tensor) -> None:
        """A gradient is ready: scale it into its bucket, and reduce the buckets that are full."""
        view, gradient = self._views[parameter], parameter.grad
        scale = 1 / dist.get_world_size(self.process_group)
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            elif gradient.untyped_storage() is view.untyped_storage():
                view.mul_(scale)
            else:
                torch.mul(gradient, scale, out=view)
                if self.gradient_as_bucket_view:
                    parameter.grad = view
            self._ready.append(parameter)
            ready = set(self._ready)
            while len(self._works) < len(self._buckets):
                number = len(self._works)
                if not ready.issuperset(self._buckets[number]):
                    break
                self._works.append(
                    dist.all_reduce(self._flat[number], group=self.process_group, async_op=True)
                )

    def _finish(self) -> None:
        """The end of a backward: wait for all buckets, and give the gradients back."""
        self._is_queued = self._is_syncing = False
        if len(self._works) < len(self._buckets):
            raise RuntimeError(
                "DistributedDataParallel: parameters got no gradient "
                "(give find_unused_parameters=True)"
            )
        self._order = list(self._ready)
        works = list(self._works)
        with torch.no_grad():
            if self._find_unused:  # which parameters were used anywhere
                used = torch.empty(len(self._parameters_of), dtype=torch.int32)
                works.append(dist.all_reduce(used, group=self.process_group, async_op=True))
            for work, bucket in zip(works, [*self._buckets, ()], strict=False):
                work.wait()
                for parameter in [] if self.gradient_as_bucket_view else bucket:
                    if parameter.grad is not None:
                        parameter.grad.copy_(self._views[parameter])


def _reached(output: Any) -> set[Tensor]:
    """The parameters that an output depends on."""
    found: set[Tensor] = set()
    seen: set[Any] = set()
    todo = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(node.variable)
            todo += [parent for parent, _ in node.next_functions if parent is not None]
    return found
