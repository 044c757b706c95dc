"""``zeropp replay`` on scripts that know nothing of this project, and ``launcher=replay``. It runs
one of the ranks that do the same: another shard, replica or tensor-parallel rank of a stage issues
what the first one does."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.records.record import read_record
from benchmarks.specification.contenders import CONTENDERS
from tests.gloo.cases import request
from tests.slurm.commands import call
from tests.suite.traced import A800, kernels_of, step_of, trace
from zeropp.emulate.clock import Replay, replay
from zeropp.emulate.kernels import describe
from zeropp.emulate.log import STEP, Issued, Log, Message
from zeropp.emulate.script import ScriptError
from zeropp.emulate.trace import Trace, trace_ranks, trace_script
from zeropp.schedule.plan import MemoryBytes
from zeropp.types.operators import Attention, Product
from zeropp.types.training import OptimizerConfig

PLAIN = "scripts/examples/plain_fsdp2.py"
PIPELINE = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "shard"))
rank = mesh.get_local_rank("pp")
stages, parameters = [], []
for index in (rank, rank + 2):
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2))).to(device)
    fully_shard(layers, mesh=mesh["shard"])
    x = torch.empty(8, 1024, device="meta", requires_grad=True)
    stages.append(PipelineStage(
        layers, index, 4, device, group=mesh.get_group("pp"),
        input_args=(x if index else x.detach(),), output_args=(x,),
    ))
    parameters += layers.parameters()
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(parameters)
while True:
    batch = torch.randn(32, 1024, device=device)
    schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    optimizer.step()
    optimizer.zero_grad()
"""

# Tensor parallelism, FSDP2 on parameters that are converted after it, and a mesh by its keyword.
ONE_F_ONE_B = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("cpu:gloo,cuda:nccl")
mesh = init_device_mesh(
    device_type="cuda", mesh_shape=(2, 2, 2), mesh_dim_names=("pp", "shard", "tp")
)
rank = mesh.get_local_rank("pp")
with torch.device("meta"):
    layers = nn.Sequential(
        nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
    )
parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(layers, mesh=mesh["shard"])
layers.to_empty(device="cuda")
layers.to(torch.bfloat16)
x = torch.empty(8, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
stage = PipelineStage(
    layers, rank, 2, torch.device("cuda"), group=mesh.get_group("pp"),
    input_args=(x if rank else x.detach(),), output_args=(x,),
)
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(layers.parameters())
while True:
    batch = torch.randn(32, 1024, dtype=torch.bfloat16, device="cuda")
    schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    optimizer.step()
    optimizer.zero_grad()
"""


TWO_BATCHES = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
layer = nn.Linear(64, 64, bias=False, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
for rows in (4096, 16):
    layer(torch.ones(rows, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
layer = nn.Linear(1024, 1024, bias=False, device="cuda")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
fully_shard(layer, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.SGD(layer.parameters())
while True:
    for is_last in (False, True):
        layer.set_requires_all_reduce(is_last)
        layer(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


DATA_PARALLEL = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main(rank, world):
    torch.accelerator.set_device_index(rank)
    device = torch.device(f"{torch.accelerator.current_accelerator()}:{rank}")
    dist.init_process_group("nccl", rank=rank, world_size=world)
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(rank)
    model = DistributedDataParallel(torch.compile(layers), device_ids=[rank])
    unused = nn.Linear(1024, 8, device="cuda")
    discriminator = torch.optim.SGD(unused.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.randn(1000, 1024))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=True, sampler=sampler)
    for step, (batch,) in enumerate(loader):
        batch = batch.to(device, non_blocking=True)
        with model.no_sync():
            model(batch).sum().backward()
        with torch.autocast("cuda"):
            out = model(batch)
            normed = nn.functional.layer_norm(out, (1024,))
        assert (out.dtype, normed.dtype) == (torch.float16, torch.float32)
        scaler.scale(normed.mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        discriminator.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "model.pt")
        save_file(model.state_dict(), "model.safetensors")
        print(f"{out.sum():.4f}", torch.cuda.max_memory_allocated())

if __name__ == "__main__":
    mp.spawn(main, args=(4,), nprocs=torch.cuda.device_count())
"""


BUCKET_VIEWS = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16))).cuda()
model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), foreach=False)
while True:
    model(torch.randn(2, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


BUFFERS = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters())
while True:
    x = torch.randn(2, 64, device="cuda")
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    with torch.no_grad():
        model(x), model(x)
    optimizer.step()
    optimizer.zero_grad()
"""


CONVOLUTIONS = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
layers = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2, padding=1),
    nn.Conv2d(8, 16, 3, padding=1, groups=2),
    nn.ConvTranspose2d(16, 4, 2, 2),
).cuda()
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters())
while True:
    images = torch.randn(2, 3, 16, 16, device="cuda")
    loss = model(images).sum()
    with model.no_sync():
        loss = loss + model(images).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


KERNELS_OF_A_GPU = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, device="cuda")
teacher = nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(block.parameters())
while True:
    x = torch.randn(2, 32, 64, device="cuda")
    with torch.inference_mode():
        x = x + teacher(x).clone()
    loss = nn.functional.rms_norm(block(x), (64,)).sum()
    if not (torch.isfinite(loss) and torch.isfinite(x).all()):
        raise SystemExit(1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


# Two nodes of 8; ranks 0 and 8 exchange messages; names of parameters as torch has them.
TWO_NODES = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
assert (local_rank, os.environ["GROUP_RANK"]) == (rank % 8, str(rank // 8))
assert int(os.environ["LOCAL_WORLD_SIZE"]) == torch.cuda.device_count() == 8
assert torch.cuda.get_device_properties(local_rank).total_memory == 80 << 30
torch.cuda.default_stream().wait_stream(torch.cuda.Stream())
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
everywhere, here, told = [None] * 16, [None], [rank]
dist.all_gather_object(object_list=everywhere, obj=rank)
dist.broadcast_object_list(object_list=told, src=rank)
dist.scatter_object_list(here, scatter_object_input_list=list(range(16)), src=rank)
assert (everywhere[-1], here, told) == (rank, [rank], [rank])
dist.gather_object(obj=rank, object_gather_list=everywhere if rank == 0 else None, dst=0)
layer = nn.Linear(64, 64, device="cuda")
optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD)
assert layer.weight.is_cuda
data = TensorDataset(torch.randn(64, 64))
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    for (x,) in DataLoader(data, 8, num_workers=2, multiprocessing_context="spawn"):
        y = layer(x.cuda())
        y.sum().backward()
        if rank == 0:
            dist.send(y.detach(), 8)
            dist.send(y.detach(), 8)
        elif rank == 8:
            dist.recv(y.detach().view(-1), 0)
            dist.recv(torch.empty(int(os.environ.get("ROWS", 8)), 64), 0)
        optimizer.step()
        profiled.step()
"""


def seconds_in(line: str, text: str) -> float:
    found = re.search(rf"{line}: (\S+) s", text)
    assert found, text
    return float(found.group(1))


def replayed_alike(traces: list[Trace], world: int) -> Replay:
    """A step in which all kernels take as long."""
    return replay(
        {trace.rank: trace.log for trace in traces},
        A800,
        world,
        kernel_prices=lambda kernel: 1e-5,
        launch_s=0.0,
    )


def test_a_plain_script_has_a_step_time_a_timeline_and_memory(tmp_path: Path) -> None:
    timeline = tmp_path / "step.json"
    words = f"{PLAIN} --ranks 16 --cluster h100 --timeline {timeline} -- --width 256 --layers 1"
    done = call("benchmarks.replay", words.split(), os.environ)
    assert done.returncode == 0, done.printed
    step_s = float(done.stdout.partition(" s per step")[0].split()[-1])
    compute_s = seconds_in("compute of the busiest rank", done.stdout)
    waits = [line for line in done.stdout.splitlines() if "waits for" in line]
    waits_s = [float(line.split()[-2]) for line in waits]
    assert 0 < compute_s < step_s
    assert compute_s + sum(waits_s) == pytest.approx(step_s, rel=0.1)
    assert json.loads(timeline.read_text(encoding="utf-8"))["otherData"]["provenance"] == "replayed"
    assert "of the device's 80 GiB" in done.stdout


def test_a_script_of_torchs_pipelining_is_traced_on_every_rank_of_a_pipeline(
    tmp_path: Path,
) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE, encoding="utf-8")
    told: list[int] = []
    replayed = replayed_alike(trace_script(str(script), [], 4, A800, told.append), 4)
    assert told == [1, 2, 3, 4]  # and the pipeline beside it, to compare
    assert all(waits["transfer"] > 0 for waits in replayed.waits_s.values())


