"""What a layer's forward computes, from the operators that torch runs (``kernels`` says of each
what it is).

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

Kernels that compute on integers and truth values are not counted. Attention is seen where torch's
``scaled_dot_product_attention`` is called; other kinds are the products that they make.
The rules are those by which ``zeropp.price.kernels`` counts what the suite's models move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zeropp.emulate.kernels import (
    COPIES,
    LOOKUPS,
    NORMS,
    SUMS,
    all_tensors_in,
    arguments_of,
    elements_of,
    memory_of,
    new_of,
    product_of,
)
from zeropp.engine.layers.values import may_have_gradient
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.types.operators import Attention, Elementwise, Gradient, LayerOperators, Product

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
        """The tensor in memory that it is made of."""
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
        self._is_attending = self._ends_in_product = False
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
            ends_in_product=self._ends_in_product,
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and record it, unless it makes views alone."""
        result = function(*args, **(kwargs or {}))
        operands, results = all_tensors_in([args, kwargs]), all_tensors_in(result)
        is_made = function._schema.is_mutable or new_of(results, operands)
        if is_made and not self._is_attending:
            self._record(
                function.overloadpacket.__name__,
                arguments_of(function, args, kwargs),
                operands,
                results,
            )
        return result

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one ``scaled_dot_product_attention`` and record it, because the operators that torch
        makes of it depend on the device. Where ``torch.func`` hides the rows, they are recorded."""
        given = arguments_of(torch.ops.aten.scaled_dot_product_attention.default, args, kwargs)
        operands = [given[name] for name in ("query", "key", "value")]
        is_seen = not isinstance(memory_of(operands[0]), Tensor)
        self._is_attending = is_seen
        try:
            result: Tensor = _ATTENTION(*args, **kwargs)
        finally:
            self._is_attending = False
        if is_seen:
            self._record(_ATTENTION.__name__, given, operands, [result])
        return result

    def _record(
        self,
        operator: str,
        given: Mapping[str, Any],
        operands: list[Tensor],
        results: list[Tensor],
    ) -> None:
        self._launches += 1
        operands, results = _numbers(operands), _numbers(results)
        if not results:
            return
        is_backward = "backward" in operator  # of a layer that differentiates itself
        product = None if is_backward else product_of(operator, operands, results, given)
        if operator not in SUMS and operator not in COPIES:
            self._ends_in_product = isinstance(product, Product)
        if isinstance(product, Attention):
            self._kernel(map(self._value_of, operands), results, is_attended=True)
            self._attentions.append(replace(product, has_backward=results[0].requires_grad))
        elif product is not None:
            *added, left, right = operands
            if operator == "convolution":
                left, right, *added = operands
                if given["transposed"]:  # with the input as the left factor
                    product = replace(product, k=product.n, n=product.k)
            of_left, of_right = self._value_of(left), self._value_of(right)
            self._kernel([of_left], [])  # gradients of the two come from two kernels
            self._kernel([of_right], results)
            product = replace(product, left=of_left.gradient, right=of_right.gradient)
            self._products.append(product)
            if any(bias.requires_grad for bias in added):
                self._elementwise.append(Elementwise(0, results[0].numel()))
        elif operator in LOOKUPS or operator == "_embedding_bag":
            table, rows = self._value_of(operands[0]), results[0].numel()
            self._kernel([table], results[:1])
            self._elementwise.append(_elementwise(2 * rows, 3 * rows, table.gradient))
        elif operator in NORMS:
            chain = self._new_chain(self._value_of(operands[0]))
            chain.computes = chain.reduces = True
            chain.written = results[0].numel()
            self._kernel([chain.source], results)
        else:
            self._record_elementwise(operator, operands, results)

    def _record_elementwise(
        self, operator: str, operands: list[Tensor], results: list[Tensor]
    ) -> None:
        read: dict[_Value, int] = {}
        for x in operands:
            value = self._value_of(x)
            if not value.is_constant:
                read[value] = max(elements_of(x), read.get(value, 0))
        if not read:
            for x in results:
                self._remember(x, is_constant=True)
            return
        # What the result is made of: without smaller tensors, unless the largest is a parameter.
        largest = max(read.values())
        sources = {value.source for value, size in read.items() if size == largest}
        if any(source.is_parameter for source in sources):
            sources |= {value.source for value in read if value.gradient == "input"}
        if len(sources) > 1:
            self._kernel(read, results)
            forward = sum(read.values()) + sum(map(elements_of, results))
            differentiable = {v: size for v, size in read.items() if v.gradient != "none"}
            is_input = any(value.gradient == "input" for value in differentiable)
            gradient: Gradient = "input" if is_input else "weight" if differentiable else "none"
            backward = 0 if operator in SUMS else forward + sum(differentiable.values())
            self._elementwise.append(_elementwise(forward, backward, gradient))
            return
        (source,) = sources
        if operator in COPIES and source.is_attended:
            for x in results:
                self._put(x, source)
            return
        chain = source.chain = source.chain or self._new_chain(source)
        chain.computes |= operator not in COPIES
        chain.reduces |= max(map(elements_of, results)) < max(read.values())
        for value, size in read.items():
            if value.source is not source:
                self._read(value, chain)
                chain.beside += size
        for x in results:
            self._remember(x, made_by=chain)

    def _kernel(self, reads: Iterable[_Value], results: Sequence[Tensor], **what: Any) -> None:
        """Note a kernel that reads tensors from memory and makes others."""
        reader = object()
        for value in reads:
            self._read(value, reader)
        for x in results:
            self._remember(x, **what)

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
        memory = memory_of(x)
        known = self._values.get(id(memory))
        value = known[1] if known else self._remember(x)
        if known is None and not isinstance(memory, Tensor):  # an input, or a part of one
            value.elements = memory.nbytes() // x.element_size()
        value.has_gradient |= x.requires_grad
        return value

    def _remember(self, x: Tensor, **what: Any) -> _Value:
        """The value of a tensor that is new, or has been overwritten."""
        value = _Value(elements=elements_of(x), **what)
        self._all.append(value)
        self._put(x, value)
        return value

    def _put(self, x: Tensor, value: _Value) -> None:
        memory = memory_of(x)
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
            return self._attend(*args, **(kwargs or {}))
        if function is not F.multi_head_attention_forward:
            return function(*args, **(kwargs or {}))
        with mock.patch.object(F, _ATTENTION.__name__, self._attend):
            return function(*args, **(kwargs or {}))


def _numbers(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in tensors if may_have_gradient(x.dtype)]
