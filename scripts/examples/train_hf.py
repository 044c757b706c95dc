"""Train an unmodified Hugging Face model of the Llama family with ZeroPP, and save it again.

torchrun --nproc-per-node 4 scripts/examples/train_hf.py FOLDER --save OTHER --pp 2 --shard 2

FOLDER and OTHER are as ``save_pretrained`` writes them (Llama, Qwen2; embeddings tied or not).
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import zeropp
from zeropp.model import cross_entropy


class Block(nn.Module):
    """A decoder layer, called with a causal mask and the rotary embedding of its positions."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((1, 1, length, length), -torch.inf, dtype=x.dtype, device=x.device)
        rotation = self.rotary(x, torch.arange(length, device=x.device)[None])
        return self.layer(x, attention_mask=mask.triu(1), position_embeddings=rotation)


def cut(model: PreTrainedModel) -> list[nn.Module]:
    """The model's own modules in the order in which they run; the last holds norm and head."""
    blocks = [Block(layer, model.model.rotary_emb) for layer in model.model.layers]
    return [model.model.embed_tokens, *blocks, nn.Sequential(model.model.norm, model.lm_head)]


def own_name(name: str, layers: int) -> str:
    """The model's name of a parameter that the engine calls ``{layer}.{parameter}``."""
    index, _, rest = name.partition(".")
    if index == "0":
        return f"model.embed_tokens.{rest}"
    if int(index) < layers - 1:
        return f"model.layers.{int(index) - 1}.{rest.removeprefix('layer.')}"
    return {"0": "model.norm.", "1": "lm_head."}[rest[0]] + rest[2:]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a Hugging Face model with ZeroPP.")
    parser.add_argument("folder", type=Path, help="of a pretrained model")
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    for name, default in (("pp", 2), ("shard", 2), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group()
    hf = AutoModelForCausalLM.from_pretrained(options.folder).float()
    layers, tied = cut(hf), hf.config.tie_word_embeddings
    seeded = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf.config.vocab_size, (16, 33), generator=seeded)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with zeropp.parallelize(
        layers, cross_entropy, sample=inputs[:2], global_batch=16, pp=options.pp,
        shard=options.shard, chunks=2, optimizer=zeropp.OptimizerConfig("sgd", lr=0.1),
        tied=((0, "weight"), (len(layers) - 1, "1.weight")) if tied else None,
    ) as model:  # fmt: skip
        rows = model.rows
        losses = [
            float(model.train_step(inputs[rows], targets[rows]).loss) for _ in range(options.steps)
        ]
        trained = model.full_state_dict()
    if trained and options.save:
        fresh = AutoModelForCausalLM.from_pretrained(options.folder)
        fresh.load_state_dict({own_name(name, len(layers)): one for name, one in trained.items()})
        fresh.save_pretrained(options.save)
    return losses


if __name__ == "__main__":
    main()
