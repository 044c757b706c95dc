"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
layer before it. The first gets microbatches of inputs; the loss function gets the last one's output
and the targets. ``torch.distributed`` must be initialised; all ranks call with equal arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropp.arguments import Arguments, Request, request_of
from zeropp.choose import Job, choose
from zeropp.cut import Stages, cut_as
from zeropp.engine import preflight
from zeropp.engine.engine import Engine
from zeropp.engine.errors import together
from zeropp.engine.interpreter import LossFunction
from zeropp.engine.options import Piece
from zeropp.engine.preflight import (
    agreed,
    check_inference,
    check_keywords,
    check_layers,
    check_loss,
    check_parameters,
    check_sizes,
    described,
)
from zeropp.engine.values import keywords_of
from zeropp.engine.walk import Layer, check_recompute, saved_bytes, try_layers
from zeropp.layout import InfeasibleError
from zeropp.literals import Recompute, if_auto
from zeropp.parallel_model import ParallelModel


def parallelize(
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    *,
    sample: Tensor,
    global_batch: int,
    **arguments: Unpack[Arguments],
) -> ParallelModel:
    """Cut layers into ``pp * chunks`` stages and build this rank's.

    ``layers`` are modules, or functions that make the same one at every call: a function is called
    on the meta device to learn sizes, and for real only on the ranks that hold its layer.
    ``loss_fn`` takes the last layer's output and the targets, and gives the mean (or the sum) over
    a microbatch. ``sample`` is one microbatch of inputs, and ``global_batch`` the rows of a step
    over all ranks. All other arguments are in ``Arguments``.

    Raises RuntimeError without a process group, TypeError for an unknown argument, and
    InfeasibleError with one line, the same on every rank, for arguments that do not fit or differ.
    """
    if not dist.is_initialized():
        raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
    request = _checked(arguments, layers, sample, global_batch)
    device = together(lambda: _device(request.device, request.mesh))
    request, stages = together(
        lambda: _cut(layers, loss_fn, request=request, sample=sample, global_batch=global_batch)
    )
    pieces = together(lambda: stages.pieces(layers, device))
    _compare_values(pieces)
    engine = Engine(
        pieces, stages.schedule, stages.layout, loss_function=loss_fn, boundary=stages.boundary,
        optimizer=request.optimizer, device=device, options=request.engine_options(),
    )  # fmt: skip
    return ParallelModel(
        engine,
        sample=sample,
        sample_keywords=request.sample_keywords,
        rows=stages.rows(global_batch),
        layout=stages.layout,
        settings=stages.describe(request),
    )


def _checked(
    arguments: Mapping[str, Any], layers: Sequence[Layer], sample: Tensor, global_batch: int
) -> Request:
    """The arguments as a request; raises the same error on every rank where one is wrong or ranks
    differ."""
    together(lambda: check_inference("parallelize"))
    _use(arguments.get("device"))
    request = together(lambda: request_of(arguments))
    together(lambda: check_sizes(sample, global_batch))
    agreed(
        lambda: check_layers(layers, request.weights, request.tied),
        lambda: (request.described(), global_batch, tuple(sample.shape), sample.dtype, len(layers)),
    )
    return request


def _cut(
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    *,
    request: Request,
    sample: Tensor,
    global_batch: int,
) -> tuple[Request, Stages]:
    """The request, in which every ``auto`` is replaced by a value, and the stages of the model."""
    sizes = try_layers(layers, sample, request.sample_keywords)
    named = [keywords_of(loss_fn), *(one.names for one in sizes)]
    check_keywords(request.sample_keywords, len(sample), named)
    check_loss(loss_fn)
    check_parameters([one.kinds for one in sizes], request.tied, request.precision)
    if request.open:
        saved = saved_bytes(layers, sample, request.sample_keywords)
        job = Job(
            sizes=sizes,
            saved=saved,
            world=dist.get_world_size(),
            global_batch=global_batch,
            microbatch_size=len(sample),
        )
        request = choose(request, job)
    recompute: Recompute = if_auto(request.knobs.recompute, "none")
    check_recompute(layers, sample, request.sample_keywords, recompute)
    return request, cut_as(request, sizes, global_batch, len(sample))


def _use(asked: torch.device | str | None) -> None:
    """Make a CUDA device that was asked for by its number the current one of this process, because
    the collectives that compare the arguments may need it. Others are refused by ``_device``."""
    with suppress(Exception):
        if asked is not None and torch.device(asked).index is not None:
            torch.cuda.set_device(asked)


def _device(asked: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live.

    A CUDA device becomes this process's current one, because streams and events are those of the
    current device where none is named.
    """
    on_cuda = (
        "nccl" in str(dist.get_backend_config()) if mesh is None else mesh.device_type == "cuda"
    )
    device = torch.device(asked or ("cuda" if on_cuda else "cpu"))
    known = sorted(entry.partition(":")[0] for entry in dist.get_backend_config().split(","))
    if device.type not in known:
        raise InfeasibleError(
            f"device={str(device)!r}: the process group has no backend for it, only for "
            f"{' and '.join(known)} (give init_process_group another backend, or take that device)"
        )
    if device.type == "cpu":
        return torch.device("cpu")  # tensors on the CPU have no index
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        if missing := preflight.missing():
            warnings.warn(
                f"set {' '.join(missing)}, or import zeropp, before CUDA is used: steps may hang",
                stacklevel=5,
            )
    return device


def _compare_values(pieces: Sequence[Piece]) -> None:
    """Refuse ranks that hold the same layer with other values; collective."""
    mine = together(lambda: {piece.index: described(piece.index, piece.module) for piece in pieces})
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
