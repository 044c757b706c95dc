"""What a training script calls and this machine has not: torchrun's environment, GPUs, peers that
answer with objects, worker processes, files. ``as_launched`` has stand-ins for all of it, and
refuses what has none."""

from __future__ import annotations

import os
import pickle
import re
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from zeropp.emulate.log import line_here, shown
from zeropp.emulate.memory import Allocations
from zeropp.emulate.private_names import (
    AUTOCAST,
    BATCHES,
    BEFORE_STAGES,
    NUMBER_OF_STEPS,
    SHAPES_ARE_UNKNOWN,
    is_known,
    shapes_of,
    with_values,
    without_modes,
)
from zeropp.emulate.world import (
    MOST_KNOWN,
    is_taken_for_true,
    like,
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
    "DynamicOutputShapeException": "a shape depends on values, which are not there",
}


class ScriptError(ValueError):
    """A script cannot be emulated; the message is one line that says why."""


def why_not(path: str, rank: int, error: BaseException) -> str:
    """The line that says where and why a script cannot be emulated."""
    place, source = path, ""
    frames = traceback.extract_tb(error.__traceback__)
    begin = next((n for n, frame in enumerate(frames) if frame.filename == path), len(frames))
    for frame in frames[begin:]:
        if shown(frame.filename) and os.path.isfile(frame.filename):
            place, source = f"{frame.filename}:{frame.lineno}", frame.line or ""
    here = f" (on rank {rank})" if rank else ""
    if isinstance(error, SystemExit):
        return f"{place}: the script ends itself, by sys.exit({error.code!r}){here}"
    kind = type(error).__name__
    text = ": ".join(filter(None, (kind, " ".join(str(error).split())[:300].rstrip("."))))
    if kind in _HELP:
        text = f"{text} ({_HELP[kind]})"
    return f"{place}: cannot be emulated: {text}, at `{source}`{here}"


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
    objects: Objects,
) -> Iterator[None]:
    """Inside this context the process looks as if torchrun had started it with a script on the
    nodes of a cluster, whose GPUs are the emulated device."""
    per_node = min(cluster.gpus_per_node, world)
    node, place = divmod(rank, per_node)
    os.environ |= {"LOCAL_WORLD_SIZE": str(per_node), "LOCAL_RANK": str(place)}
    os.environ |= {"GROUP_RANK": str(node), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    folder = os.path.dirname(os.path.abspath(path))
    command = (sys, "argv", [path, *arguments]), (sys, "path", [folder, *sys.path])
    stand_ins = (
        *_distributed(device, rank, world),
        *_objects(rank, objects),
        *_cuda(memory, cluster.device, per_node),
        *_training(device),
    )
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

    def join(world_size: int, device_id: object) -> None:
        if world_size not in (-1, world):
            line = f"init_process_group(world_size={world_size}): give --ranks {world_size}"
            raise ScriptError(line)
        device.is_connected = device_id is not None

    def run_here(fn: Any, args: Sequence[Any], nprocs: int) -> None:
        if nprocs != world:
            raise ScriptError(f"spawn(nprocs={nprocs}): give --ranks {nprocs}")
        fn(rank, *args)

    def prepare_stage(prepare: Any, stage: Any, microbatches: int, *args: Any, **kw: Any) -> Any:
        passed = shapes_of(stage, *args, **kw)
        prepare(stage, microbatches, *args, **kw)
        return passed

    yield from wherever_imported(
        {
            dist.init_process_group: like(dist.init_process_group, join),
            dist.destroy_process_group: like(dist.destroy_process_group, None),
            dist.monitored_barrier: like(dist.monitored_barrier, None),
            mesh: mesh_on_cpu,
            spawn: like(spawn, run_here),
            nn.parallel.DistributedDataParallel: DataParallel,
        }
    )
    if SHAPES_ARE_UNKNOWN[0]:
        yield *SHAPES_ARE_UNKNOWN, lambda *_: False
        yield *BEFORE_STAGES, _around(getattr(*BEFORE_STAGES), prepare_stage)
    for owner, name, line in _NOT_EMULATED:
        yield owner, name, _refuse(line)


class UnknownObjectError(BaseException):
    """A peer's object is wanted that nobody has sent so far; no ``except Exception`` stops this."""

    def __init__(self, key: Hashable, source: int) -> None:
        super().__init__()
        self.wants = key, source, line_here()


class Objects:
    """The objects that ranks send each other: those that other ranks sent when they were traced
    are ``known``, and what this one sends is in ``sent``, both pickled."""

    def __init__(self, known: Mapping[Hashable, bytes]) -> None:
        self.known, self.sent = known, dict[Hashable, bytes]()
        self._counts: Counter[Hashable] = Counter()

    def pass_on(self, name: Hashable, source: int, objects: list[Any] | None) -> Any:
        """Send these objects under a name or, with None, give what ``source`` sends under it."""
        self._counts[name] += 1
        key = name, self._counts[name]
        if objects is not None:
            self.sent[key] = pickle.dumps(with_values(objects))
        elif key not in self.known:
            raise UnknownObjectError(key, source)
        return objects or pickle.loads(self.known[key])


def _objects(rank: int, objects: Objects) -> Iterator[tuple[Any, str, Any]]:
    """What sends objects."""

    def among(group: Any, end: int | None, group_end: int | None) -> tuple[tuple[int, ...], int]:
        ranks = tuple(dist.get_process_group_ranks(group))
        return ranks, ranks[group_end or 0] if end is None else end

    def send(object_list: list[Any], dst: Any, group: Any, group_dst: Any) -> None:
        ranks, target = among(group, dst, group_dst)
        objects.pass_on((ranks, rank, target), rank, object_list)

    def receive(object_list: list[Any], src: Any, group: Any, group_src: Any) -> int:
        ranks, source = among(group, src, group_src)
        object_list[:] = objects.pass_on((ranks, source, rank), source, None)
        return source

    def broadcast(object_list: list[Any], src: Any, group: Any, group_src: Any) -> None:
        ranks, source = among(group, src, group_src)
        object_list[:] = objects.pass_on(
            (ranks, source), source, object_list if source == rank else None
        )

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None,
        src: Any,
        group: Any,
        group_src: Any,
    ) -> None:
        ranks, source = among(group, src, group_src)
        given = scatter_object_input_list if source == rank else None
        given = objects.pass_on((ranks, source), source, given)
        scatter_object_output_list[0] = given[ranks.index(rank)]

    def gather(obj: Any, object_gather_list: list[Any] | None) -> None:
        same_everywhere(object_gather_list or [], obj)

    calls: dict[Any, Any] = {
        dist.send_object_list: send,
        dist.recv_object_list: receive,
        dist.broadcast_object_list: broadcast,
        dist.scatter_object_list: scatter,
        dist.gather_object: gather,
    }
    yield from wherever_imported({f: like(f, call) for f, call in calls.items()})


