"""Forms in which people write training scripts, as ``zeropp replay`` runs them: what stands for
torch takes what torch takes, numbers that are known stay themselves, DTensors take the operators of
a GPU, peers get each other's objects, and data ranks that go different ways are found."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.suite.traced import A800, kernels_of, step_of, trace
from zeropp.emulate.device import VirtualDevice
from zeropp.emulate.emulation import emulated
from zeropp.emulate.log import Log, Message
from zeropp.emulate.memory import Allocations
from zeropp.emulate.script import Objects, ScriptError, as_launched
from zeropp.emulate.trace import Trace
from zeropp.emulate.world import fake_world
from zeropp.schedule.plan import MemoryBytes
from zeropp.types.operators import Attention

MODULES = (torch.cuda, torch.accelerator, torch.cpu, dist)
# Public names of ``torch.cuda`` that need no stand-in.
_AS_THEY_ARE = {"CudaError", "cudaStatus", "DeferredCudaCallError", "default_generators"}
_AS_THEY_ARE |= {"has_half", "has_magma"}


def by_name() -> dict[tuple[ModuleType, str], Any]:
    return {(module, name): getattr(module, name) for module in MODULES for name in dir(module)}


@pytest.fixture
def stand_ins() -> Iterator[dict[tuple[ModuleType, str], tuple[Any, Any]]]:
    """What a script finds instead of torch's own, beside that."""
    before, device, memory = by_name(), VirtualDevice(), Allocations()
    launched = as_launched(device, memory, "script.py", [], 0, 4, A800, Objects({}))
    with mock.patch.dict(os.environ), fake_world(0, 4), emulated(device), launched:
        after = by_name()
        yield {key: (before[key], after[key]) for key in before if after[key] is not before[key]}


def parameters(function: Any, *kinds: Any) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in found if parameter.kind in kinds]


def test_what_stands_for_torch_takes_what_torch_takes(
    stand_ins: dict[tuple[ModuleType, str], tuple[Any, Any]],
) -> None:
    place, both = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    word = inspect.Parameter.KEYWORD_ONLY
    compared = 0
    for (module, name), (torchs, ours) in stand_ins.items():
        try:
            inspect.signature(torchs)
        except ValueError:
            continue  # a class without a signature
        is_context = name in ("stream", "StreamContext")  # which nobody annotates with
        assert isinstance(ours, type) == isinstance(torchs, type) or is_context
        taken = inspect.signature(ours, follow_wrapped=False)
        taken.bind(*parameters(torchs, place, both))
        taken.bind(
            *parameters(torchs, place),
            **dict.fromkeys(parameters(torchs, both, word)),
        )
        if isinstance(ours, FunctionType):
            wanted = inspect.getclosurevars(ours).nonlocals.get("wanted") or ()
            assert {*wanted} <= {*parameters(torchs, place, both, word)}, f"{module}.{name}"
        compared += 1
    assert compared > 80


def test_nothing_of_torch_cuda_is_left_to_fail_by_itself(
    stand_ins: dict[tuple[ModuleType, str], tuple[Any, Any]],
) -> None:
    left = {
        name
        for module in (torch.cuda, torch.accelerator)
        for name in module.__all__
        if (module, name) not in stand_ins
        and not isinstance(getattr(module, name), ModuleType)
        and not name.endswith(("Storage", "Tensor"))
    }
    assert left == _AS_THEY_ARE


CALLS = """
import os
import numpy, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
rank, C = dist.get_rank(), torch.cuda
d = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
C.set_device(device=d), C.synchronize(device=d), torch.cpu.synchronize(device="cpu")
C.current_stream(device=d), C.default_stream(device=d)
with C.stream(stream=C.Stream(device=d, priority=-1)), C.device(device=d):
    C.Event(enable_timing=True).record(stream=C.current_stream())
assert C.get_device_properties(device=d).total_memory == C.mem_get_info(device=d)[1] == 80 << 30
assert C.get_device_capability(device=d) == (9, 0) and C.get_device_name(device=d)
C.memory_stats(device=d)["allocated_bytes.all.peak"], C.get_rng_state(device=d)
C.memory_snapshot(), C.memory._record_memory_history(max_entries=1000)
assert C.utilization(device=d) == 0 and C.can_device_access_peer(0, 1)
C.cudart().cudaProfilerStart(), torch.get_device_module(d).synchronize()
C.set_stream(stream=C.Stream()), C.set_stream(C.default_stream())
numbers = torch.randn(2, generator=torch.Generator(device=d).manual_seed(0), device=d)

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
assert mesh.mesh[:, 0].tolist() == [0, 2] and mesh.mesh[1, 0].item() == 2
assert torch.from_numpy(numpy.arange(9)).to(d).max() == 8
assert torch.arange(4).tolist() == [0, 1, 2, 3] and numbers.sum().item() == 0.0

told, mine = [f"run {rank}"], [None]
dist.broadcast_object_list(told, src=0, device=d)
dist.scatter_object_list(mine, [*"abcd"] if rank == 0 else None, src=0)
assert (told, mine) == (["run 0"], ["abcd"[rank]])
if rank == 1:
    dist.recv_object_list(told, src=0)
    assert told == [7]
elif rank == 0:
    dist.send_object_list([7], dst=1)

layer = nn.Linear(8, 8, device=d)
optimizer = torch.optim.SGD(layer.parameters())
while True:
    loss = layer(numbers.new_ones(8)).sum()
    loss.backward()
    dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
    optimizer.step()
"""