def test_ranks_that_messages_of_other_ranks_name_are_traced_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 sends to rank 2, and that to rank 3."""

    def traced(run: object, ranks: Sequence[int]) -> Iterator[Trace]:
        del run
        for rank in ranks:
            log = Log()
            log.place(STEP)
            for source, target in ((0, 2), (2, 3)):
                if rank in (source, target):
                    log.messages("nccl", [Message("pipeline", source, target, "")], "")
            log.place(STEP)
            yield Trace(rank, MemoryBytes(), 0.0, log.issued)

    monkeypatch.setattr("zeropp.emulate.trace._in_processes", traced)
    assert [trace.rank for trace in trace_script("script.py", [], 4, A800)] == [0, 2, 3]


def test_a_script_that_mixes_sends_and_receives_issues_each_message_once(tmp_path: Path) -> None:
    traces = trace(ONE_F_ONE_B, 8, tmp_path)
    assert [trace.rank for trace in traces] == [0, 4]
    first = traces[0].log
    steps = [place for place, issued in enumerate(first) if issued.what == STEP]
    step = first[steps[0] : steps[1]]
    messages = [issued for issued in step if "isend" in issued.what or "irecv" in issued.what]
    assert [part.moved for issued in messages for part in issued.parts] == [
        2 * 8 * 1024
    ] * 8  # 4 microbatches, both ways
    gathered = [issued.parts[0].moved for issued in step if "allgather" in issued.what]
    both_layers = 2 * 2 * 512 * 1024  # bytes in bf16, of a half each
    assert set(gathered) == {both_layers}
    memory = traces[0].memory
    assert memory.unsharded == memory.gradients == both_layers
    # A layer's next gradient, before it is added to the sum.
    assert memory.workspace == pytest.approx(both_layers // 2, rel=0.01)
    assert replayed_alike(traces, 8).step_s > 0


def test_the_memory_of_a_script_is_that_of_its_second_step(tmp_path: Path) -> None:
    (traced,) = trace(TWO_BATCHES, 1, tmp_path)
    weights, rows = 4 * 64 * 64, 4 * 16 * 64
    assert traced.memory.optimizer == 2 * weights + 4  # and the number of steps
    assert traced.memory.gradients == weights
    assert 4 * weights < traced.memory.total < 4 * weights + 4 * rows  # not that of 4,096 rows


def test_memory_is_sorted_by_what_fsdp2_does_with_it(tmp_path: Path) -> None:
    """At the peak there are gradients in 16 bits, the copy in fp32 that their reduction reads, the
    half of them that it writes, and that of the microbatch before."""
    (traced,) = trace(SHARDED, 4, tmp_path)
    elements, kinds = 1024 * 1024, traced.memory
    assert (kinds.gradients, kinds.unsharded) == (2 * elements + 2 * 4 * elements // 2, 0)
    assert kinds.workspace == pytest.approx(4 * elements, rel=0.01)
    assert kinds.activations == pytest.approx(4 * elements // 2, rel=0.01)  # the script's own shard


def test_ddp_reduces_buckets_beside_the_backward_which_waits_for_them_at_its_end(
    tmp_path: Path,
) -> None:
    (traced,) = trace(DATA_PARALLEL, 4, tmp_path)
    step = step_of(traced)
    places = [place for place, issued in enumerate(step) if "allreduce" in issued.what]
    layer = 4 * (1024 * 1024 + 1024)  # bytes; a bucket is full at 1 MiB, later ones at 25 MiB
    assert [round(step[place].parts[0].moved / layer) for place in places] == [1, 7, 7, 1]
    assert all(str(step[place].stream).startswith("nccl") for place in places)
    products = [
        place for place, issued in enumerate(step) if issued.kernel and issued.kernel.product
    ]
    waits = [p for p, i in enumerate(step) if i.kind == "wait" and i.stream == "compute"]
    assert products[-1] < waits[0]
    assert sum(place > places[0] for place in products) == 2 * 15 - 1  # the first needs no input's
    kernels = {issued.kernel.name for issued in step if issued.kernel}
    assert "aten::_foreach_addcdiv_" in kernels  # Adam, as a GPU runs it by default
    assert not any("fused_adam" in name for name in kernels)
    assert not any(Path(name).exists() for name in ("model.pt", "model.safetensors"))
    assert {
        issued.kernel.element for issued in step if issued.kernel and issued.kernel.product
    } == {
        2,  # under autocast
        4,
    }


def test_ddp_frees_its_buckets_before_it_makes_those_of_the_order_in_which_gradients_came(
    tmp_path: Path,
) -> None:
    (traced,) = trace(BUCKET_VIEWS, 4, tmp_path)
    layer = 4 * 256 * 256
    assert traced.memory.total < (16 + 16 + 2) * layer  # parameters, gradients, and little else


def test_ddp_sends_buffers_once_where_gradients_were_reduced_before(tmp_path: Path) -> None:
    """Of four forwards the first that evaluates follows one whose gradients are reduced."""
    (traced,) = trace(BUFFERS, 4, tmp_path)
    sent = [issued.what for issued in step_of(traced) if "broadcast" in issued.what]
    assert sent == ["c10d::broadcast_"] * 2  # one of each type of number


def test_convolutions_are_products_and_two_forwards_have_one_reduction(tmp_path: Path) -> None:
    (traced,) = trace(CONVOLUTIONS, 4, tmp_path)
    found = [(kernel.name, kernel.product) for kernel in kernels_of(traced) if kernel.product]
    flops = {"aten::convolution": 0, "aten::convolution_backward": 0}
    for name, product in found:
        assert isinstance(product, Product)
        flops[name] += 2 * product.m * product.k * product.n * product.batch
    rows, image = 2, 16 * 16
    first = rows * (image // 4) * 8 * (3 * 9)  # multiplications: places, filters, elements of each
    second = rows * (image // 4) * 16 * (4 * 9)
    transposed = rows * (image // 4) * 16 * (4 * 4)
    forwards = 2  # before one backward
    assert flops["aten::convolution"] == forwards * 2 * (first + second + transposed)
    backward = first + 2 * (second + transposed)  # images need no gradient
    assert flops["aten::convolution_backward"] == forwards * 2 * backward
    reduced = [part.moved for i in step_of(traced) if "allreduce" in i.what for part in i.parts]
    assert reduced == [4 * (8 * 27 + 8 + 16 * 36 + 16 + 16 * 16 + 4)]


def test_kernels_are_those_of_a_gpu(tmp_path: Path) -> None:
    """Attention drops inside, other dropout is one kernel, and models that only infer have the
    products that others have."""
    (traced,) = trace(KERNELS_OF_A_GPU, 4, tmp_path)
    kernels = kernels_of(traced)
    names = Counter(kernel.name for kernel in kernels)
    attentions = [kernel for kernel in kernels if isinstance(kernel.product, Attention)]
    assert [kernel.is_backward for kernel in attentions] == [False, True]
    assert names["aten::native_dropout"] == names["aten::native_dropout_backward"] == 3
    assert not names["aten::bernoulli_"]
    assert not names["aten::linear"]
    linears = [kernel for kernel in kernels if isinstance(kernel.product, Product)]
    assert len(linears) == 1 + 3 * 4 - 1  # the teacher's, and a block whose input has no gradient
    assert names["aten::_fused_rms_norm"] == 1


def test_a_script_finds_the_nodes_of_the_cluster_and_calls_torch_by_its_names(
    tmp_path: Path,
) -> None:
    traces = trace(TWO_NODES, 16, tmp_path)
    assert [trace.rank for trace in traces] == [0, 8]
    sends = [issued for issued in traces[0].log if issued.what.startswith("isend")]
    assert {send.stream for send in sends} == {"nccl default_pg 0"}  # as a device was named
    assert len(sends) == 2 * 2
    line = r"message 2 from rank 0 to rank 8: rank 0 has .8, 64. .*, rank 8 has .4, 64."
    with pytest.raises(ScriptError, match=line):
        trace(TWO_NODES.replace('"ROWS", 8', '"ROWS", 4'), 16, tmp_path)


HOUSEKEEPING = """
import torch, torch.distributed as dist

