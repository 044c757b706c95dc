"""Train a Hugging Face model (FOLDER, as ``save_pretrained`` writes it) on the bytes of a file.

torchrun --nproc-per-node 4 scripts/examples/train.py FOLDER TEXT --out OUT --pp 2 --shard 2

OUT gets the model and a checkpoint, from which a later run on any number of ranks goes on."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import zeropp
from zeropp import huggingface

BATCH, LENGTH, WARM_UP = 16, 32, 10  # rows per step over all ranks, tokens per row, steps


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Rows of a file's bytes, and the bytes that follow them; the file is read as it is needed."""

    def __init__(self, file: Path) -> None:
        self.text = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        part = self.text[row * LENGTH : (row + 1) * LENGTH + 1].long()
        return part[:-1], part[1:]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Train a Hugging Face model on a text file.")
    parser.add_argument("folder", help="of a model, as save_pretrained writes it")
    parser.add_argument("text", type=Path, help="any file, read as bytes")
    parser.add_argument("--out", type=Path, required=True, help="for checkpoint and model")
    for name, default in (("pp", 2), ("shard", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group()
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    layers = huggingface.layers(options.folder)
    with zeropp.parallelize(
        layers, huggingface.token_loss,  # the mean over the tokens of a batch
        sample=torch.zeros(1, LENGTH, dtype=torch.long), microbatch_size=2, global_batch=BATCH,
        pp=options.pp, shard=options.shard, recompute="selective", device=device,
        optimizer=zeropp.OptimizerConfig(lr=1e-3, clip_norm=1.0),
        lr_schedule=lambda step: min((step + 1) / WARM_UP, (WARM_UP / (step + 1)) ** 0.5),
    ) as model:  # fmt: skip
        if (options.out / "checkpoint").exists():
            model.load(options.out / "checkpoint")
        loader, end = model.loader(Bytes(options.text)), model.steps_done + options.steps
        losses: list[float] = []
        while model.steps_done < end:  # epoch after epoch
            for batch, _ in zip(loader, range(end - model.steps_done), strict=False):
                losses.append(float(model.train_step(*(part.to(device) for part in batch)).loss))
        losses.append(model.eval_step(*(part.to(device) for part in next(iter(loader)))))
        model.save(options.out / "checkpoint")
        layers.save_pretrained(model, options.out / "model")
        if dist.get_rank() == 0:
            print(f"{model.steps_done} steps, losses {losses} ({model.summary})")
    return losses


if __name__ == "__main__":
    main()
