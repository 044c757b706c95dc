"""What a layer's forward computes, operator by operator, from the operators that torch runs.

Products and attention are recorded with their shapes. All else is counted as kernels, as people
write them by hand for GPUs:

* What is made of one tensor alone is one kernel, in however many operators it is written: a norm, a
  softmax, an activation, a dropout, a rotary embedding. It reads that tensor and smaller operands
  (scales, masks, positions), and writes what others read.
* What joins two tensors (a residual, the product of a gate and a value) is a kernel of its own.
* Tensors that are made of no input and no parameter (angles, causal masks) are not counted.
* Attention is one kernel. It takes queries, keys and values as they lie, and what it writes lies as
  it is wanted.
* In the backward, a kernel reads the gradients of what it wrote, reads what it read, and writes the
  gradients of that; where it reduces, as norms do, it reads both twice. Sums hand gradients on, and
  copies copy them. Where several kernels read a tensor, its gradients are added up, one after
  another. A bias that a product adds sums the gradients of the product's output.

Kernels that compute on integers and truth values are not counted, and attention is seen only where
torch's ``scaled_dot_product_attention`` is called; other kinds are the products that they make.
The rules are those by which ``zeropp.price.kernels`` counts what the suite's models move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeropp.engine.private_names import TorchDispatchMode
from zeropp.engine.values import may_have_gradient
from zeropp.types.operators import Attention, Elementwise, Gradient, LayerOperators, Product

# Names of operators, because torch may have fewer or more of them.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # -> the place of the left factor
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm")
_LOOKUPS = ("embedding", "_embedding_bag", "index_select", "index", "gather")
_SUMS = ("add", "add_", "sub", "sub_")
_COPIES = ("clone", "_to_copy", "copy_")
_ATTENTION = F.scaled_dot_product_attention


@dataclass(eq=False, kw_only=True)
class _Value:
    """A tensor of the forward, with all views of it."""

    elements: int
    has_gradient: bool = False
    is_parameter: bool = False
    is_constant: bool = False  # made of no input and no parameter
    is_attended: bool = False  # attention wrote it
    made_by: _Chain | None = None  # None: it is in memory before any chain runs
    chain: _Chain | None = None  # the kernel that computes on this tensor alone
    readers: set[object] = field(default_factory=set)  # kernels that read it from memory

    @property
    def source(self) -> _Value:
        """The tensor in memory of which it is made."""
        return self.made_by.source if self.made_by else self

    @property
    def gradient(self) -> Gradient:
        """Whose gradient its own is part of."""
        if not self.has_gradient:
            return "none"
        return "weight" if self.source.is_parameter else "input"


@dataclass(eq=False, kw_only=True)
class _Chain:
    """One kernel that computes on one tensor alone, and the elements that it reads beside it and
    writes."""

    source: _Value
    beside: int = 0
    written: int = 0
    computes: bool = False  # not only copies
    reduces: bool = False

    def as_elementwise(self) -> Elementwise:
        """What it moves."""
        forward = self.source.elements + self.beside + self.written
        backward = forward + self.source.elements * self.computes + forward * self.reduces
        return _elementwise(forward, backward, self.source.gradient)


def _elementwise(forward: int, backward: int, gradient: Gradient) -> Elementwise:
    return Elementwise(forward, 0 if gradient == "none" else backward, gradient)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of one layer's forward, which has to run inside ``recording``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # With the memory of each, which is kept because another one's may get its identity.
        self._values: dict[int, tuple[object, _Value]] = {}
        self._all: list[_Value] = []
        self._products: list[Product] = []
        self._attentions: list[Attention] = []
        self._elementwise: list[Elementwise] = []
        self._chains: list[_Chain] = []
        self._launches = 0
        self._is_attending = False
        parameters = list(module.parameters())
        self._trained = sum(x.numel() for x in parameters if x.requires_grad)
        for x in parameters:
            self._remember(x, is_parameter=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this context operators are recorded."""
        with self, _AttentionCalls(self._attend):
            yield

    def operators(self, outputs: Sequence[Tensor]) -> LayerOperators:
        """All operators of the forward that has given ``outputs``."""
        for x in _numbers(outputs):
            self._read(self._value_of(x), "the next layer")
        chains = [chain.as_elementwise() for chain in self._chains if chain.written]
        sums = [
            Elementwise(0, 3 * value.elements)
            for value in self._all
            if value.gradient == "input"
            for _ in range(len(value.readers) - 1)
        ]
        return LayerOperators(
            products=tuple(self._products),
            attentions=tuple(self._attentions),
            elementwise=(*self._elementwise, *chains, *sums),
            launches=self._launches,
            trained=self._trained,
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and record it."""
        result = function(*args, **(kwargs or {}))
        if not self._is_attending:
            operands, results = _tensors([args, kwargs]), _tensors(result)
            if function._schema.is_mutable or not _are_views(results, operands):
                self._launches += 1
                if numbers := _numbers(results):
                    self._record(
                        function.overloadpacket.__name__, args, _numbers(operands), numbers
                    )
        return result

    def _record(
        self, operator: str, args: Sequence[Any], operands: list[Tensor], results: list[Tensor]
    ) -> None:
        if operator in _PRODUCTS:
            first = _PRODUCTS[operator]
            left, right = args[first], args[first + 1]
            (m, k), n = left.shape[-2:], right.shape[-1]
            product = Product(m=m, k=k, n=n, batch=prod(left.shape[:-2]))
            self._record_product(product, left, right, args[0] if first else None, results[0])
        elif operator == "convolution":
            product = _convolution(args, results[0])
            self._record_product(product, args[0], args[1], args[2], results[0])
        elif operator in _LOOKUPS:
            table = self._value_of(operands[0])
            rows = results[0].numel()
            self._read(table, object())
            self._elementwise.append(_elementwise(2 * rows, 3 * rows, table.gradient))
            self._remember(results[0])
        elif operator in _NORMS:
            chain = self._new_chain(self._value_of(operands[0]))
            chain.computes = chain.reduces = True
            chain.written = results[0].numel()
            self._read(chain.source, chain)
            for x in results:
                self._remember(x)
        else:
            self._record_elementwise(operator, operands, results)

    def _record_product(
        self, product: Product, left: Tensor, right: Tensor, bias: Tensor | None, result: Tensor
    ) -> None:
        factors = [self._value_of(left), self._value_of(right)]
        for value in factors:
            self._read(value, object())
        left_gradient, right_gradient = (value.gradient for value in factors)
        self._products.append(replace(product, left=left_gradient, right=right_gradient))
        if bias is not None and bias.requires_grad:
            self._elementwise.append(Elementwise(0, result.numel()))
        self._remember(result)

    def _record_elementwise(
        self, operator: str, operands: list[Tensor], results: list[Tensor]
    ) -> None:
        read: dict[_Value, int] = {}
        for x in operands:
            value = self._value_of(x)
            if not value.is_constant:
                read[value] = max(_elements(x), read.get(value, 0))
        if not read:
            for x in results:
                self._remember(x, is_constant=True)
            return
        sources = _sources(read)
        if len(sources) > 1:
            self._join(operator, read, results)
            return
        (source,) = sources
        if operator in _COPIES and source.is_attended:
            for x in results:
                self._put(x, source)
            return
        chain = source.chain = source.chain or self._new_chain(source)
        chain.computes |= operator not in _COPIES
        chain.reduces |= max(map(_elements, results)) < max(read.values())
        for value, size in read.items():
            if value.source is not source:
                self._read(value, chain)
                chain.beside += size
        for x in results:
            self._remember(x, made_by=chain)

    def _join(self, operator: str, read: dict[_Value, int], results: list[Tensor]) -> None:
        """Record a kernel that computes on several tensors."""
        reader = object()
        for value in read:
            self._read(value, reader)
        for x in results:
            self._remember(x)
        forward = sum(read.values()) + sum(map(_elements, results))
        differentiable = {value: size for value, size in read.items() if value.gradient != "none"}
        is_input = any(value.gradient == "input" for value in differentiable)
        gradient: Gradient = "input" if is_input else "weight" if differentiable else "none"
        backward = 0 if operator in _SUMS else forward + sum(differentiable.values())
        self._elementwise.append(_elementwise(forward, backward, gradient))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        """Run one ``scaled_dot_product_attention`` and record it, because the operators that torch
        makes of it depend on the device. Where ``torch.func`` hides the rows, they are recorded."""
        self._is_attending = not isinstance(_memory(query), Tensor)
        try:
            result: Tensor = _ATTENTION(
                query, key, value, attn_mask, dropout_p, is_causal, **others
            )
        finally:
            is_seen, self._is_attending = self._is_attending, False
        if not is_seen:
            return result
        self._launches += 1
        reader = object()
        for x in (query, key, value):
            self._read(self._value_of(x), reader)
        self._remember(result, is_attended=True)
        attention = Attention(
            heads=prod(query.shape[:-2]),
            queries=query.shape[-2],
            keys=key.shape[-2],
            width=query.shape[-1],
            causal=is_causal,
            has_backward=result.requires_grad,
        )
        self._attentions.append(attention)
        return result

    def _new_chain(self, source: _Value) -> _Chain:
        self._chains.append(_Chain(source=source))
        return self._chains[-1]

    def _read(self, value: _Value, reader: object) -> None:
        """Note that a kernel, or what comes after the layer, reads a tensor from memory."""
        made_by = value.made_by
        if made_by is not None and not value.readers:
            made_by.written += value.elements
            self._read(made_by.source, made_by)
        value.readers.add(reader)

    def _value_of(self, x: Tensor) -> _Value:
        """The value of an operand. Only operands say whether a tensor has a gradient, because
        autograd marks what an operator returns after it."""
        memory = _memory(x)
        known = self._values.get(id(memory))
        value = known[1] if known else self._remember(x)
        if known is None and not isinstance(memory, Tensor):  # an input, or a part of one
            value.elements = memory.nbytes() // x.element_size()
        value.has_gradient |= x.requires_grad
        return value

    def _remember(self, x: Tensor, **what: Any) -> _Value:
        """The value of a tensor that is new, or has been overwritten."""
        value = _Value(elements=_elements(x), **what)
        self._all.append(value)
        self._put(x, value)
        return value

    def _put(self, x: Tensor, value: _Value) -> None:
        memory = _memory(x)
        self._values[id(memory)] = memory, value


class _AttentionCalls(TorchFunctionMode):
    """Lets a function run every ``scaled_dot_product_attention``, also that of torch's own
    ``multi_head_attention_forward``, in which this mode is off."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function of torch."""
        if function is _ATTENTION:
            function = self._attend
        if function is not F.multi_head_attention_forward:
            return function(*args, **(kwargs or {}))
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._attend
        try:
            return function(*args, **(kwargs or {}))
        finally:
            F.scaled_dot_product_attention = before


def _sources(read: Mapping[_Value, int]) -> set[_Value]:
    """The tensors of which an operator's result is made, given what it reads: without the smaller
    ones, unless the largest is a parameter."""
    largest = max(read.values())
    sources = {value.source for value, size in read.items() if size == largest}
    if any(source.is_parameter for source in sources):
        sources |= {value.source for value in read if value.gradient == "input"}
    return sources


def _convolution(args: Sequence[Any], result: Tensor) -> Product:
    """A convolution as the product of patches of its input and its weight."""
    inputs, weight, transposed, groups = args[0], args[1], args[6], args[8]
    patch, (outer, inner) = prod(weight.shape[2:]), weight.shape[:2]
    k, n = (outer // groups, inner * patch) if transposed else (inner * patch, outer // groups)
    places = (inputs if transposed else result).shape[2:]
    return Product(m=inputs.shape[0] * prod(places), k=k, n=n, batch=groups)


def _tensors(value: object) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [x for part in value for x in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _numbers(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in tensors if may_have_gradient(x.dtype)]


def _memory(x: Tensor) -> torch.UntypedStorage | Tensor:
    """What all views of a tensor share, and no other tensor has: its storage, or the tensor where
    it has none (sparse ones, and those of ``torch.func``)."""
    try:
        return x.untyped_storage()
    except NotImplementedError:
        return x


def _elements(x: Tensor) -> int:
    """Elements that are in memory: an expanded view has fewer than its shape says."""
    memory = _memory(x)
    if isinstance(memory, Tensor):
        return x.numel()
    return min(x.numel(), memory.nbytes() // x.element_size())


def _are_views(results: Sequence[Tensor], operands: Sequence[Tensor]) -> bool:
    memories = [_memory(x) for x in operands]
    return all(any(_memory(x) is other for other in memories) for x in results)
