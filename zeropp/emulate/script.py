"""What a training script calls and this machine has not: torchrun's environment, GPUs, peers that
answer with objects, worker processes, files. ``as_launched`` has stand-ins for all of it, and
refuses what has none."""

from __future__ import annotations

import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.optim  # compiles functions of torch.optim, before they have stand-ins
from torch import Tensor, nn
from torch.distributed import device_mesh, fsdp
from torch.multiprocessing.spawn import spawn
from torch.overrides import TorchFunctionMode
from torch.utils import data

from zeropp.emulate.data_parallel import DataParallel
from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.memory import Allocations
from zeropp.emulate.private_names import (
    AUTOCAST,
    BATCHES,
    NUMBER_OF_STEPS,
    is_known,
    set_numbers,
    without_modes,
)
from zeropp.emulate.world import (
    MOST_KNOWN,
    is_taken_for_true,
    replaced,
    same_everywhere,
    take_for_true,
    wherever_imported,
)
from zeropp.price.cluster import Cluster, Device

_GIB = 1 << 30
# Functions that autocast runs in fp32 on a GPU and not on a CPU, by name (aten/src/ATen/
# autocast_mode.h).
_WORDS = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus"
)
_WORDS += " layer_norm group_norm norm cosine_similarity cross_entropy nll_loss l1_loss mse_loss"
_WORDS += " smooth_l1_loss softmax log_softmax cumprod cumsum prod sum logsumexp __pow__ __rpow__"
_IN_FP32 = set(_WORDS.split())
_FSDP1 = "FullyShardedDataParallel (FSDP1) is not emulated: shard with fully_shard (FSDP2)"
_BATCH_NORM = "SyncBatchNorm is not emulated: leave out convert_sync_batchnorm"
_NOT_EMULATED = (
    (fsdp.CPUOffloadPolicy, "__init__", "CPUOffloadPolicy is not emulated: leave it out"),
    (fsdp.FullyShardedDataParallel, "__init__", _FSDP1),
    (nn.DataParallel, "__init__", "DataParallel is not emulated: use DistributedDataParallel"),
    (nn.SyncBatchNorm, "forward", _BATCH_NORM),
)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_FINITE, _ALL = (torch.isfinite, Tensor.isfinite), (torch.all, Tensor.all)
_MADE_ON_HOST = (torch.randint, torch.randperm, torch.arange)
# What helps against an error whose own words do not say it, by the name of its type.
_HELP = {
    "PipeliningMetadataError": "give PipelineStage its input_args and output_args",
    "DynamicOutputShapeException": "a shape depends on values, which are not there",
}


class ScriptError(ValueError):
    """A script cannot be emulated; the message is one line that says why."""


def why_not(path: str, rank: int, error: BaseException) -> str:
    """The line that says where and why a script cannot be emulated."""
    folder = os.path.dirname(os.path.abspath(path))
    place, source = path, ""
    for frame in traceback.extract_tb(error.__traceback__):
        name = os.path.abspath(frame.filename)
        is_own = name.startswith(f"{folder}{os.sep}") and "site-packages" not in name
        if is_own and os.path.isfile(name):
            place, source = f"{frame.filename}:{frame.lineno}", frame.line or ""
    if isinstance(error, SystemExit):
        return f"{place}: on rank {rank} the script ends itself, by sys.exit({error.code!r})"
    kind = type(error).__name__
    text = " ".join(str(error).split())[:300] or f"at {source}"
    if kind in _HELP:
        text = f"{text.rstrip('.')} ({_HELP[kind]})"
    return f"{place}: rank {rank} cannot be emulated: {kind}: {text}"


def _nothing(*_: object, **__: object) -> None:
    """What has no effect here."""


