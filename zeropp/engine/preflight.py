"""What ZeroPP needs of CUDA: two environment variables that CUDA reads when it is initialised.

Without them steps may hang. A kernel that is loaded on its first use would wait for receives that
were posted early; and of the 8 hardware queues that are the default, two streams could share one,
in which a send would wait for a receive that waits for its own sender.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp import CUDA_SETTINGS
from zeropp.engine.errors import gathered_texts, together
from zeropp.engine.walk import Layer, ParameterKind, check_shapes
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import Axis, Placement, Precision

# Reads degrees of parallelism from a user's DeviceMesh.


_AXES: tuple[Axis, ...] = ("pp", "shard", "replicate")


def degrees_of(mesh: DeviceMesh, knobs: Mapping[str, object]) -> dict[str, Any]:
    """The degrees of a mesh, and the placement that numbers ranks as the mesh does.

    Raises InfeasibleError if the mesh has another axis, if a degree is given twice, or if no
    placement numbers ranks as the mesh does.
    """
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(_AXES):
        raise InfeasibleError(f"mesh: its axes are {names}; they must be named among {_AXES}")
    for name in names:
        if name in knobs:
            raise InfeasibleError(
                f"{name}={knobs[name]!r}: the mesh has it, too (leave one of them out)"
            )
    sizes = {name: mesh.size(names.index(name)) for name in names}
    ranks = mesh.mesh.flatten().tolist()
    for placement in get_args(Placement):
        layout = Layout(
            pp=sizes.get("pp", 1),
            shard=sizes.get("shard", 1),
            replicate=sizes.get("replicate", 1),
            placement=placement,
        )
        if ranks == _numbered(layout, names):
            return {**sizes, "placement": placement}
    raise InfeasibleError(
        f"mesh: ranks must be numbered as init_device_mesh numbers the axes (pp, replicate, shard) "
        f"or (replicate, shard, pp); this mesh has {names} and ranks {ranks}"
    )


def _numbered(layout: Layout, names: tuple[str, ...]) -> list[int]:
    """The ranks of a layout in the order of a mesh with these axes."""
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    order = sorted(range(layout.world), key=lambda rank: [places[rank][n] for n in names])  # type: ignore[index]
    return list(order)


# Checks the arguments of ``parallelize`` before anything is cut, and compares them over the ranks.
#
# If only one rank raised for a wrong argument, the others would wait for it in a collective. So
# every rank tells the others what it found, and all raise the same error.


ParameterName = tuple[int, str]  # layer, and the parameter's name in it
Tied = tuple[ParameterName, ParameterName]
_SHOWN = 60  # characters of a value in a message


def agreed(check: Callable[[], object], description: Callable[[], object]) -> None:
    """Run a check, and compare a description over the ranks. All ranks must call it.

    If ``check`` raises on any rank, every rank raises, as in ``together``. ``description`` returns
    what must be equal on all ranks (its ``repr`` is compared); it is called only if the check
    passed everywhere. If it differs, every rank raises the same InfeasibleError.
    """
    together(check)
    _compare(together(lambda: repr(description())))


def _compare(description: str) -> None:
    texts = gathered_texts(description)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            ours, theirs = _difference(texts[0], text)
            raise InfeasibleError(
                f"ranks differ: rank 0 has {ours} where rank {rank} has {theirs}; every rank must "
                "call parallelize with equal arguments and layers of equal values"
            )


def _difference(first: str, second: str) -> tuple[str, str]:
    """The part in which two texts differ, shortened, with a little of the text before it."""
    pairs = enumerate(zip(first, second, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    start = max(first.rfind("(", 0, at), first.rfind("'", 0, at - 1), at - _SHOWN // 2, 0)
    return first[start : start + _SHOWN], second[start : start + _SHOWN]


def check_layers(
    layers: Sequence[Layer],
    weights: Sequence[float] | None,
    tied: tuple[ParameterName, ParameterName] | None,
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
    if weights is not None and len(weights) != len(layers):
        raise InfeasibleError(
            f"weights: {len(weights)} numbers for {len(layers)} layers; give one per layer"
        )
    if weights is not None and not all(weight > 0 for weight in weights):
        raise InfeasibleError(f"weights={list(weights)}: every weight must be more than 0")
    _check_tied(layers, tied)
    _check_not_shared(layers, tied)


def check_sizes(sample: object, global_batch: object) -> None:
    """Refuse a sample without rows and a batch that is no number of rows; raises
    InfeasibleError."""
    if not isinstance(sample, torch.Tensor) or not sample.dim() or not len(sample):
        raise InfeasibleError(
            "sample: must be a tensor of one microbatch, with at least one row in dimension 0"
        )
    if not isinstance(global_batch, Integral) or global_batch < 1:
        raise InfeasibleError(f"global_batch={global_batch!r}: must be a whole number from 1 on")


def _check_tied(layers: Sequence[Layer], tied: tuple[ParameterName, ParameterName] | None) -> None:
    if tied is None:
        return
    (first, _), (second, _) = tied
    if (first, second) != (0, len(layers) - 1):
        raise InfeasibleError(
            f"tied={tied}: must name a parameter of the first layer (0) and then one of the last "
            f"({len(layers) - 1})"
        )


def _check_not_shared(
    layers: Sequence[Layer], tied: tuple[ParameterName, ParameterName] | None
) -> None:
    owners: dict[int, ParameterName] = {}
    places: dict[int, tuple[int, ParameterName]] = {}  # in memory
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        check_shapes(layer, index)
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


def described(index: int, layer: nn.Module) -> dict[str, object]:
    """What must be equal on all ranks that train a layer: shapes, types, and sums of the values.

    Raises InfeasibleError for a parameter that is NaN throughout, as those are of which an earlier
    model has kept only shards.
    """
    found: dict[str, object] = {}
    for name, parameter in layer.named_parameters():
        values = parameter.detach()
        if values.is_meta:
            sums: tuple[float, ...] = ()
        else:
            wide = values.double()
            sums = float(wide.sum()), float(wide.square().sum())
        if any(math.isnan(one) for one in sums) and bool(values.isnan().all()):
            raise InfeasibleError(
                f"layers[{index}]: {name!r} has no values, only NaN: the layer belongs to another "
                "model that parallelize has made, or was copied from it (make the layer anew)"
            )
        kind = tuple(values.shape), str(values.dtype), parameter.requires_grad
        found[name] = (*kind, *sums)
    return found


def check_parameters(
    kinds: Sequence[Mapping[str, ParameterKind]], tied: Tied | None, precision: Precision
) -> None:
    """Refuse parameters of 16 bits where layers compute in fp32, and tied parameters that do not
    exist or differ in kind; raises InfeasibleError. ``kinds``: every layer's parameters by name."""
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


