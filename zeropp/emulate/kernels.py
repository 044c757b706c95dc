"""What an operator of torch is, and what one kernel of a GPU computes and moves for it.

Two readers need it: the log of a rank that is replayed, which has one kernel for every operator,
and the ``recorder``, which makes of a layer's operators the kernels that people write by hand.
Operators are found by their names, because torch may have fewer or more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from zeropp.emulate.log import Kernel
from zeropp.types.operators import Attention, Product

Tensors = Sequence[Tensor]

PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation"}
_CONVOLUTIONS = {"convolution", "convolution_backward"}  # as autograd calls all of them
NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"}
LOOKUPS = {"embedding", "index_select", "index", "gather"}  # read as much as they write
SUMS = {"add", "add_", "sub", "sub_"}
COPIES = {"clone", "_to_copy", "copy_"}
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"}
_SCATTERS = {"embedding_dense_backward", "index_add_", "index_put_"}
_WRITE_ONLY = {"nll_loss_forward", "nll_loss_backward"}  # or read a number per row
_UNPRICED = {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}  # products that have no price yet
_READ_TWICE = {"native_layer_norm_backward", "_fused_rms_norm_backward"}


def arguments_of(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What an operator is called with, by the names of its schema."""
    return {
        **dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)),
        **(kwargs or {}),
    }


def all_tensors_in(value: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in all_tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def tensors_in(value: object) -> list[Tensor]:
    """Those of them that have memory."""
    return [t for t in all_tensors_in(value) if t.layout == torch.strided and not t.is_meta]


def memory_of(tensor: Tensor) -> torch.UntypedStorage | Tensor:
    """What all views of a tensor share, and no other tensor has: its storage, or the tensor where
    it has none (sparse ones, and those of ``torch.func``)."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return tensor


def new_of(results: Tensors, operands: Tensors) -> list[Tensor]:
    """The results of an operator that are no views of what it was given."""
    given = {id(memory): memory for memory in map(memory_of, operands)}
    return [result for result in results if id(memory_of(result)) not in given]


def elements_of(tensor: Tensor) -> int:
    """Elements that are in memory: an expanded view has fewer than its shape says."""
    memory = memory_of(tensor)
    if isinstance(memory, Tensor):
        return tensor.numel()
    return min(tensor.numel(), int(memory.nbytes()) // tensor.element_size())


def size_of(tensor: Tensor) -> int:
    """The bytes of the elements that are in memory."""
    return elements_of(tensor) * tensor.element_size()


def product_of(
    operator: str, reads: Tensors, writes: Tensors, arguments: Mapping[str, Any]
) -> Product | Attention | None:
    """The matrix product or the attention that an operator is, if it is one, given its name without
    a namespace.

    A convolution is the product of an implicit GEMM, for each group one: the places of its output
    (or of its input, if it is transposed), the elements of a filter, and the filters. The gradients
    of input and filters have as many FLOP each: they are one kernel of twice the depth, or of the
    same depth where one of them is not wanted.
    """
    if operator in PRODUCTS:
        left, right = reads[-2:]  # behind what is added
        (m, k), n = left.shape[-2:], right.shape[-1]
        return Product(m=m, k=k, n=n, batch=prod(left.shape[:-2]))
    if operator in _CONVOLUTIONS:
        weight, groups = arguments["weight"], arguments["groups"]
        output = arguments.get("grad_output", writes[0])
        side = arguments["input"] if arguments["transposed"] else output
        return Product(
            m=side.numel() // side.shape[1],
            k=sum(arguments.get("output_mask", (True,))[:2]) * prod(weight.shape[1:]),
            n=weight.shape[0] // groups,
            batch=groups,
        )
    if "scaled_dot_product" in operator or "flash_attention" in operator:
        query, key = reads["backward" in operator :][:2]
        return Attention(
            heads=prod(query.shape[:-2]),
            queries=query.shape[-2],
            keys=key.shape[-2],
            width=query.shape[-1],
            causal=bool(arguments.get("is_causal")),
        )
    return None


def describe(name: str, reads: Tensors, writes: Tensors, arguments: Mapping[str, Any]) -> Kernel:
    """What the kernel of an operator computes and moves. ``writes``: also what it reads and
    changes in place."""
    operator = name.partition("::")[2]
    read, written = sum(map(size_of, reads)), sum(map(size_of, writes))
    in_place = operator.endswith("_") and operator not in _OVERWRITE
    if operator in _UNPRICED:
        raise NotImplementedError(
            f"{name}: cannot be simulated (leave out 8 bits and grouped products)"
        )
    if product := product_of(operator, reads, writes, arguments):
        if operator not in PRODUCTS:
            is_backward = isinstance(product, Attention) and "backward" in operator
            return Kernel(name, 0, product, reads[0].element_size(), is_backward)
        # Beside the product it reads a sum, and writes the rest of a wider result.
        result, element = writes[0], reads[-1].element_size()
        moved = sum(map(size_of, reads[:-2])) + size_of(result) * (1 + in_place)
        return Kernel(name, moved - result.numel() * element, product, element)
    if operator == "copy_" and arguments.get("non_blocking") and writes[0].dtype is torch.uint8:
        return Kernel(name, written, with_host=True)  # slabs of the engine's offload
    moved = read + written * (2 if in_place else 1)
    if operator in LOOKUPS:
        moved = 2 * written
    elif operator in _SCATTERS:  # of rows into a table
        moved = written + 2 * max(map(size_of, reads), default=0)
    elif operator in _WRITE_ONLY:
        moved = written
    elif operator in _READ_TWICE:  # once more for gradients of scales, as written by hand
        moved += sum(map(size_of, reads[:2]))
    elif operator == "all_gather_copy_in":  # reads shards, and writes them into the buffer
        moved = 2 * sum(map(size_of, tensors_in(arguments["all_gather_inputs"])))
    elif operator.startswith("_fused_adam"):  # gradients are only read
        moved -= sum(map(size_of, tensors_in(arguments["grads"])))
    return Kernel(name, moved)
