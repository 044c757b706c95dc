"""Train a causal model of Hugging Face on a text, with the model's own tokenizer.

torchrun --nproc-per-node 4 scripts/examples/train.py FOLDER TEXT --out OUT --pp 2

OUT gets the model, and checkpoints. A later run on any ranks goes on from the last one."""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from transformers import AutoTokenizer

import zeropp
from zeropp import huggingface


def packed_rows(texts: list[str], tokenizer: AutoTokenizer, length: int) -> TensorDataset:
    """Documents one after another, cut into rows: tokens, those that follow (-100 at the end of a
    document), and their places, which begin at 0 in each, so that attention stays inside of it."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = [tokenizer.encode(text, add_special_tokens=False) + end for text in texts]
    tokens = torch.cat([torch.tensor(one, dtype=torch.long) for one in encoded])
    begins = torch.cat([torch.arange(len(one)) == 0 for one in encoded])
    count, place = (len(tokens) - 1) // length, torch.arange(length)
    parts = tokens[:-1], tokens[1:].masked_fill(begins[1:], -100), begins[:-1]
    inputs, targets, begins = (part[: count * length].view(count, length) for part in parts)
    return TensorDataset(inputs, targets, place - (place * begins).cummax(1).values)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("text", type=Path, help="documents, with separators between them")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints and model")
    for name, default in {
        "separator": "<|endoftext|>", "length": 256, "batch": 16, "microbatch": 2, "pp": 1,
        "lr": 3e-4, "steps": 100, "every": 50, "keep": 2,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(%(default)s)")
    parser.add_argument("--check", action="store_true", help="compare two steps with one process")
    asked = parser.parse_args(arguments)
    dist.init_process_group()
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    layers = huggingface.layers(asked.folder)
    tokenizer = AutoTokenizer.from_pretrained(asked.folder)
    texts = filter(str.strip, asked.text.read_text(encoding="utf-8").split(asked.separator))
    inputs, targets, places = packed_rows([*texts], tokenizer, asked.length).tensors
    last = len(inputs) - max(asked.batch, len(inputs) // 100)  # rows from here on are held out
    if last < asked.batch:
        raise SystemExit(f"{asked.text}: {len(inputs)} rows, fewer than two batches of --batch")
    settings = dict(  # noqa: C408
        sample=inputs[:1], sample_keywords={"position_ids": places[:1]}, pp=asked.pp, device=device,
        shard=dist.get_world_size() // asked.pp, recompute="selective", global_batch=asked.batch,
        microbatch_size=asked.microbatch, precision="bf16" if device != "cpu" else "fp32",
        optimizer=zeropp.OptimizerConfig(lr=asked.lr, weight_decay=0.1, clip_norm=1.0),
        lr_schedule=lambda step: min((step + 1) / 10, (10 / (step + 1)) ** 0.5),  # with a warm-up
    )  # fmt: skip
    if asked.check:
        few = (part[: 2 * asked.batch].split(asked.batch) for part in (inputs, targets, places))
        batches = [(x, y, {"position_ids": at}) for x, y, at in zip(*few, strict=True)]
        say(zeropp.check(layers, huggingface.token_loss, batches, **settings))
    with zeropp.parallelize(layers, huggingface.token_loss, **settings) as model:
        loader = model.loader(TensorDataset(inputs[:last], targets[:last], places[:last]))
        own = slice(last + model.data_parallel_rank, None, model.data_parallel_size)
        held_out = [part[own].to(device) for part in (inputs, targets, places)]
        if found := sorted(asked.out.glob("checkpoint_??????")):
            model.load(found[-1])
        losses, end, held_out_loss = list[float](), model.steps_done + asked.steps, float("nan")
        while model.steps_done < end:  # epoch after epoch
            for batch, _ in zip(loader, range(end - model.steps_done), strict=False):
                x, y, at = (part.to(device) for part in batch)
                result = model.train_step(x, y, position_ids=at)
                losses.append(float(result.loss))
                line = f"step {model.steps_done}: loss {losses[-1]:.4f}, norm {result.grad_norm:.3}"
                rate = f", {result.tokens_per_s:,.0f} tokens/s" if result.tokens_per_s else ""
                say(line + rate, flush=True)
                if model.steps_done % asked.every == 0 or model.steps_done == end:
                    held_out_loss = model.eval_step(*held_out[:2], position_ids=held_out[2])
                    say(f"evaluation on {len(inputs) - last} rows: loss {held_out_loss:.4f}")
                    model.save(asked.out / f"checkpoint_{model.steps_done:06}")
                    if dist.get_rank() == 0:
                        for old in sorted(asked.out.glob("checkpoint_??????"))[: -asked.keep]:
                            shutil.rmtree(old)
        layers.save_pretrained(model, asked.out / "model")
        if dist.get_rank() == 0:
            tokenizer.save_pretrained(asked.out / "model")
    return [*losses, held_out_loss]


if __name__ == "__main__":
    main()
