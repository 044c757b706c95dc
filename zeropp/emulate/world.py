"""One rank of a job of any size, alone in its process: a process group without peers, and tensors
without values."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeropp.emulate.private_names import (
    CONVERSION,
    MOST_KNOWN_NUMBERS,
    SHAPES_BY_TRIAL,
    group_of,
    is_fake,
    operators_inside,
    set_numbers,
    without_modes,
)
from zeropp.engine import walk
from zeropp.engine.evaluator import Evaluator, Passed
from zeropp.engine.ranks.errors import ErrorBarrier

Fill = Callable[[Tensor], None]
_IS_TRUE = "_is_taken_for_true"  # an attribute of fake tensors
MOST_KNOWN = 256  # numbers of a fake tensor whose values are known


@contextmanager
def replaced(*stand_ins: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside this context, owners have other attributes: each as (owner, name, stand-in)."""
    with ExitStack() as undo:
        for owner, name, stand_in in stand_ins:
            undo.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def wherever_imported(functions: Mapping[Any, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Stand-ins by the function that they stand for, as ``replaced`` takes them: in all modules
    that have the function, by whatever name, as a program may have imported it before."""
    by_id = {id(function): stand_in for function, stand_in in functions.items()}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in by_id:
                yield module, name, by_id[id(value)]


def like(original: Any, call: Any) -> Any:
    """A stand-in for a function or a class of torch, which takes what torch's takes, by place and
    by keyword, and refuses what torch's refuses. Of that it gives ``call`` what this has parameters
    for, by torch's names; where ``call`` is no function, it is the answer."""
    taken = inspect.signature(original)
    wanted = inspect.signature(call).parameters if callable(call) else None

    @wraps(original, updated=())
    def stand_in(*arguments: Any, **keywords: Any) -> Any:
        bound = taken.bind(*arguments, **keywords)
        bound.apply_defaults()
        if wanted is None:
            return call
        return call(**{name: bound.arguments[name] for name in wanted})

    if isinstance(original, type):  # with which programs annotate
        return type(original.__name__, (), {"__new__": lambda _, *a, **k: stand_in(*a, **k)})
    return stand_in


@contextmanager
def fake_world(rank: int, size: int, fill_integers: Fill | None = None) -> Iterator[None]:
    """Inside this context the process is rank ``rank`` of ``size``, for torch and in the usual
    environment variables. The process group answers at once: a gather copies this rank's part into
    the place of every part, and a reduction returns this rank's part. What peers would say is what
    this rank says, and what would pass between stages is what the walk over the layers has found.

    ``fill_integers`` fills a received message of integers with what peers would have sent. Messages
    of floating-point numbers are random, because products of zeros are faster on a GPU, unless they
    are fake tensors, which have no values.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=size)
    # A send ends at once; otherwise its tensor would be kept until the end of the step.
    work = type(dist.all_reduce(torch.zeros(1), async_op=True))
    gather = dist.all_gather_object
    functions: dict[Any, Any] = {gather: like(gather, same_everywhere)}
    leaves_outputs = not hasattr(dist, "reduce_scatter_single")  # before torch 2.13
    if leaves_outputs:
        functions[dist.reduce_scatter_tensor] = _scattered(dist.reduce_scatter_tensor)
        functions[dist.all_to_all_single] = _exchanged(dist.all_to_all_single)
    if fill_integers is not None:
        functions |= {f: _filled(f, fill_integers) for f in (dist.recv, dist.irecv)}
    try:
        with (
            replaced(
                (work, "is_completed", lambda _: True),
                (ErrorBarrier, "exchange", lambda _, numbers: [list(numbers)] * size),
                (Evaluator, "boundaries", _known_boundaries),
                *wherever_imported(functions),
            ),
            _functional_scatters() if leaves_outputs else nullcontext(),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _filled(original: Any, fill_integers: Fill) -> Any:
    @wraps(original)
    def receive(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            if tensor.is_floating_point():
                if not is_fake(tensor):
                    tensor.normal_()
            elif is_fake(tensor):
                with without_modes():
                    numbers = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    fill_integers(numbers)
                set_numbers(tensor, numbers)
            else:
                fill_integers(tensor)
        return original(tensor, *arguments, **keywords)

    return receive


def _scattered(original: Any) -> Any:
    """A reduce-scatter that writes this rank's part, as that of torch 2.13's fake group does. An
    older one leaves the output as it was allocated: a rank would train on what lies in memory."""

    @wraps(original)
    def scatter(output: Tensor, input: Tensor, *rest: Any, **keywords: Any) -> Any:
        group = keywords.get("group", rest[1] if len(rest) > 1 else None)
        if not is_fake(output):
            with torch.no_grad(), without_modes():
                parts = input.reshape(-1).chunk(dist.get_world_size(group))
                output.view(-1).copy_(parts[dist.get_rank(group)])
        return original(output, input, *rest, **keywords)

    return scatter


@contextmanager
def _functional_scatters() -> Iterator[None]:
    """The same for reduce-scatters of DTensors, which are operators."""

    def scatter(input: Tensor, reduce_op: str, size: int, group: str) -> Tensor:
        del reduce_op
        _, ranks = group_of(group) or ("", (0,))
        return input.chunk(size)[ranks.index(dist.get_rank())].clone()

    with operators_inside("_c10d_functional", "IMPL") as library:
        for device in ("CPU", "CUDA"):
            library.impl("reduce_scatter_tensor", scatter, device)
        yield


def _exchanged(original: Any) -> Any:
    """An exchange that writes what this rank sends, as often as it fits, for the same reason."""

    @wraps(original)
    def exchange(output: Tensor, input: Tensor, *rest: Any, **keywords: Any) -> Any:
        if not is_fake(output) and output.numel():
            with torch.no_grad(), without_modes():
                sent = input.reshape(-1) if input.numel() else input.new_zeros(1)
                copies = -(-output.numel() // sent.numel())
                output.view(-1).copy_(sent.repeat(copies)[: output.numel()])
        return original(output, input, *rest, **keywords)

    return exchange


def same_everywhere(object_list: list[Any], obj: Any) -> None:
    """Stands for what gathers objects: peers have the same."""
    object_list[:] = [obj] * len(object_list)


def _known_boundaries(evaluator: Evaluator, batch: object) -> Passed:
    """The shapes that the chunks were made for: there are no peers to run a microbatch with."""
    del batch
    passed: Passed = {}
    for stage, chunk in evaluator.chunks.items():
        passed |= {stage: chunk.arriving} if chunk.arriving else {}
        passed |= {stage + 1: chunk.leaving} if chunk.leaving else {}
    return passed


def without_values() -> AbstractContextManager[None]:
    """Inside this context, what would need the values of fake tensors runs without them."""
    return replaced(
        (DeviceMesh, "__init__", _untraced(DeviceMesh.__init__)),
        (walk, "walk", _untraced(walk.walk)),
        (*SHAPES_BY_TRIAL, _untraced(getattr(*SHAPES_BY_TRIAL))),
        (*CONVERSION, _convert),
        (*MOST_KNOWN_NUMBERS, MOST_KNOWN),
    )


def _untraced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of the trace, because it needs values: meshes, shapes that DTensor
    finds by a trial, and the walk over layers, which calls them without values itself."""

    @wraps(original)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            return original(*arguments, **keywords)

    return run


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert the parameters of modules in place, as on a GPU, where torch's own way refuses fake
    ones. What moves to another device, and a DTensor, whose local part would stay as it is, is made
    anew; parameters that modules share stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, function(buffer))
        for name, old in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            with torch.no_grad():
                values = old if old in made else function(old)
            if values is old:
                pass
            elif old.device == values.device and not isinstance(old, DTensor):
                old.data = values
            else:
                made[old] = nn.Parameter(values, old.requires_grad)
                vars(made[old]).update(vars(old))
            setattr(part, name, made.get(old, old))
    return module


def taken_for_granted(number: Tensor) -> float:
    """What a host reads where the value is not known: 0, but 1 of long integers. By one torch's
    pipeline stages ask whether their neighbour knows the shapes; flags are short."""
    if is_taken_for_true(number):
        return True
    if number.is_floating_point():
        return 0.0
    return int(number.dtype in (torch.int32, torch.int64))


def take_for_true(flag: Tensor) -> None:
    """Let a host that reads this flag find it true: whether a loss is finite, for example."""
    setattr(flag, _IS_TRUE, True)


def is_taken_for_true(flag: object) -> bool:
    """Whether ``take_for_true`` was told of it."""
    return getattr(flag, _IS_TRUE, False)
