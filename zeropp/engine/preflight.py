"""Checks the layers of ``parallelize``, and compares them over the ranks, before anything is built.

If only one rank raised for a wrong argument, the others would wait for it in a collective. So the
caller runs these checks in ``errors.together``: every rank tells the others what it found, and all
raise the same error.
"""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp import CUDA_MISSED
from zeropp.engine.errors import gathered_texts, together
from zeropp.engine.options import Piece
from zeropp.engine.walk import Layer, ParameterKind, check_layer
from zeropp.layout import InfeasibleError
from zeropp.literals import Precision

ParameterName = tuple[int, str]  # layer, and the parameter's name in it
Tied = tuple[ParameterName, ParameterName]
_SHOWN = 60  # characters of a value in a message


def compare(describe: Callable[[], str]) -> None:
    """Raise the same InfeasibleError on every rank if a description is not the same on all; all
    ranks must call it."""
    texts = gathered_texts(together(describe))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            ours, theirs = _difference(texts[0], text)
            raise InfeasibleError(
                f"ranks differ: rank 0 has {ours} where rank {rank} has {theirs}; every rank must "
                "call parallelize with equal arguments and layers of equal values"
            )


_STREAMS = 8  # of a pipeline rank: compute, three lanes, messages to and from two neighbours


def check_cuda(pp: int) -> None:
    """Refuse what CUDA was told where a pipeline would hang; raises InfeasibleError. Warns of what
    may hang: settings that CUDA was initialised without, and blocking launches."""
    if pp == 1:
        return
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if not connections.isdecimal() or int(connections) < _STREAMS:
        raise InfeasibleError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a pipeline rank has {_STREAMS} streams, "
            "and two that share a hardware queue wait for each other for ever (set 32 before CUDA "
            "is used, or pp=1)"
        )
    if os.environ.get("CUDA_MODULE_LOADING", "").upper() == "LAZY":
        raise InfeasibleError(
            "CUDA_MODULE_LOADING=LAZY: ranks that load kernels at their first use wait for "
            "messages of each other for ever (set EAGER before CUDA is used, or pp=1)"
        )
    if CUDA_MISSED:
        names = " and ".join(CUDA_MISSED)
        warnings.warn(
            f"CUDA was initialised without {names}: steps may hang (import zeropp earlier)",
            stacklevel=4,
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        warnings.warn(
            "CUDA_LAUNCH_BLOCKING is set: pipelines hang, because a rank that waits for its "
            "message to arrive never asks for its neighbour's (unset it, or pp=1)",
            stacklevel=4,
        )


def check_own_gpu(*, on_cuda: bool) -> None:
    """Refuse ranks that share a GPU, on all ranks; raises InfeasibleError. All ranks must call it,
    also those that do not train ``on_cuda``. They compare on the CPU, because NCCL's first
    collective would fail with less to read."""
    mine = ""
    if on_cuda and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        mine = f"{device.uuid} of {socket.gethostname()}"
    group = dist.new_group(backend="gloo", group_desc="zeropp devices")
    gpus = gathered_texts(mine, group)
    dist.destroy_process_group(group)
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        ranks[gpu].append(rank)
    shared = next((lot for gpu, lot in ranks.items() if gpu and len(lot) > 1), None)
    if shared is not None:
        raise InfeasibleError(
            f"device: ranks {shared} share GPU {gpus[shared[0]]} (call torch.cuda.set_device with "
            "the local rank, or give device= to parallelize)"
        )


def _difference(first: str, second: str) -> tuple[str, str]:
    """The part in which two texts differ, shortened, with a little of the text before it."""
    pairs = enumerate(zip(first, second, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(first.rfind("(", 0, at), first.rfind("'", 0, at - 1), at - _SHOWN // 2, 0)
    return first[start : start + _SHOWN], second[start : start + _SHOWN]


def compare_values(pieces: Sequence[Piece]) -> None:
    """Refuse ranks that hold the same layer with other values; all ranks must call it."""
    mine = together(lambda: {piece.index: _values(piece.index, piece.module) for piece in pieces})
    held: list[dict[int, dict[str, object]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(held, mine)
    first: dict[int, tuple[int, dict[str, object]]] = {}
    for rank, layers in enumerate(held):
        for index, values in layers.items():
            owner, expected = first.setdefault(index, (rank, values))
            for name in expected | values:
                if repr(expected.get(name)) != repr(values.get(name)):  # NaN equals itself here
                    raise InfeasibleError(
                        f"layers[{index}]: {name!r} is not the same on ranks {owner} and {rank} "
                        "(seed all ranks alike before the layers are made, or load a checkpoint)"
                    )


def _values(index: int, layer: nn.Module) -> dict[str, object]:
    """What must be equal on all ranks that train a layer: shapes, types, and sums of the values.

    Raises InfeasibleError for a parameter that is NaN throughout, as those are of which an earlier
    model has kept only shards.
    """
    found: dict[str, object] = {}
    for name, parameter in layer.named_parameters():
        wide = parameter.detach().double()
        sums = () if wide.is_meta else (float(wide.sum()), float(wide.square().sum()))
        if any(math.isnan(one) for one in sums) and bool(wide.isnan().all()):
            raise InfeasibleError(
                f"layers[{index}]: {name!r} has no values, only NaN: the layer belongs to another "
                "model that parallelize has made, or was copied from it (make a new layer)"
            )
        found[name] = (tuple(wide.shape), str(parameter.dtype), parameter.requires_grad, *sums)
    return found


def check_layers(
    layers: Sequence[Layer], weights: Sequence[float] | None, tied: Tied | None
) -> None:
    """Raise InfeasibleError for layers that cannot be trained separately.

    A parameter in two layers would be trained twice, each time with a part of its gradient;
    ``tied`` names the only pair that may be shared.
    """
    if not isinstance(layers, Sequence | nn.Sequential | nn.ModuleList):
        raise InfeasibleError(
            f"layers: must be a list of modules, or of functions that make them, but is "
            f"{type(layers).__name__}"
        )
    if not layers:
        raise InfeasibleError("layers=[]: there is nothing to train")
    for index, layer in enumerate(layers):
        if not callable(layer) or isinstance(layer, type):
            raise InfeasibleError(
                f"layers[{index}]: must be a module, or a function that makes one, but is "
                f"{type(layer).__name__}"
            )
    if weights is not None and (len(weights) != len(layers) or not all(w > 0 for w in weights)):
        raise InfeasibleError(
            f"weights: {len(weights)} numbers for {len(layers)} layers; give one per layer, and "
            "every weight must be more than 0"
        )
    if tied is not None and not 0 <= tied[0][0] < tied[1][0] < len(layers):
        raise InfeasibleError(
            f"tied={tied}: must name parameters of two layers, which are numbered from 0 to "
            f"{len(layers) - 1}"
        )
    _check_not_shared(layers, tied)


def _check_not_shared(layers: Sequence[Layer], tied: Tied | None) -> None:
    owners: dict[int, ParameterName] = {}
    places: dict[int, tuple[int, ParameterName]] = {}  # in memory
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        check_layer(layer, index)
        for name, parameter in layer.named_parameters():
            before = owners.setdefault(id(parameter), (index, name))
            if before[0] != index and (before, (index, name)) != tied:
                raise InfeasibleError(
                    f"layers[{index}]: shares {name!r} with layers[{before[0]}], but layers are "
                    "trained apart (give each its own parameters; first and last layer may share "
                    f"one with tied=({before}, {(index, name)}))"
                )
            if parameter.is_meta or not parameter.numel():
                continue
            other, where = places.setdefault(parameter.data_ptr(), (id(parameter), (index, name)))
            if other != id(parameter) and (where, (index, name)) != tied:
                raise InfeasibleError(
                    f"layers[{index}]: {name!r} is in the same memory as {where[1]!r} of "
                    f"layers[{where[0]}], but is another parameter (make it the same object, or "
                    "clone its values)"
                )


def check_parameters(
    kinds: Sequence[Mapping[str, ParameterKind]],
    tied: Tied | None,
    precision: Precision,
    fp32_modules: tuple[type[nn.Module], ...],
) -> None:
    """Refuse parameters of 16 bits where layers compute in fp32, parameters that are used both
    inside and outside of ``fp32_modules``, and tied parameters that do not exist or differ in kind;
    raises InfeasibleError. ``kinds``: every layer's parameters by name."""
    for index, layer in enumerate(kinds):
        for name, kind in layer.items():
            if precision == "fp32" and kind.dtype.is_floating_point and kind.dtype.itemsize < 4:
                raise InfeasibleError(
                    f"layers[{index}]: {name!r} is {kind.dtype}, but precision='fp32' computes in "
                    "fp32 (call .float() on the layers; for bf16 ask for precision='bf16', too)"
                )
    for index, name in tied or ():
        if name not in kinds[index]:
            raise InfeasibleError(f"tied={tied}: layers[{index}] has no parameter {name!r}")
    ends = [kinds[index][name] for index, name in tied or ()]
    if tied is not None and ends[0] != ends[1]:
        raise InfeasibleError(
            f"tied={tied}: the first is {ends[0]}, but the second {ends[1]}; both must have the "
            "same shape and type, and both be trained or frozen"
        )
    for index, layer in enumerate(kinds if precision == "bf16" else ()):
        for name, kind in layer.items():
            inside = [*kind.inside]
            if (index, name) in (tied or ()):
                inside = [one for end in ends for one in end.inside]
            wide = {any(issubclass(one, fp32_modules) for one in path) for path in inside}
            if len(wide) > 1:
                raise InfeasibleError(
                    f"fp32_modules: {name!r} of layers[{index}] is used both inside and outside of "
                    "such a module, but computes in one number type (name the kinds of all modules "
                    "that use it, or of none)"
                )


def check_keywords(given: Mapping[str, Tensor], rows: int, named: Iterable[frozenset[str]]) -> None:
    """Refuse keyword inputs that nothing takes, or that have another number of rows than the
    sample; raises InfeasibleError. ``named``: what every layer and the loss function take."""
    known = frozenset[str]().union(*named)
    for name, value in given.items():
        if name not in known:
            raise InfeasibleError(
                f"sample_keywords: {name!r} is named by no layer's forward and not by the loss "
                "function (leave it out, or add a parameter of that name)"
            )
        if not value.dim() or len(value) != rows:
            raise InfeasibleError(
                f"sample_keywords: {name!r} has shape {tuple(value.shape)}, but one row for each "
                f"of the sample's {rows} is needed in dimension 0 (expand it)"
            )


def check_loss(loss_fn: Any) -> None:
    """Raise InfeasibleError for a loss that is no function, and for a module with parameters of its
    own."""
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise InfeasibleError(
            f"loss_fn={loss_fn!r}: must be a function of (output of the last layer, targets)"
        )
    if isinstance(loss_fn, nn.Module):
        for name, parameter in loss_fn.named_parameters():
            if parameter.requires_grad:
                raise InfeasibleError(
                    f"loss_fn: has the parameter {name!r}, which nothing would train (put it into "
                    "the last layer, or freeze it)"
                )


def check_inference(call: str) -> None:
    """Raise RuntimeError inside ``torch.inference_mode``, whose tensors nothing could train."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{call}: torch.inference_mode is enabled (leave it first)")