def check_keywords(
    given: Mapping[str, torch.Tensor], rows: int, named: Iterable[frozenset[str]]
) -> None:
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


def check_loss(loss_function: object) -> None:
    """Refuse a loss function with parameters of its own; raises InfeasibleError."""
    if isinstance(loss_function, nn.Module):
        for name, parameter in loss_function.named_parameters():
            if parameter.requires_grad:
                raise InfeasibleError(
                    f"loss_fn: has the parameter {name!r}, which nothing would train (put it into "
                    "the last layer, or freeze it)"
                )


def check_tensors(parts: Mapping[str, object], used: Collection[str], device: torch.device) -> None:
    """Refuse parts of a batch that are not tensors with rows (TypeError), and those that this rank
    uses and that are on another device (ValueError)."""
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor) or not part.dim():
            raise TypeError(
                f"{name}: must be a tensor with this rank's rows in dimension 0, but is "
                f"{type(part).__name__} (also on pipeline ranks whose layers do not read it)"
            )
        if name in used and part.device != device:
            raise ValueError(
                f"{name}: is on {part.device}, but this rank trains on {device} (move the batch "
                f"there: .to({str(device)!r}))"
            )


def check_no_graph(parts: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for a part of a training batch that has a graph of its own."""
    for name, part in parts.items():
        if part.grad_fn is not None:
            raise ValueError(
                f"{name}: was computed from something that needs gradients, which no rank would "
                "add up (put that into the first layer, or detach the batch)"
            )


def check_autocast(device: torch.device) -> None:
    """Raise RuntimeError inside ``torch.autocast``: it would compute in copies of the weights from
    before the last update, and in backwards, where torch advises against it."""
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(
            "train_step, eval_step: torch.autocast is enabled (leave it, and ask parallelize for "
            "precision='bf16', or enter it inside the layers' forward)"
        )


def check_inference(call: str) -> None:
    """Raise RuntimeError inside ``torch.inference_mode``, whose tensors nothing could train."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{call}: torch.inference_mode is enabled (leave it first)")


def check_batch(parts: Mapping[str, torch.Tensor], rows: int) -> None:
    """Raise ValueError if a batch does not have this rank's number of rows."""
    for name, part in parts.items():
        if len(part) != rows:
            raise ValueError(
                f"{name}: {len(part)} rows, but this rank trains on {rows} rows per step; give it "
                "its own part of the global batch (see `rows`, `data_parallel_rank`)"
            )


def check_names(given: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse keyword inputs other than those that ``parallelize`` got; raises TypeError."""
    if set(given) != set(expected):
        raise TypeError(
            f"keyword inputs are {sorted(given)}, but parallelize got {sorted(expected)} "
            "(sample_keywords)"
        )


def check_same_rows(parts: Mapping[str, torch.Tensor]) -> None:
    """Refuse a batch whose parts have different numbers of rows; raises ValueError."""
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"eval_step: numbers of rows differ ({counts})")


def missing() -> list[str]:
    """The settings, as ``NAME=value``, that CUDA was initialised without."""
    return [f"{name}={value}" for name, value in CUDA_SETTINGS.items() if name not in os.environ]
