"""Runs a training script of anybody's as one rank of a job, alone, with fake tensors on an emulated
device: what ``zeropp.emulate.trace`` does for the suite's contenders.

The script makes its process groups itself, which have no peers here, and asks for a GPU or a CPU:
both are the emulated device. A step is what lies between two steps of its optimizer. It is stopped
after its second one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.kernels import as_on_cuda, describe, without_values
from zeropp.emulate.log import STEP, Issued
from zeropp.emulate.memory import Allocations, observed
from zeropp.emulate.private_names import FakeTensorMode, without_modes
from zeropp.emulate.stand_ins import emulated
from zeropp.emulate.world import fake_world

_STEPS = 2  # of the optimizer, of which the first makes its state


class ScriptError(ValueError):
    """A script cannot be emulated; the message is one line that says why."""


class _EnoughError(BaseException):
    """The script has done its steps; no ``except Exception`` of its own stops this."""


@dataclass(frozen=True)
class ScriptTrace:
    """What one rank of a script has issued, and the bytes of its tensors at the peak of a step."""

    rank: int
    log: Sequence[Issued]
    peak_bytes: int

    @property
    def peers(self) -> set[int]:
        """The ranks with which it exchanges messages."""
        messages = (part.key[0] for issued in self.log for part in issued.parts)  # type: ignore[index]
        return {end for key in messages if len(key) == 3 for end in key[1:]} - {self.rank}


def trace_script(
    path: str, arguments: Sequence[str], world: int, tell: Callable[[int], None] = lambda _: None
) -> list[ScriptTrace]:
    """Trace rank 0 of ``world`` and all ranks that messages connect it with, which are those of its
    pipeline; the others are taken to do the same. ``tell`` is called with how many are traced.
    Raises ScriptError if the script does not get to its second step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    traces: dict[int, ScriptTrace] = {}
    with ProcessPoolExecutor(
        os.cpu_count() or 1, mp_context=context, max_tasks_per_child=1
    ) as pool:
        wanted = {0}
        while missing := sorted(wanted - set(traces)):
            for trace in pool.map(partial(_trace_rank, path, tuple(arguments), world), missing):
                traces[trace.rank] = trace
                wanted |= trace.peers
                tell(len(traces))
    return [traces[rank] for rank in sorted(traces)]


def _trace_rank(path: str, arguments: Sequence[str], world: int, rank: int) -> ScriptTrace:
    torch.set_num_threads(1)
    device = VirtualDevice(describe=describe)
    steps: list[int] = []

    def count(*_: object) -> None:
        device.log.place(STEP)
        steps.append(allocations.peak().total if steps else 0)
        allocations.begin_step()
        if len(steps) == _STEPS:
            raise _EnoughError

    with (
        fake_world(rank, world),
        FakeTensorMode(),
        Allocations() as allocations,
        observed(allocations),
        emulated(device),
        without_values(),
        as_on_cuda(device),
        _as_launched(path, arguments),
        _CudaIsHere(),
    ):
        handle = register_optimizer_step_post_hook(count)
        try:
            runpy.run_path(path, run_name="__main__")
        except _EnoughError:
            return ScriptTrace(rank, device.log.issued, steps[-1])
        except (Exception, SystemExit) as error:
            line = " ".join(str(error).split())[:300]
            text = f"{path}: rank {rank} cannot be emulated: {type(error).__name__}: {line}"
            raise ScriptError(text) from None
        finally:
            handle.remove()
    raise ScriptError(
        f"{path}: ended on rank {rank} after {len(steps)} steps of an optimizer (needed: {_STEPS})"
    )


@contextmanager
def _as_launched(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Inside this context the process looks as if torchrun had started it with a script."""

    def nothing(*_: object, **__: object) -> None:
        """The process group is there, and stays."""

    def refuse(*_: object, **__: object) -> None:
        raise ScriptError(
            "a peer's objects are not known (give PipelineStage its input_args and output_args)"
        )

    mesh = device_mesh.init_device_mesh

    @wraps(mesh)
    def mesh_on_cpu(device_type: str, *sizes: Any, **keywords: Any) -> Any:
        with without_modes():  # it reads the values of tensors
            return mesh("cpu", *sizes, **keywords)

    folder = os.path.dirname(os.path.abspath(path))
    with ExitStack() as undo:
        for owner, name, stand_in in (
            (sys, "argv", [path, *arguments]),
            (sys, "path", [folder, *sys.path]),
            (dist, "init_process_group", nothing),
            (dist, "destroy_process_group", nothing),
            (dist, "recv_object_list", refuse),
            (dist, "init_device_mesh", mesh_on_cpu),
            (device_mesh, "init_device_mesh", mesh_on_cpu),
            (torch.cuda, "set_device", nothing),
        ):
            undo.enter_context(mock.patch.object(owner, name, stand_in))
        yield


class _CudaIsHere(TorchFunctionMode):
    """Gives the CPU, which is emulated, to those who ask for a CUDA device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function of torch."""
        if function is torch.device:
            return _on_cpu(function(*args, **(kwargs or {})))
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*map(_on_cpu, args), **{n: _on_cpu(v) for n, v in (kwargs or {}).items()})


def _on_cpu(value: object) -> object:
    is_cuda = isinstance(value, torch.device | str) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda else value