# What functions of ``torch.cuda`` and ``torch.accelerator`` answer, by patterns of names, None
# where nothing of their effect is seen here; and what scripts are told to leave out.
_ANSWERS: tuple[tuple[str, Any], ...] = (
    ("(re)?set_(?!stream).*|(manual_)?seed(_all)?|empty_.*|init|ipc_collect|check_error", None),
    ("caching_allocator_enable", None),
    ("is_(available|initialized|.*_supported)|can_device_access_peer", True),
    ("is_current_stream_capturing", False),
    ("current_device(_idx|_index)?|get_sync_debug_mode|memory_usage|device_memory_used", 0),
    ("clock_rate|power_draw|temperature|utilization", 0),
    ("get_gencode_flags|list_gpu_processes|memory_summary", ""),
    ("current_accelerator", torch.device("cpu")),
    ("get_allocator_backend", "native"),
    ("get_arch_list", ["sm_90"]),
    ("get_per_process_memory_fraction", 1.0),
    ("memory_snapshot", []),
    ("(host_)?memory_stats(_as_nested_dict)?", lambda: defaultdict(int)),
    ("device|device_index|device_of", lambda: nullcontext()),
)
_LEFT_OUT = "CUDA(Graph|Pl.*)|ExternalStream|G(reenContext|raph)|MemPool|graph(_pool_handle)?|"
_LEFT_OUT += "caching_.*|change_.*|current_(blas|solver)_.*|get_stream_.*|make_graph.*|use_mem_pool"


