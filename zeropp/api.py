"""The public API: a list of single-device layers becomes this rank's part of a pipeline.

Layers stay as they were written. They are called one after another, each with the output of the
layer before it. The first gets microbatches of inputs; the loss function gets the last one's output
and the targets. ``torch.distributed`` must be initialised; all ranks call with equal arguments.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeropp.arguments import Arguments, request_of
from zeropp.cut import cut
from zeropp.engine.checks import agreed, check_keywords, check_layers, described
from zeropp.engine.engine import Engine
from zeropp.engine.interpreter import LossFunction
from zeropp.engine.options import Piece
from zeropp.engine.together import together
from zeropp.engine.trial import Layer
from zeropp.engine.values import keywords_of
from zeropp.layout import InfeasibleError
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
    over all ranks. All other arguments are in ``Arguments``. The last layer's weight gradients are
    not put off: its output is taken to be wide.

    Raises TypeError for an argument that there is not, and InfeasibleError with one line, the same
    on every rank, where something does not fit or ranks were given different things.
    """
    if not dist.is_initialized():
        raise RuntimeError("parallelize: call torch.distributed.init_process_group first")
    request = together(lambda: request_of(arguments))
    agreed(
        lambda: check_layers(layers, request.weights, request.tied),
        lambda: (request.described(), global_batch, tuple(sample.shape), sample.dtype, len(layers)),
    )
    device = _device(request.device, request.mesh)
    if device.type == "cuda":
        _prepare_cuda()
    stages = together(lambda: cut(layers, request, sample, global_batch))
    named = [keywords_of(loss_fn), *(size.names for size in stages.sizes)]
    together(lambda: check_keywords(request.sample_keywords, len(sample), named))
    pieces = together(lambda: stages.pieces(layers, device))
    _compare_values(pieces)
    options = request.engine_options()
    engine = Engine(
        pieces, stages.schedule, stages.layout, loss_fn, stages.boundary, request.optimizer,
        device, options,
    )  # fmt: skip
    rows = stages.rows(global_batch)
    return ParallelModel(engine, sample, request.sample_keywords, rows, stages.layout)


def _device(asked: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """Where this rank trains: as asked, else where its process group's tensors live."""
    if asked is not None:
        return torch.device(asked)
    on_cuda = (
        "nccl" in str(dist.get_backend_config()) if mesh is None else mesh.device_type == "cuda"
    )
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def _prepare_cuda() -> None:
    """Ask CUDA for what early receives need, as long as it can be asked.

    A kernel that is loaded on first use would wait for receives that are posted early; of the 8
    hardware queues that are the default, two streams could share one. Warns where CUDA was
    initialised without these settings.
    """
    wanted = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    missing = [f"{name}={value}" for name, value in wanted.items() if name not in os.environ]
    if missing and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warnings.warn(f"set {' '.join(missing)} before CUDA is used: steps may hang", stacklevel=3)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _compare_values(pieces: Sequence[Piece]) -> None:
    """Refuse ranks that hold the same layer with other values; collective."""
    mine = {piece.index: described(piece.module.named_parameters()) for piece in pieces}
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
