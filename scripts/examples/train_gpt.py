"""Train a small GPT on a text file with ZeroPP.

torchrun --nproc-per-node 4 scripts/examples/train_gpt.py FILE --pp 2 --shard 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from zeropp.model import build_piece, cross_entropy
from zeropp.shape import ModelShape

GPT = ModelShape(
    name="gpt", family="gpt", layers=8, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=256, seq=64
)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on a text file with ZeroPP.",
        epilog="example: torchrun --nproc-per-node 4 scripts/examples/train_gpt.py FILE",
    )
    parser.add_argument("text", type=Path, help="any file, read as bytes")
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks (%(default)s)")
    parser.add_argument("--shard", type=int, default=2, help="ZeRO-3 group (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    if not dist.is_initialized():
        dist.init_process_group()
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - 65, (16,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + 65] for start in starts]).to(device)
        return rows[:, :-1], rows[:, 1:]

    layers = [lambda i=i: build_piece(GPT, i, seed=0) for i in range(GPT.num_pieces)]
    model = zeropp.parallelize(
        layers, cross_entropy, sample=batch(0)[0][:2], global_batch=16, device=device,
        pp=options.pp, shard=options.shard, chunks=2, recompute="selective",
        optimizer=zeropp.OptimizerConfig("adamw", lr=1e-3, clip_norm=1.0),
        lr_schedule=lambda step: min(1.0, (step + 1) / 10),
    )  # fmt: skip
    losses = []
    for step in range(options.steps):
        inputs, targets = batch(step)
        losses.append(float(model.train_step(inputs[model.rows], targets[model.rows]).loss))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    inputs, targets = batch(options.steps)  # one more, which the model is not trained on
    losses.append(model.eval_step(inputs[model.rows], targets[model.rows]))
    if dist.get_rank() == 0:
        print(f"held out: loss {losses[-1]:.4f} ({model.settings})", flush=True)
    return losses


if __name__ == "__main__":
    main()
