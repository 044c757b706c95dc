"""A plain FSDP2 training script, which knows nothing of this project.

torchrun --nproc-per-node 8 scripts/examples/plain_fsdp2.py
zeropp replay scripts/examples/plain_fsdp2.py --ranks 8 --cluster h100
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a plain transformer on random tokens.")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    width, vocab, seq = options.width, 32000, 1024
    with torch.device("cuda"):
        embedding, head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        blocks = [
            nn.TransformerEncoderLayer(
                width, width // 128, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(options.layers)
        ]
    model = nn.Sequential(embedding, *blocks, head)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(10):
        tokens = torch.randint(vocab, (options.batch, seq + 1), device="cuda")
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