dist.init_process_group("nccl")
for here in (torch.cuda, torch.accelerator):
    here.empty_cache(), here.reset_peak_memory_stats(), here.reset_accumulated_memory_stats()
    assert here.memory_allocated() == here.max_memory_reserved() == 0
    assert here.memory_stats()["num_alloc_retries"] == 0
torch.cuda.init(), torch.cuda.ipc_collect(), torch.cuda.reset_max_memory_allocated()
torch.cuda.set_per_process_memory_fraction(0.9), torch.cuda.set_sync_debug_mode("warn")
torch.cuda.manual_seed(0), torch.cuda.manual_seed_all(0), torch.cuda.seed_all()
assert torch.cuda.memory_summary() == ""
dist.monitored_barrier()
weight = torch.ones(8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
while True:
    with torch.cuda.nvtx.range("step"), torch.accelerator.device_index(0), torch.cuda.device(0):
        weight.sum().backward()
    optimizer.step()
"""


def test_a_script_may_look_after_the_memory_and_the_seeds_of_its_gpu(tmp_path: Path) -> None:
    (traced,) = trace(HOUSEKEEPING, 2, tmp_path)
    assert traced.memory.gradients == 4 * 8


IMPORTS = "import torch, torch.distributed.fsdp\n"
DDP = """
import torch
torch.distributed.init_process_group()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", r"ended on rank 0 after 0 steps of an optimizer .needed: 2."),
        ("import os\nos._exit(1)", "script.py: the process of rank 0 was killed"),
        (
            "def f():\n    raise SystemExit(3)\nf()",
            "script.py:2: the script ends itself, by sys.exit.3.",
        ),
        ("import os\nos.environ['NO']", r"script.py:2: cannot .* KeyError: 'NO'"),
        ("assert 1 == 2", r"script.py:1: cannot .* AssertionError, at `assert 1 == 2`"),
        ("from torch.distributed.fsdp import *\nCPUOffloadPolicy()", "is not emulated: leave it"),
        ("import torch\ntorch.ones(3).nonzero()", "a shape depends on values"),
        ("import torch\ntorch.nn.SyncBatchNorm(3)(torch.ones(2, 3))", "leave out convert_sync"),
        (
            "import torch\ntorch.cuda.MemPool()",
            "script.py:2: cannot .*torch.cuda.MemPool is not emulated: leave it out, at `torch",
        ),
        (
            f"{IMPORTS}torch.distributed.fsdp.FullyShardedDataParallel(torch.nn.Linear(1, 1))",
            r"FSDP1. is not emulated: shard with fully_shard",
        ),
        (
            f"{DDP}, mixed_precision=object())",
            r"DistributedDataParallel.mixed_precision=....",
        ),
        (
            f"{DDP}).register_comm_hook(None, print)",
            "register_comm_hook: leave the hook out",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(
    text: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(ScriptError, match=line):
        trace(text, 4, tmp_path)


def test_products_without_a_price_are_refused() -> None:
    left, right = torch.empty(4, 8), torch.empty(8, 4)
    with pytest.raises(NotImplementedError, match="aten::_scaled_mm: cannot be simulated"):
        describe("aten::_scaled_mm", [left, right], [torch.empty(4, 4)], {})


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        (None, "--ranks 4", "script=missing.py: no such file"),
        ("", "--ranks 0", "--ranks=0: must be at least 1"),
        ("", "--ranks 4 --cluster moon", "cluster='moon': no such preset"),
        (
            "1 / 0",
            "--ranks 4",
            "script.py:1: cannot be emulated: ZeroDivisionError: division by zero, at `1 / 0`",
        ),
    ],
)
def test_what_cannot_be_emulated_is_refused_in_one_line(
    script: str | None, words: str, line: str, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    if script is not None:
        path.write_text(script, encoding="utf-8")
    name = "missing.py" if script is None else str(path)
    done = call("benchmarks.replay", [name, *words.split()], os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.printed
    assert len(done.printed.strip().splitlines()) == 1


def test_a_point_is_replayed_and_its_record_says_so(tmp_path: Path) -> None:
    words = (
        "model=gpt_tiny num_gpus=4 cluster=a800 precision=bf16 data=synthetic global_batch=8 "
        "launcher=replay contender=zeropp contender.pp=2 contender.shard=2 microbatch_size=1 "
        f"contender.compile=true runs_dir={tmp_path}/runs report_dir={tmp_path}/report"
    )
    done = call("benchmarks.run", words.split(), os.environ)
    assert done.returncode == 0, done.printed
    assert "runs no torch.compile" in done.printed
    (path,) = tmp_path.glob("runs/*/*/record.json")
    record = read_record(path)
    assert (record.provenance, record.status) == ("replayed", "ok")
    assert record.step_s[0] > 0
    assert len(record.predicted["busy_s"]) == 2
    assert {span[1] for span in record.spans} >= {"compute", "gather", "transfer"}


ASKED = [
    {"name": "zeropp", "pp": 2, "shard": 2, "replicate": 2, "replicate_zero": 1, "chunks": 2},
    {"name": "torch_pp", "pp": 2, "tp": 2, "shard": 2, "schedule": "1f1b"},
]


def shape_of(log: Sequence[Issued]) -> list[object]:
    """The last step of a log, which a replay is of, without the names of ranks: streams and events
    are numbered as they appear."""
    *_, begin, end = (index for index, issued in enumerate(log) if issued.kind == "place")
    numbers: dict[object, int] = {}
    return [
        (
            one.kind,
            numbers.setdefault(one.stream, len(numbers)),
            numbers.setdefault(one.event, len(numbers)),
            [(part.ranks, part.content, part.moved) for part in one.parts],
            one.kernel,
        )
        for one in log[begin:end]
    ]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked["name"])
def test_ranks_of_one_stage_issue_the_same(asked: dict[str, Any]) -> None:
    plan = request(8, asked).plan()
    place = plan.layout.coordinates(0)
    alike = [r for r in range(8) if plan.layout.coordinates(r)["pp"] == place["pp"]]
    ranks = [alike[0], alike[-1]]  # which differ on every other axis
    program = CONTENDERS[plan.contender]
    first, last = trace_ranks(plan, ranks, optimizer=OptimizerConfig(), program=program, steps=2)
    assert len(shape_of(first.log)) > 100
    assert shape_of(first.log) == shape_of(last.log)
