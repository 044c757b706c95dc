"""Train a Hugging Face model on the bytes of a text file, and go on from where a run has ended.

torchrun --nproc-per-node 4 scripts/examples/train.py FOLDER TEXT --out OUT --pp 2 --shard 2

FOLDER is as ``save_pretrained`` writes it; OUT gets a checkpoint, which a later run of this script
with any number of ranks goes on from, and the trained model as such a folder.
"""

import argparse
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import zeropp
from zeropp import huggingface

BATCH, LENGTH = 16, 32  # rows per step over all ranks, and tokens per row


class Text(IterableDataset[tuple[Tensor, Tensor]]):
    """One rank's rows of each batch from ``first`` on, read from a file as they are needed."""

    def __init__(self, file: Path, rows: slice, first: int) -> None:
        self.file, self.rows, self.first = file, range(BATCH)[rows], first

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with self.file.open("rb") as opened:
            last = self.file.stat().st_size // LENGTH - 1
            for step in count(self.first):
                for row in self.rows:
                    opened.seek((step * BATCH + row) % last * LENGTH)
                    tokens = torch.tensor(list(opened.read(LENGTH + 1)))
                    yield tokens[:-1], tokens[1:]


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a Hugging Face model on a text file.")
    parser.add_argument("folder", type=Path, help="of a model, as save_pretrained writes it")
    parser.add_argument("text", type=Path, help="any file, read as bytes")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoint and model")
    for name, default in (("pp", 2), ("shard", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        dist.init_process_group()
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    layers = huggingface.layers(options.folder)
    with zeropp.parallelize(
        layers, loss_function, sample=torch.zeros(2, LENGTH, dtype=torch.long), global_batch=BATCH,
        pp=options.pp, shard=options.shard, recompute="selective",
        optimizer=zeropp.OptimizerConfig("adamw", lr=1e-3, clip_norm=1.0),
        lr_schedule=lambda step: min(1.0, (step + 1) / 10),
    ) as model:  # fmt: skip
        if (options.out / "checkpoint").exists():
            model.load(options.out / "checkpoint")

        def batches(first: int) -> Iterator[list[Tensor]]:
            rows = Text(options.text, model.rows, first)
            loader = DataLoader(rows, model.rows.stop - model.rows.start)
            return ([part.to(device) for part in batch] for batch in loader)

        steps = islice(batches(model.steps_done), options.steps)
        losses = [float(model.train_step(tokens, targets).loss) for tokens, targets in steps]
        losses.append(float(model.eval_step(*next(batches(-1)))))  # the end of the file
        model.save(options.out / "checkpoint")
        layers.save_pretrained(model, options.out / "model")
        if dist.get_rank() == 0:
            print(f"{model.steps_done} steps, losses {losses} ({model.settings})", flush=True)
    return losses


if __name__ == "__main__":
    main()