class _Generator(torch.Generator):
    """One of a GPU is one of the CPU."""

    def __new__(cls, device: object = None) -> Any:
        del device
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _cuda(memory: Allocations, gpu: Device, per_node: int) -> Iterator[tuple[Any, str, Any]]:
    """What ``torch.cuda`` and ``torch.accelerator`` tell of the emulated device."""
    capacity = int(gpu.memory_gib * _GIB)
    properties = SimpleNamespace(
        name=gpu.name, total_memory=capacity, major=9, minor=0, multi_processor_count=gpu.units
    )
    answers = (
        *_ANSWERS,
        ("(max_)?memory_(allocated|cached|reserved)", lambda: memory.allocated),
        ("get_memory_info|mem_get_info", lambda: (capacity - memory.allocated, capacity)),
        ("cudart", SimpleNamespace(cudaProfilerStart=_nothing, cudaProfilerStop=_nothing)),
        ("device_count", per_node),
        ("get_device_properties", properties),
        ("get_device_name", gpu.name),
        ("initial_seed", torch.initial_seed),
        ("get_rng_state", torch.get_rng_state),
        ("get_rng_state_all", lambda: [torch.get_rng_state()] * per_node),
    )
    for owner in (torch.cuda, torch.accelerator):
        for name in owner.__all__:
            known = [answer for pattern, answer in answers if re.fullmatch(pattern, name)]
            if known:
                yield owner, name, like(getattr(owner, name), known[0])
            elif re.fullmatch(_LEFT_OUT, name):
                refuse = _refuse(f"torch.cuda.{name} is not emulated: leave it out")
                is_class = isinstance(getattr(owner, name), type)
                yield owner, name, type(name, (), {"__init__": refuse}) if is_class else refuse
    for owner, answer in ((torch.cuda, (9, 0)), (torch.accelerator, {})):
        name = "get_device_capability"
        yield owner, name, like(getattr(owner, name), answer)
    yield from ((torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "mark"))
    for name in ("_record_memory_history", "_dump_snapshot", "_snapshot"):
        yield torch.cuda.memory, name, _nothing
    yield torch, "Generator", _Generator
    yield torch, "get_device_module", lambda device=None: torch.cuda


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
        if function == _IS_CUDA:  # a wrapper; torch makes a new one at each access
            return True
        if function is Tensor.__format__ and not args[0].dim():
            return format(args[0].item(), args[1])
        if function is Tensor.__repr__ and not is_known(args[0]):
            self._device.read_by_host("the text of a tensor", [args[0]])
        if function in _MADE_ON_HOST and kwargs.get("device") is None:
            with without_modes():  # a script's own few numbers, such as the places of a batch
                if function(*args, **kwargs | {"device": "meta"}).numel() <= MOST_KNOWN:
                    return function(*args, **kwargs)
        if torch.is_autocast_enabled("cpu") and function.__name__ in _IN_FP32:
            short = (torch.float16, torch.bfloat16)
            args = [x.float() if isinstance(x, Tensor) and x.dtype in short else x for x in args]
        args, kwargs = _with_cpu(args, kwargs, by_index=function is Tensor.to)
        result = function(*args, **kwargs)
        if function in _FINITE or (function in _ALL and is_taken_for_true(args[0])):
            take_for_true(result)
        return result


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
