"""One walk over a model's layers before anything is trained: sizes, memory, and what is refused.

Each layer is called once with the output of the layer before, on torch's meta device, which has
shapes and number types but no values, so that the calls take neither memory nor time. Where one
fails there (a branch that depends on data needs values), all layers are called with real tensors.
Copies of the layers are called, so that whatever a layer caches does not stay in the caller's.

With recomputation, inner layers also run forward and backward once with it, because torch's
checkpointing refuses some layers only in their first backward, when other ranks wait already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import flop_registry

from zeropp.engine.chunk import run_recomputed
from zeropp.engine.errors import free_frames
from zeropp.engine.private_names import TorchDispatchMode
from zeropp.engine.values import (
    TensorShape,
    Value,
    chosen,
    keywords_of,
    may_have_gradient,
    tensors_of,
    without_scalars,
)
from zeropp.layout import InfeasibleError
from zeropp.literals import Recompute

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
Layer = nn.Module | Callable[[], nn.Module]


class Owner(NamedTuple):
    """A parameter that a layer has, and where; weak, because its number may be used again."""

    parameter: Callable[[], Tensor | None]
    layer: int
    name: str


Owners = Mapping[int, Owner]  # by the parameter's identity


@dataclass(frozen=True)
class ParameterKind:
    """A parameter without its values; ``inside``: for each of its names in the layer, the kinds of
    the modules that it is in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    inside: Sequence[tuple[type[nn.Module], ...]] = field(default=(), compare=False, repr=False)

    def empty(self) -> nn.Parameter:
        """Such a parameter on the meta device."""
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.trained)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer and of its outputs, for one microbatch.

    ``kinds``: its parameters, each under all of its names. ``parameters``: the number of their
    elements. ``names``: the names of the inputs of its ``forward``. ``product_flops`` and
    ``attention_flops``: floating-point operations of its forward, in matrix products with weights
    and in all others. ``saved_bytes``: what autograd keeps of its forward, parameters aside, in the
    number types in which the layer was given.
    """

    outputs: tuple[TensorShape, ...]
    kinds: Mapping[str, ParameterKind]
    parameters: int
    names: frozenset[str]
    product_flops: int
    attention_flops: int
    saved_bytes: int


class _NeedsValuesError(InfeasibleError):
    """A layer failed in a way in which it may fail only without values."""


def walk(
    layers: Sequence[Layer],
    sample: Tensor,
    keywords: Mapping[str, Tensor],
    recompute: Recompute = "none",
    *,
    measure_saved: bool = True,
) -> list[LayerSizes]:
    """The sizes of all layers, in order. ``sample`` is one microbatch of inputs, ``keywords`` are
    its keyword inputs, and ``recompute`` is what inner layers have to be able to. Layers that use
    ``torch.func`` can run only without ``measure_saved``; ``saved_bytes`` is then 0.

    Raises InfeasibleError with one line that names the first layer that fails, that returns
    something other than a tensor or a tuple of tensors, that could not be trained rightly, or that
    reads a parameter of another layer.
    """
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            check_values(layer, index)
    walked = partial(
        _walk,
        layers,
        recompute=recompute,
        owners=owners_of(layers),
        hooks=saved_tensors_hooks if measure_saved else _no_hooks,
    )
    try:
        return walked(sample.to("meta"), {name: one.to("meta") for name, one in keywords.items()})
    except _NeedsValuesError as error:
        # Torch 2.11 applies the hooks of a failed checkpoint to others until its frame is gone.
        free_frames(error)
    devices = [sample.device] if sample.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # training draws the same numbers as without this
        return walked(sample, {name: one.to(sample.device) for name, one in keywords.items()})


def owners_of(layers: Sequence[Layer]) -> dict[int, Owner]:
    """The owner of every parameter of the layers that are modules."""
    return {
        id(parameter): Owner(ref(parameter), index, name)
        for index, layer in enumerate(layers)
        if isinstance(layer, nn.Module)
        for name, parameter in layer.named_parameters()
    }


def _walk(
    layers: Sequence[Layer],
    sample: Tensor,
    keywords: Mapping[str, Tensor],
    *,
    recompute: Recompute,
    owners: Owners,
    hooks: Callable[..., AbstractContextManager[object]],
) -> list[LayerSizes]:
    value: Value = sample
    found = []
    for index, layer in enumerate(layers):
        what = "copied" if isinstance(layer, nn.Module) else "made"
        with _refusal(
            index,
            f"cannot be {what}, but its sizes are found so",
            "give a function that makes the layer",
        ):
            module, elsewhere = _copied(layer, index, sample.device, owners)
        check_layer(module, index)
        module.to(sample.device)
        names = keywords_of(module)
        function = partial(module, **chosen(keywords, names))
        with _refusal(index, "cannot be called with the output of the layer before"):
            given, watch = value, OperationWatch(elsewhere, f"layers[{index}]")
            value, saved_bytes = _forward(function, given, module, watch, hooks)
        _check_outputs(value, index)
        value, _ = without_scalars(value)
        if recompute != "none" and 0 < index < len(layers) - 1:
            _check_recurrent(module, index, recompute)
            with _refusal(
                index,
                f"cannot be recomputed with recompute={recompute!r}",
                "take another recompute, or change the layer: no operations in place, for example",
            ):
                _recomputed(function, given, module, recompute)
        sizes = LayerSizes(
            outputs=tuple(TensorShape(x.shape, x.dtype) for x in tensors_of(value)),
            kinds=_kinds(module),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            names=names,
            product_flops=watch.product_flops,
            attention_flops=watch.flops - watch.product_flops,
            saved_bytes=saved_bytes,
        )
        found.append(sizes)
    return found


@contextmanager
def _refusal(index: int, what: str, way_out: str = "") -> Iterator[None]:
    """Inside this context an error is an InfeasibleError of one line about a layer."""
    try:
        yield
    except InfeasibleError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        more = f" ({way_out})" if way_out else ""
        raise _NeedsValuesError(f"layers[{index}]: {what}: {lines[0]}{more}") from error


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside of it, and refuses those that read one of ``owners``, which are
    parameters of other layers than ``reader``: no rank would add up their gradients."""

    def __init__(self, owners: Owners, reader: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners, self._reader = owners, reader
        self.flops = self.product_flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation."""
        for one in args:
            owner = self._owners.get(id(one))
            if owner is not None and owner.parameter() is one:
                raise InfeasibleError(
                    f"{self._reader}: reads {owner.name!r} of layers[{owner.layer}], which only "
                    "that layer may (pass it on as an output, or put the two into one layer)"
                )
        result = function(*args, **(kwargs or {}))
        count = flop_registry.get(function.overloadpacket)
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=result)
            self.flops += flops
            self.product_flops += flops * (function.overloadpacket in _PRODUCTS)
        return result


def _forward(
    function: Callable[..., Value],
    given: Value,
    module: nn.Module,
    watch: OperationWatch,
    hooks: Callable[..., AbstractContextManager[object]],
) -> tuple[Value, int]:
    """What a layer returns, without its graph, and the bytes that its graph keeps."""
    own = [parameter.untyped_storage() for parameter in module.parameters()]
    kept: list[torch.UntypedStorage] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # the same object for all views of it
        if not any(storage is other for other in (*own, *kept)):
            kept.append(storage)
        return tensor

    with torch.enable_grad(), hooks(keep, lambda tensor: tensor):
        inputs = _leaves(given)
        with watch:
            value = function(*inputs)
    size = sum(storage.nbytes() for storage in kept)
    if not isinstance(value, tuple):
        return value.detach() if isinstance(value, Tensor) else value, size
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in value), size


def _no_hooks(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def _leaves(given: Value) -> list[Tensor]:
    """The inputs of a layer, as another layer would give them: a layer may change in place no leaf
    of a graph, but these."""
    leaves = [x.detach().requires_grad_(may_have_gradient(x.dtype)) for x in tensors_of(given)]
    return [x.clone() for x in leaves]


def _recomputed(
    function: Callable[..., Value], given: Value, module: nn.Module, recompute: Recompute
) -> None:
    """Run a layer with recomputation, forward and backward; raises what torch raises, and
    RuntimeError if buffers change in both."""
    with torch.enable_grad():
        value = run_recomputed(function, *_leaves(given), recompute=recompute, random=True)
    before = {name: (id(one), one._version) for name, one in module.named_buffers()}
    outputs = [x for x in tensors_of(value) if x.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    for name, one in module.named_buffers():
        if before.get(name) != (id(one), one._version):
            raise RuntimeError(f"its forward changes the buffer {name!r}, and would do so twice")


def _check_recurrent(module: nn.Module, index: int, recompute: Recompute) -> None:
    """Refuse layers with torch's recurrent modules: on CPUs these change the outputs of their
    products in place where torch does not notice it, and gradients would be wrong."""
    for part in module.modules():
        if recompute == "selective" and isinstance(part, nn.RNNBase | nn.RNNCellBase):
            raise InfeasibleError(
                f"layers[{index}]: {type(part).__name__} cannot be recomputed with "
                "recompute='selective', because it changes in place what that keeps (take 'full')"
            )


def check_layer(module: nn.Module, index: int) -> None:
    """Raise InfeasibleError for a layer that could not be trained rightly: with a parameter that
    has no shape yet or is not plain, that something else trains in parallel, or whose forward
    changes its parameters, which are copies of the masters."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InfeasibleError(
                f"layers[{index}]: {name!r} has no shape yet (call the layer once, as torch's "
                "lazy modules need it)"
            )
        if isinstance(parameter, DTensor) or parameter.is_inference():
            kind = "a DTensor" if isinstance(parameter, DTensor) else "an inference tensor"
            raise InfeasibleError(
                f"layers[{index}]: {name!r} is {kind}, but a plain parameter is needed (hand over "
                "layers that nothing else has sharded, made outside of torch.inference_mode)"
            )
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise InfeasibleError(
                f"layers[{index}]: is in a DistributedDataParallel, which would add gradients up a "
                "second time (hand over the module inside it)"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise InfeasibleError(
                f"layers[{index}]: {name or 'it'} has max_norm={part.max_norm}, which changes the "
                "weight during the forward; no rank would keep that (normalise what it gives)"
            )


def _kinds(module: nn.Module) -> dict[str, ParameterKind]:
    """A layer's parameters by name; a parameter that it has twice is there under both names."""
    inside: dict[int, list[tuple[type[nn.Module], ...]]] = {}
    found = list(module.named_parameters(remove_duplicate=False))
    for name, one in found:
        steps = name.split(".")
        paths = (".".join(steps[:depth]) for depth in range(len(steps)))
        kinds = tuple(type(module.get_submodule(path)) for path in paths)
        inside.setdefault(id(one), []).append(kinds)
    return {
        name: ParameterKind(tuple(one.shape), one.dtype, one.requires_grad, inside[id(one)])
        for name, one in found
    }


def _check_outputs(value: object, index: int) -> None:
    """Refuse a layer that returns something else than tensors."""
    values = value if isinstance(value, tuple) else (value,)
    strange = next((x for x in values if not isinstance(x, Tensor)), None)
    if values and all(isinstance(x, Tensor) for x in values):
        return
    inside = f" with {type(strange).__name__} in it" if isinstance(value, tuple) else ""
    raise InfeasibleError(
        f"layers[{index}]: returns {type(value).__name__}{inside}, but a layer must return a "
        "tensor or a tuple of tensors (wrap the layer, so that it returns one)"
    )


def check_values(module: nn.Module, index: int) -> None:
    """Raise InfeasibleError for a layer that is to be trained and has no values to begin with."""
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if one.is_meta:
            raise InfeasibleError(
                f"layers[{index}]: {name!r} is on the meta device and has no values (give a "
                "function that makes the layer, and call parallelize outside of torch.device)"
            )


def _copied(
    layer: Layer, index: int, device: torch.device, owners: Owners
) -> tuple[nn.Module, dict[int, Owner]]:
    """A copy of a layer, or a new one from its function, on the meta device or with values; and the
    parameters of other layers, with the copies of those that the layer has reached."""
    made = layer
    if not isinstance(layer, nn.Module):
        with torch.device(device.type if device.type == "meta" else "cpu"):
            made = layer()
    if not isinstance(made, nn.Module):
        raise InfeasibleError(
            f"layers[{index}]: must be a module, or a function that makes one, but the function "
            f"gives {type(made).__name__}"
        )
    if made is not layer and device.type != "meta":
        return made, dict(owners)
    copies: dict[int, Any] = {}
    if device.type == "meta":
        for parameter in made.parameters():
            empty = torch.empty_like(parameter, device="meta")
            copies[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in made.buffers():
            copies[id(buffer)] = torch.empty_like(buffer, device="meta")
    is_real = any(not parameter.is_meta for parameter in made.parameters())
    module = copy.deepcopy(made, copies) if made is layer or is_real else made
    own = {id(parameter) for parameter in made.parameters()}
    others = {key: owner for key, owner in owners.items() if key not in own}
    reached = {
        id(copies[key]): owner._replace(parameter=ref(copies[key]))
        for key, owner in others.items()
        if key in copies
    }
    return module, others | reached
