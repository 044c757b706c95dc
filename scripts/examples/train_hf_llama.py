"""Train an unmodified Hugging Face Llama (random weights, random tokens) with ZeroPP.

torchrun --nproc-per-node 4 scripts/examples/train_hf_llama.py --pp 2 --shard 2
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeropp
from zeropp.model import cross_entropy

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


class Block(nn.Module):
    """A decoder layer and the rotary embedding that it is called with; causal by default."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self.layer(x, position_embeddings=self.rotary(x, positions))


def cut(model: LlamaForCausalLM) -> list[nn.Module]:
    """The model's own modules in the order in which they run."""
    blocks = [Block(layer, model.model.rotary_emb) for layer in model.model.layers]
    return [model.model.embed_tokens, *blocks, nn.Sequential(model.model.norm, model.lm_head)]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and return the losses."""
    parser = argparse.ArgumentParser(
        description="Train an unmodified Hugging Face Llama (random weights) with ZeroPP.",
        epilog="example: torchrun --nproc-per-node 4 scripts/examples/train_hf_llama.py",
    )
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks (%(default)s)")
    parser.add_argument("--shard", type=int, default=2, help="ZeRO-3 group (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group()
    torch.manual_seed(0)
    layers = cut(LlamaForCausalLM(CONFIG))
    tokens = torch.randint(256, (16, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = zeropp.parallelize(
        layers, cross_entropy, sample=inputs[:2], global_batch=16,
        pp=options.pp, shard=options.shard, chunks=2,
    )  # fmt: skip
    batch = inputs[model.rows], targets[model.rows]
    losses = [model.train_step(*batch).loss for _ in range(options.steps)]
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