def test_calls_by_keyword_known_numbers_and_the_objects_of_peers(tmp_path: Path) -> None:
    """Ranks 1 and 3 are traced, too, as they are in rank 0's group."""
    (trace_of_0,) = trace(CALLS, 4, tmp_path)
    assert sum("allreduce" in issued.what for issued in step_of(trace_of_0)) == 1


def test_an_object_that_nobody_sends_is_named(tmp_path: Path) -> None:
    line = r"rank 1 waits for an object that rank 0 does not send .*/script.py:34.$"
    with pytest.raises(ScriptError, match=line):
        trace(CALLS.replace("dist.send_object_list([7], dst=1)", "pass"), 4, tmp_path)


# Attention and a norm on DTensors, as torch's own two-dimensional example has them.
ATTENTION = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, parallelize_module
)

class Attention(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.RMSNorm(64, dtype=dtype)
        self.q, self.k, self.v, self.o = (
            nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(4)
        )

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (w(x).unflatten(-1, (8, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(-2))

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,))
layers = nn.ModuleList([Attention(torch.bfloat16), Attention(torch.float32)]).to("cuda")
for layer in layers:
    plan = {n: ColwiseParallel(use_local_output=False, input_layouts=Shard(1)) for n in "qkv"}
    plan |= {"norm": SequenceParallel(use_local_output=True), "o": RowwiseParallel()}
    parallelize_module(layer, mesh, plan)
optimizer = torch.optim.AdamW(layers.parameters())
while True:
    for layer in layers:
        x = torch.randn(2, 32, 64, device="cuda", dtype=layer.o.weight.dtype)
        layer(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_dtensors_take_the_operators_of_a_gpu(tmp_path: Path) -> None:
    (trace_of_0,) = trace(ATTENTION, 2, tmp_path)
    kernels = kernels_of(trace_of_0)
    names = {kernel.name.removeprefix("aten::") for kernel in kernels}
    assert {f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient")} <= names
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= names
    products = [kernel.product for kernel in kernels]
    heads = {product.heads for product in products if isinstance(product, Attention)}
    assert heads == {2 * 8 // 2}  # of two rows, on two ranks


# Stages without shapes, two to a rank; the first takes integers.
PIPELINE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

dist.init_process_group()
rank, device = dist.get_rank(), torch.device("cuda")
stages = []
for index in (rank, rank + 2):
    layers = nn.Linear(16 << index, 32 << index) if index else nn.Embedding(100, 32)
    stages.append(PipelineStage(layers.to(device), index, 4, device))
loss = lambda output, target: output.mean()
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss)
optimizer = torch.optim.Adam([p for stage in stages for p in stage.submod.parameters()])
x = torch.ones(8, 5, dtype=torch.long, device=device)
while True:
    schedule.step(x) if rank == 0 else schedule.step(target=x, losses=[])
    optimizer.step()
    optimizer.zero_grad()
"""


def test_stages_of_a_pipeline_find_their_shapes(tmp_path: Path) -> None:
    traces = trace(PIPELINE, 2, tmp_path)
    parts = [part for one in traces for issued in step_of(one) for part in issued.parts]
    moved = {part.moved // (4 * 2 * 5) for part in parts}  # elements of a place, of fp32
    assert moved == {32, 64, 128}
    assert len(parts) == 2 * 4 * 2 * 3  # ends, microbatches, both ways, between four stages


def test_ranks_to_compare_are_of_the_smallest_groups() -> None:
    log = Log()
    for group in ((0, 4, 8), (0, 2), tuple(range(12)), (0,)):
        log.collective("compute", ("", group), len(group), "c10d::allreduce_")
    log.messages("compute", [Message("", 0, 1, "")], "isend 1")
    assert Trace(0, MemoryBytes(), 0.0, log.issued).replicas == {2, 4, 8}


# Of every pair of data ranks the second leaves a sharded layer out.
BRANCH = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
for layer in layers:
    fully_shard(layer)
optimizer = torch.optim.SGD(layers.parameters())
while True:
    x = layers[0](torch.randn(2, 64, device="cuda"))
    if dist.get_rank() % 2 == 0:
        x = layers[1](x)
    x.sum().backward()
    optimizer.step()
"""


def test_data_ranks_that_go_different_ways_hang_at_a_line_of_the_script(tmp_path: Path) -> None:
    line = r"for ever on GPUs: collective \d+ of .*rank 0 has c10d::_allgather.*/script.py:14\)"
    with pytest.raises(ScriptError, match=line):
        trace(BRANCH, 4, tmp_path)


UPDATED_BY_HAND = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
if dist.get_rank() == BROKEN:
    raise ValueError("this rank is broken")
layer = nn.Linear(64, 64).cuda()
fully_shard(layer)
while True:
    layer(torch.randn(2, 64, device="cuda")).sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""


def test_without_an_optimizer_a_step_ends_with_a_backward(tmp_path: Path) -> None:
    (one,) = trace(UPDATED_BY_HAND.replace("BROKEN", "-1"), 2, tmp_path)
    assert one.by_backwards
    issued = [part.content for step in step_of(one) for part in step.parts]
    assert [text.split()[0] for text in issued] == [
        "c10d::_allgather_base_", "c10d::_reduce_scatter_base_",
    ]  # fmt: skip
    optimized = BRANCH.replace("if dist.get_rank() % 2 == 0:", "if True:")
    assert not trace(optimized, 2, tmp_path)[0].by_backwards


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    """Also one that is neither of the first pipeline nor an end of a group."""
    with pytest.raises(ScriptError, match=r"ValueError: this rank is broken.* \(on rank 2\)"):
        trace(UPDATED_BY_HAND.replace("BROKEN", "2"), 5, tmp_path)
