"""Train a Hugging Face model (FOLDER, as ``save_pretrained`` writes it) on the bytes of a file.

torchrun --nproc-per-node 4 scripts/examples/train.py FOLDER TEXT --out OUT --pp 2 --shard 2

OUT gets the trained model and a checkpoint, from which a later run on any number of ranks goes on.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from zeropp import huggingface

BATCH, LENGTH = 16, 32  # rows per step over all ranks, and tokens per row


def batches(file: Path, rows: slice, step: int, device: torch.device) -> Iterator[list[Tensor]]:
    """One rank's inputs and targets of each step from a ``step`` on, read as they are needed."""
    with file.open("rb") as text:
        while True:
            begin = step * BATCH * LENGTH % (file.stat().st_size - BATCH * LENGTH)
            text.seek(begin + rows.start * LENGTH)
            read = torch.tensor(list(text.read((rows.stop - rows.start) * LENGTH + 1)))
            yield [part.view(-1, LENGTH).to(device) for part in (read[:-1], read[1:])]
            step += 1


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a Hugging Face model on a text file.")
    parser.add_argument("folder", help="of a model, as save_pretrained writes it")
    parser.add_argument("text", type=Path, help="any file, read as bytes")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoint and model")
    for name, default in (("pp", 2), ("shard", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if options.text.stat().st_size <= BATCH * LENGTH:
        parser.error(f"{options.text} is too short: a step reads more than {BATCH * LENGTH} bytes")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group()
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    layers = huggingface.layers(options.folder)
    with zeropp.parallelize(
        layers, huggingface.token_loss, loss_reduction="tokens", recompute="selective",
        sample=torch.zeros(2, LENGTH, dtype=torch.long), global_batch=BATCH, pp=options.pp,
        shard=options.shard, optimizer=zeropp.OptimizerConfig(clip_norm=1.0),
    ) as model:  # fmt: skip
        if (options.out / "checkpoint").exists():
            model.load(options.out / "checkpoint")
        ahead = batches(options.text, model.rows, model.steps_done, device)
        losses = [float(model.train_step(*one).loss) for one in islice(ahead, options.steps)]
        losses.append(float(model.eval_step(*next(ahead))))  # of a batch that is still to come
        model.save(options.out / "checkpoint")
        layers.save_pretrained(model, options.out / "model")
        if dist.get_rank() == 0:
            print(f"{model.steps_done} steps, losses {losses} ({model.summary})", flush=True)
    return losses


if __name__ == "__main__":
    main()