def _refuse(line: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise ScriptError(line)

    return refuse


@contextmanager
def as_launched(
    device: VirtualDevice,
    memory: Allocations,
    path: str,
    arguments: Sequence[str],
    rank: int,
    world: int,
    cluster: Cluster,
) -> Iterator[None]:
    """Inside this context the process looks as if torchrun had started it with a script on the
    nodes of a cluster, whose GPUs are the emulated device."""
    per_node = min(cluster.gpus_per_node, world)
    node, place = divmod(rank, per_node)
    os.environ |= {"LOCAL_WORLD_SIZE": str(per_node), "LOCAL_RANK": str(place)}
    os.environ |= {"GROUP_RANK": str(node), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    folder = os.path.dirname(os.path.abspath(path))
    command = (sys, "argv", [path, *arguments]), (sys, "path", [folder, *sys.path])
    cuda = _cuda(memory, cluster.device, per_node)
    stand_ins = (*_distributed(device, rank, world), *_objects(rank), *cuda, *_training(device))
    with replaced(*command, *stand_ins), _CudaIsHere(device):
        yield


def _distributed(device: VirtualDevice, rank: int, world: int) -> Iterator[tuple[Any, str, Any]]:
    """What needs peers."""
    mesh = device_mesh.init_device_mesh

    @wraps(mesh)
    def mesh_on_cpu(device_type: str, *sizes: Any, **keywords: Any) -> Any:
        del device_type
        with without_modes():  # it reads the values of tensors
            return mesh("cpu", *sizes, **keywords)

    def join(*_: object, world_size: int = -1, device_id: object = None, **__: object) -> None:
        if world_size not in (-1, world):
            line = f"init_process_group(world_size={world_size}): give --ranks {world_size}"
            raise ScriptError(line)
        device.is_connected = device_id is not None

    def run_here(fn: Any, args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs != world:
            raise ScriptError(f"spawn(nprocs={nprocs}): give --ranks {nprocs}")
        fn(rank, *args)

    yield from wherever_imported(
        {
            dist.init_process_group: join,
            dist.destroy_process_group: _nothing,
            dist.monitored_barrier: _nothing,
            mesh: mesh_on_cpu,
            spawn: run_here,
            nn.parallel.DistributedDataParallel: DataParallel,
        }
    )
    for owner, name, line in _NOT_EMULATED:
        yield owner, name, _refuse(line)


def _objects(rank: int) -> Iterator[tuple[Any, str, Any]]:
    """What sends objects. Parameters have torch's names, as scripts give them by name."""

    def check_source(name: str, src: int | None, group: Any, group_src: int | None) -> None:
        if src is None:
            src = dist.get_process_group_ranks(group)[group_src or 0]
        if src != rank:
            raise ScriptError(f"{name}: what rank {src} sends is not known on rank {rank}")

    def broadcast(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        del object_list, device
        check_source("broadcast_object_list", src, group, group_src)

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        check_source("scatter_object_list", src, group, group_src)
        assert scatter_object_input_list is not None
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        same_everywhere(object_gather_list or [], obj)

    objects = "a peer's objects are not known (give PipelineStage its input_args and output_args)"
    yield from wherever_imported(
        {
            dist.recv_object_list: _refuse(objects),
            dist.broadcast_object_list: broadcast,
            dist.scatter_object_list: scatter,
            dist.gather_object: gather,
        }
    )


def _cuda(memory: Allocations, gpu: Device, per_node: int) -> Iterator[tuple[Any, str, Any]]:
    """What ``torch.cuda`` tells of the emulated device."""
    capacity = int(gpu.memory_gib * _GIB)
    properties = SimpleNamespace(
        name=gpu.name, total_memory=capacity, major=9, minor=0, multi_processor_count=gpu.units
    )

    def allocated(*_: object, **__: object) -> int:
        return memory.allocated

    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: per_node,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (capacity - allocated(), capacity),
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * per_node,
    }
    on_both: dict[str, Any] = {"memory_stats": lambda *_: defaultdict(int)}
    for kind in ("allocated", "reserved"):
        on_both |= {f"memory_{kind}": allocated, f"max_memory_{kind}": allocated}
    quiet = ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats")
    on_both |= dict.fromkeys(quiet, _nothing)
    # Seeds have no stand-in: without a GPU torch keeps them for later.
    calls = "init ipc_collect reset_max_memory_allocated set_device set_per_process_memory_fraction"
    calls += " set_rng_state set_rng_state_all set_sync_debug_mode"
    stand_ins |= on_both | dict.fromkeys(calls.split(), _nothing)
    yield from ((torch.cuda, name, stand_in) for name, stand_in in stand_ins.items())
    yield from ((torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "mark"))
    on_accelerator = {
        "is_available": lambda: True,
        "device_count": lambda: per_node,
        "current_accelerator": lambda *_, **__: torch.device("cpu"),
        "current_device_index": lambda: 0,
        "set_device_index": _nothing,
        "device_index": lambda *_: nullcontext(),
    }
    for name, stand_in in (on_both | on_accelerator).items():
        yield torch.accelerator, name, stand_in


def _training(device: VirtualDevice) -> Iterator[tuple[Any, str, Any]]:
    """Optimizers, number types, data and files."""

    def compiled(model: Any = None, **options: Any) -> Any:
        return partial(compiled, **options) if model is None else model

    def optimizer_init(make: Any, optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
        one_by_one = defaults.get("fused") or defaults.get("differentiable")
        if "foreach" in defaults and defaults["foreach"] is None and not one_by_one:
            defaults = defaults | {"foreach": True}  # as by default on a GPU
        make(optimizer, params, defaults)

    def autocast_init(
        make: Any, context: Any, device_type: str = "cuda", *a: Any, **k: Any
    ) -> None:
        if not a and k.get("dtype") is None:
            k["dtype"] = torch.float16  # a GPU's default
        make(context, "cpu", *a, **k)

    def loader_init(make: Any, loader: Any, *arguments: Any, **keywords: Any) -> None:
        workers = {"num_workers": 0, "pin_memory": False, "prefetch_factor": None, "timeout": 0}
        workers |= {"persistent_workers": False, "multiprocessing_context": None}
        make(loader, *arguments, **keywords | workers)

    def fetch_unseen(fetch: Any, iterator: Any) -> Any:
        with device.unseen():
            return fetch(iterator)

    def sample_values(sample: Any, sampler: Any) -> Iterator[Any]:
        with without_modes():
            return iter(list(sample(sampler)))

    def module_to(to: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
        arguments, keywords = _with_cpu(arguments, keywords, by_index=True)
        return to(module, *arguments, **keywords)

    yield nn.Module, "to", _around(nn.Module.to, module_to)
    yield torch, "compile", compiled
    yield nn.Module, "compile", _nothing
    yield torch.optim.Optimizer, "__init__", _around(torch.optim.Optimizer.__init__, optimizer_init)
    yield from wherever_imported(
        {NUMBER_OF_STEPS: lambda steps: 1.0 if isinstance(steps, Tensor) else steps}
    )
    yield AUTOCAST, "__init__", _around(AUTOCAST.__init__, autocast_init)
    yield data.DataLoader, "__init__", _around(data.DataLoader.__init__, loader_init)
    yield BATCHES, "__next__", _around(BATCHES.__next__, fetch_unseen)
    for sampler in (data.RandomSampler, data.DistributedSampler, data.WeightedRandomSampler):
        yield sampler, "__iter__", _around(sampler.__iter__, sample_values)
    yield torch, "save", _nothing
    if find_spec("safetensors"):
        yield import_module("safetensors.torch"), "save_file", _nothing
    for name in ("save", "async_save", "load"):
        yield dcp, name, _nothing
    for name in ("start", "step", "stop"):
        yield torch.profiler.profile, name, _nothing


def _around(original: Any, call: Any) -> Any:
    @wraps(original)
    def run(*arguments: Any, **keywords: Any) -> Any:
        return call(original, *arguments, **keywords)

    return run


class _CudaIsHere(TorchFunctionMode):
    """Gives the CPU, which is emulated, to those who ask for a CUDA device."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if function is torch.device:
            by_index = type(args[0] if args else kwargs.get("index")) is int
            return torch.device("cpu") if by_index else _on_cpu(function(*args, **kwargs))
        if function in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if function == _IS_CUDA:  # a wrapper, of which there is a new one whenever it is asked for
            return True
        if function is Tensor.__format__ and not args[0].dim():
            return format(args[0].item(), args[1])
        if function is Tensor.__repr__ and not is_known(args[0]):
            self._device.read_by_host("the text of a tensor", [args[0]])
        if function in _MADE_ON_HOST and kwargs.get("device") is None:
            return self._made_on_host(function, args, kwargs)
        if torch.is_autocast_enabled("cpu") and function.__name__ in _IN_FP32:
            short = (torch.float16, torch.bfloat16)
            args = [x.float() if isinstance(x, Tensor) and x.dtype in short else x for x in args]
        args, kwargs = _with_cpu(args, kwargs, by_index=function is Tensor.to)
        result = function(*args, **kwargs)
        if function in _FINITE or (function in _ALL and is_taken_for_true(args[0])):
            take_for_true(result)
        return result

    def _made_on_host(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """A script's own few numbers, such as the places of a batch, are known and cost nothing."""
        with without_modes():
            size = function(*args, **kwargs | {"device": "meta"}).numel()
            numbers = function(*args, **kwargs) if size <= MOST_KNOWN else None
        if numbers is None:
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        with self._device.unseen():
            fake = function(*args, **kwargs)
        set_numbers(fake, numbers)
        return fake  # type: ignore[no-any-return]


def _with_cpu(
    arguments: Sequence[Any], keywords: Mapping[str, Any], *, by_index: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function with the CPU for GPUs. ``by_index``: numbers name GPUs, too, as in
    ``to``; a keyword ``device`` may always be one."""
    by_name = {name: _on_cpu(value, name == "device") for name, value in keywords.items()}
    return tuple(_on_cpu(value, by_index) for value in arguments), by_name


def _on_cpu(value: object, by_index: bool = False) -> object:
    """The CPU, if this is a GPU, or a CPU with a number: the emulated device has none."""
    names_device = isinstance(value, torch.device | str) and str(value).startswith(("cuda", "cpu:"))
    is_device = names_device or (by_index and type(value) is int)
    return torch.device("cpu") if is_device else value
