"""One walk over a model's layers before anything is trained: sizes, memory, and what is refused.

Each layer is called once with the output of the layer before, on torch's meta device, which has
shapes and number types but no values, so that the calls take neither memory nor time. Where one
fails there (a branch that depends on data needs values), all layers are called with real tensors.
Copies of the layers are called, so that whatever a layer caches does not stay in the caller's.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from zeropp.engine.layers.chunk import forked_generators, seed_piece
from zeropp.engine.layers.values import (
    POSITIONS,
    TensorShape,
    Value,
    alike,
    chosen,
    keywords_of,
    may_have_gradient,
    takes_all,
    tensors_of,
    without_scalars,
)
from zeropp.engine.private_names import TorchDispatchMode, is_traceable_wrapper_subclass
from zeropp.engine.ranks.errors import free_frames, refusal
from zeropp.engine.settings import GroupOf, ParameterName, one_group
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Recompute

if TYPE_CHECKING:
    from zeropp.emulate.recorder import Recorder
    from zeropp.engine.layers.context import Context
    from zeropp.types.operators import LayerOperators

Layer = nn.Module | Callable[[], nn.Module]


class Owner(NamedTuple):
    """A parameter that a layer has, and where; weak, because its number may be used again."""

    parameter: Callable[[], Tensor | None]
    layer: int
    name: str


Owners = Mapping[int, Owner]  # by the parameter's identity


@dataclass(frozen=True)
class ParameterKind:
    """A parameter without its values; ``group`` is that of the optimizer, empty if frozen."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    group: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer and of its outputs, for one microbatch.

    ``kinds``: its parameters, each under all of its names. ``parameters``: the number of their
    elements. ``names``: the names of the inputs of its ``forward``. ``operators``: what that
    computes, where it was recorded. ``draws``: whether it needs random numbers of torch's default
    generators. ``saved_bytes``: what autograd keeps of it, parameters aside, in the number types in
    which the layer was given.
    """

    outputs: tuple[TensorShape, ...]
    kinds: Mapping[str, ParameterKind]
    parameters: int
    names: frozenset[str]
    operators: LayerOperators | None
    draws: bool
    saved_bytes: int


class _NeedsValuesError(InfeasibleError):
    """A layer failed in a way in which it may fail only without values."""


def walk(
    layers: Sequence[Layer],
    sample: Tensor,
    keywords: Mapping[str, Tensor],
    recompute: Recompute = "none",
    *,
    recorder: type[Recorder] | None = None,
    measure_saved: bool = True,
    tied: tuple[ParameterName, ParameterName] | None = None,
    context: Context | None = None,
    group_of: GroupOf = one_group,
) -> list[LayerSizes]:
    """The sizes of all layers, in order. ``sample`` is one microbatch of inputs, of whose tokens
    each rank of a ``context`` has such a part, ``keywords`` are its keyword inputs, and
    ``recompute`` is what inner layers have to be able to. Prices need the ``recorder``; without it
    there are no ``operators``. Layers that use ``torch.func`` can run
    only without ``measure_saved``; ``saved_bytes`` is then 0. ``tied`` are two parameters that may
    be one object. ``group_of``: as in ``Settings``.

    Raises InfeasibleError with one line that names the first layer that fails, that returns
    something other than a tensor or a tuple of tensors, that could not be trained rightly, that
    reads a parameter of another layer, or whose function gives one that another layer has.
    """
    _check_modules(layers, tied)

    def walked(inputs: Tensor, named: Mapping[str, Tensor]) -> list[LayerSizes]:
        with (
            context.exchanging(sample.shape[1]) if context else nullcontext(),
            forked_generators(inputs.device),
        ):
            return _walk(
                layers,
                inputs,
                named,
                recompute=recompute,
                recorder=recorder,
                tied=tied,
                context=context,
                group_of=group_of,
                hooks=saved_tensors_hooks if measure_saved else lambda *_: nullcontext(),
            )

    def on_meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    try:
        return walked(on_meta(sample), {name: on_meta(one) for name, one in keywords.items()})
    except _NeedsValuesError as error:
        # Torch 2.11 applies the hooks of a failed checkpoint to others until its frame is gone.
        free_frames(error)
    return walked(sample, {name: one.to(sample.device) for name, one in keywords.items()})


def _check_modules(
    layers: Sequence[Layer], tied: tuple[ParameterName, ParameterName] | None
) -> None:
    """Refuse layers that cannot be trained apart; ``tied`` names the only pair of one parameter."""
    owners: dict[int, Owner] = {}
    places: dict[int, tuple[int, ParameterName]] = {}  # in memory
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        check_values(layer, index)
        _own(layer, index, owners, tied)
        for name, parameter in layer.named_parameters():
            memory = parameter.data_ptr() or id(parameter)  # an empty one has none
            other, where = places.setdefault(memory, (id(parameter), (index, name)))
            if other != id(parameter) and (where, (index, name)) != tied:
                raise InfeasibleError(
                    f"layers[{index}]: {name!r} is in the same memory as {where[1]!r} of "
                    f"layers[{where[0]}], but is another parameter (make it the same object, or "
                    "clone its values)"
                )


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
    recorder: type[Recorder] | None,
    tied: tuple[ParameterName, ParameterName] | None,
    context: Context | None,
    group_of: GroupOf,
    hooks: Callable[..., AbstractContextManager[object]],
) -> list[LayerSizes]:
    value: Value = sample
    walked, owners = [], owners_of(layers)
    refused = partial(refusal, kind=_NeedsValuesError)
    for index, layer in enumerate(layers):
        is_module, where = isinstance(layer, nn.Module), f"layers[{index}]"
        with refused(
            f"{where}: cannot be {'copied' if is_module else 'made'}, but its sizes are found so",
            "give a function that makes the layer"
            if is_module
            else "a layer is a module, or a function without arguments that makes one: put a "
            "function of tensors into a module",
        ):
            with torch.device(sample.device.type if sample.is_meta else "cpu"):
                made = made_layer(layer, index, 0)
            if not is_module:  # modules were looked at before
                _own(made, index, owners, tied)
            module, elsewhere = _copied(made, sample.device, owners, copies=is_module)
        check_layer(module, index)
        if recompute in ("selective", "mlp") and 0 < index < len(layers) - 1:
            _refuse_recurrent(module, where, recompute)
        module.to(sample.device)
        with refused(f"{where}: cannot be called with the keyword inputs"):
            names = _named(module, value, keywords)
        counts_itself = POSITIONS in names and not getattr(made, "counts_from_zero", False)
        if context is not None and counts_itself and not context.packs:
            raise InfeasibleError(
                f"{where}: names {POSITIONS!r}, and without them would count a slice of a sequence "
                f"from its own begin with context={context.size} (give sample_keywords them, or "
                "set counts_from_zero = True on the layer if None means 0, 1, 2 ...)"
            )
        function = partial(module, **chosen(keywords, names))
        with refused(f"{where}: cannot be called with the output of the layer before"):
            watch = OperationWatch(elsewhere, where, module)
            record = recorder(module) if recorder else None
            watches = [watch, record.recording()] if record else [watch]
            value, saved_bytes = _forward(function, _leaves_of(value), module, watches, hooks)
        _check_outputs(value, index)
        value, _ = without_scalars(value)
        sizes = LayerSizes(
            outputs=tuple(TensorShape(x.shape, x.dtype) for x in tensors_of(value)),
            kinds=_kinds(made, index, group_of),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            names=names,
            operators=record.operators(tensors_of(value)) if record else None,
            draws=watch.draws,
            saved_bytes=saved_bytes,
        )
        walked.append(sizes)
    return walked


def _named(module: nn.Module, value: Value, keywords: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of a layer's keyword inputs; with ``**kwargs`` all, if it takes them."""
    names = keywords_of(module)
    if not takes_all(module) or keywords.keys() <= names:
        return names
    try:
        with torch.no_grad():
            copy.deepcopy(module)(*_leaves_of(value), **keywords)
    except TypeError:  # something inside takes no such name
        return names
    return names | keywords.keys()


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators inside of it that read one of ``owners``, which are parameters of other
    layers than ``reader``, as no rank would add up their gradients; and those that write to a
    parameter of the ``reader`` itself, as the masters would never see it. ``draws``: whether any of
    them took numbers of torch's default generators."""

    def __init__(self, owners: Owners, reader: str, module: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners, self._reader, self.draws = owners, reader, False
        self._module = nn.Module() if module is None else module
        self._held = self._storages()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        for argument in args:
            owner = self._owners.get(id(argument))
            if owner is not None and owner.parameter() is argument:
                raise InfeasibleError(
                    f"{self._reader}: reads {owner.name!r} of layers[{owner.layer}], which only "
                    "that layer may (pass it on as an output, or put the two into one layer)"
                )
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, Tensor):
                self._check_written(value.untyped_storage())
        self.draws = self.draws or _draws(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        """Look also for parameters that have other memory than before."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            now = self._storages()
            for name, storage in self._held.items():
                if now.get(name) is not storage:
                    self._check_written(storage)

    def _check_written(self, written: torch.UntypedStorage) -> None:
        for name, storage in self._held.items():
            if storage is written:  # torch keeps one object of it, whatever the view
                raise InfeasibleError(
                    f"{self._reader}: its forward changes {name!r}, which no rank would keep "
                    "(compute with the changed value, or normalise what the layer gives)"
                )

    def _storages(self) -> dict[str, torch.UntypedStorage]:
        return {n: one.untyped_storage() for n, one in self._module.named_parameters()}


def _draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws from torch's default generators, as attention does with dropout."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    arguments = function._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    values |= kwargs
    return values.get("generator") is None and values.get("dropout_p", 1.0) != 0


def _forward(
    function: Callable[..., Value],
    inputs: Sequence[Tensor],
    module: nn.Module,
    watches: Sequence[AbstractContextManager[object]],
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

    with torch.enable_grad(), hooks(keep, lambda tensor: tensor), ExitStack() as watching:
        for watch in watches:
            watching.enter_context(watch)
        value = function(*inputs)
    size = sum(storage.nbytes() for storage in kept)
    outputs = value if isinstance(value, tuple) else (value,)
    once = {id(x): x.detach() if isinstance(x, Tensor) else x for x in outputs}
    return alike(value, [once[id(x)] for x in outputs]), size


@torch.enable_grad()
def _leaves_of(given: Value) -> list[Tensor]:
    """Inputs as another layer gives them: not leaves, so they may be changed in place."""
    tensors = tensors_of(given)
    leaves = {id(x): x.detach().requires_grad_(may_have_gradient(x.dtype)) for x in tensors}
    copies = {key: leaf.clone() for key, leaf in leaves.items()}
    return [copies[id(x)] for x in tensors]


def check_layer(module: nn.Module, index: int) -> None:
    """Raise InfeasibleError for a layer that could not be trained rightly: with a parameter that is
    not plain, with state that no checkpoint would have, or that something else trains."""
    for name, parameter in module.named_parameters():
        is_made_of_others = is_traceable_wrapper_subclass(parameter)
        if is_made_of_others or parameter.is_inference():
            kind = type(parameter.data).__name__ if is_made_of_others else "an inference tensor"
            raise InfeasibleError(
                f"layers[{index}]: {name!r} is {kind}, but a plain parameter is needed (hand over "
                "layers that nothing else has sharded or quantized, made outside of "
                "torch.inference_mode)"
            )
    for part in module.modules():
        wrong = ""
        if isinstance(part, DistributedDataParallel):
            wrong = "which adds gradients up a second time (hand over the module inside it)"
        elif isinstance(part, torch.jit.ScriptModule):
            wrong = "whose parameters nothing can share out (hand over what it was made from)"
        elif _has_extra_state(part):
            wrong = "whose extra state no checkpoint would have (keep it in buffers)"
        if wrong:
            raise InfeasibleError(f"layers[{index}]: has a {type(part).__name__}, {wrong}")


def _refuse_recurrent(module: nn.Module, where: str, recompute: Recompute) -> None:
    for part in module.modules():
        if isinstance(part, nn.RNNBase | nn.RNNCellBase):
            raise InfeasibleError(
                f"{where}: {type(part).__name__} cannot be recomputed with "
                f"recompute={recompute!r}, because it changes in place what is kept (take 'full')"
            )


def _has_extra_state(part: nn.Module) -> bool:
    """Whether a module saves more than its tensors. Some give nothing, or an empty tensor."""
    if type(part).get_extra_state is nn.Module.get_extra_state:
        return False
    state = part.get_extra_state()
    return state is not None and not (isinstance(state, Tensor) and not state.numel())


def _kinds(module: nn.Module, index: int, group_of: GroupOf) -> dict[str, ParameterKind]:
    """A layer's parameters by name; a parameter that it has twice is there under both names."""
    kinds = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        empty = torch.empty(one.shape, dtype=one.dtype, device="meta")
        like = nn.Parameter(empty, one.requires_grad)
        vars(like).update(vars(one))  # torch copies no attributes of parameters
        group = group_of((index, name), like) if one.requires_grad else ""
        kinds[name] = ParameterKind(tuple(one.shape), one.dtype, one.requires_grad, group)
    return kinds


def _check_outputs(value: object, index: int) -> None:
    """Refuse a layer that returns something else than tensors."""
    values = value if isinstance(value, tuple) else (value,)
    strange = [type(x).__name__ for x in values if not isinstance(x, Tensor)]
    if strange or not values:
        inside = f" with {strange[0]} in it" if strange and isinstance(value, tuple) else ""
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


def made_layer(layer: Layer, index: int, seed: int) -> nn.Module:
    """A layer, or what a function makes. That draws its weights by torch's default generators, by
    Python's and by numpy's as a function of ``seed`` and of the layer, so that every topology has
    the same."""
    if isinstance(layer, nn.Module):
        return layer
    with forked_generators(torch.device("cuda" if torch.cuda.is_initialized() else "cpu")):  # type: ignore[no-untyped-call]
        seed_piece(seed, 0, 0, index)
        random.seed(torch.initial_seed())
        np.random.seed(torch.initial_seed() % 2**32)
        made: object = layer()
    if not isinstance(made, nn.Module):
        raise InfeasibleError(
            f"layers[{index}]: must be a module, or a function that makes one, but the function "
            f"gives {type(made).__name__}"
        )
    return made


def _own(
    made: nn.Module,
    index: int,
    owners: dict[int, Owner],
    tied: tuple[ParameterName, ParameterName] | None,
) -> None:
    """Make a layer the owner of its parameters; refuse one that has another layer's."""
    for name, parameter in made.named_parameters():
        owner = owners.get(id(parameter))
        other = (owner.layer, owner.name) if owner and owner.parameter() is parameter else None
        if other is None:
            owners[id(parameter)] = Owner(ref(parameter), index, name)
        elif other[0] != index and tied not in ((other, (index, name)), ((index, name), other)):
            raise InfeasibleError(
                f"layers[{index}]: shares {name!r} with layers[{other[0]}], but layers are trained "
                "apart (give each its own parameters; first and last layer may share one with "
                f"tied=({other}, {(index, name)}))"
            )


def _copied(
    made: nn.Module, device: torch.device, owners: Owners, *, copies: bool
) -> tuple[nn.Module, dict[int, Owner]]:
    """A layer of the walk's own on its device, and other layers' parameters that it has reached."""
    own = {id(parameter) for parameter in made.parameters()}
    others = {key: owner for key, owner in owners.items() if key not in own}
    if not copies and device.type != "meta":
        return made, others
    memo: dict[int, Any] = {}
    if device.type == "meta":
        for parameter in made.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in made.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    is_real = any(not parameter.is_meta for parameter in made.parameters())
    module = copy.deepcopy(made, memo) if copies or is_real else made
    reached = {
        id(memo[key]): owner._replace(parameter=ref(memo[key]))
        for key, owner in others.items()
        if key in memo
    }
    return module, others | reached
