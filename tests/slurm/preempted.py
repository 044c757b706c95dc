"""One rank of a user's own loop under ``srun``: it goes on from the last checkpoint, and makes as
many steps as the second argument says, in the folder of the first."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeropp


def main(place: Path, steps: int) -> None:
    """Train, until a signal comes or all steps are made."""
    rank, size = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS"))
    store = place / f"store_{os.environ['SLURM_JOB_ID']}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    batch, layers = torch.randn(4, 8), [nn.Linear(8, 8) for _ in range(2)]
    loss = nn.functional.mse_loss
    with zeropp.parallelize(layers, loss, sample=batch[:1], global_batch=4, pp=2) as model:
        if (place / "checkpoint").exists():
            model.load(place / "checkpoint")
        print(f"begins at step {model.steps_done}", flush=True)
        model.save_on_signal(place / "checkpoint")
        while model.steps_done < steps:
            model.train_step(batch, batch)
            (place / "stepping").write_text(str(model.steps_done))
            time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
