"""A plain pipelining loop over FSDP2, and what zeropp.emulate says of its order of work on GPUs.

torchrun --nproc-per-node 4 scripts/examples/verify_pipeline.py
torchrun --nproc-per-node 4 scripts/examples/verify_pipeline.py --forget wait
torchrun --nproc-per-node 4 scripts/examples/verify_pipeline.py --forget last

It needs no GPU: tensors are on the CPU, and torch.cuda's streams are virtual.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zeropp import emulate

WIDTH, ROWS, MICROBATCHES = 16, 4, 4


class Loop:
    """GPipe over two stages; FSDP2 shards each over two ranks."""

    def __init__(self, forget: str) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
        self.stage = mesh["pp"].get_local_rank()
        self.peer = (dist.get_rank() + 2) % 4
        self.forget = forget
        # A group for each direction, so that no message waits for one of the other direction.
        self.forward, self.backward = dist.new_group(), dist.new_group()
        torch.manual_seed(self.stage)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(self.layers, mesh=mesh["shard"])
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.works: list[dist.Work | None] = []

    def step(self, batch: Tensor) -> None:
        """One step: all forwards, then all backwards."""
        inputs, outputs = [], []
        for x in batch.chunk(MICROBATCHES):
            x = x if self.stage == 0 else self.receive(self.forward)
            inputs.append(x.requires_grad_(self.stage > 0))
            outputs.append(self.layers(inputs[-1]))
            if self.stage == 0:
                self.send(outputs[-1].detach(), self.forward)
        for number, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            if self.forget != "last":
                # Else FSDP2 ends every microbatch's backward as a step's last. It has then begun
                # to gather for the next one, and frees what that gather still writes.
                self.layers.set_is_last_backward(number == MICROBATCHES - 1)
            if self.stage == 0:
                y.backward(self.receive(self.backward))
            else:
                y.square().mean().backward()
                assert x.grad is not None
                self.send(x.grad, self.backward)
        for work in self.works:
            assert work is not None
            work.wait()
        self.works.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def send(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        self.works.append(dist.isend(tensor, self.peer, group))

    def receive(self, group: dist.ProcessGroup | None) -> Tensor:
        tensor = torch.zeros(ROWS, WIDTH)
        work = dist.irecv(tensor, self.peer, group)
        assert work is not None
        if self.forget == "wait":
            self.works.append(work)  # until the end of the step
        else:
            work.wait()
        return tensor


def main(arguments: list[str] | None = None) -> emulate.Report:
    parser = argparse.ArgumentParser(description="What zeropp.emulate says of a pipelining loop.")
    parser.add_argument("--forget", choices=("nothing", "wait", "last"), default="nothing")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    loop = Loop(options.forget)
    batch = torch.randn(ROWS * MICROBATCHES, WIDTH)
    report = emulate.watch(lambda: loop.step(batch), times=2)
    if dist.get_rank() == 0:
        print(report)
    return report


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
