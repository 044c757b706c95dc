"""Calls of ``zeropp.parallelize``, right and wrong, for the type checker of ``scripts/test.sh``.

Every wrong call carries the error that mypy must find. One that mypy does not find is an unused
``type: ignore``, which strict mypy reports.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp

LAYERS = [nn.Linear(4, 4), nn.Linear(4, 4)]
SAMPLE = torch.zeros(1, 4)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def right() -> None:
    model = zeropp.parallelize(
        LAYERS,
        loss,
        sample=SAMPLE,
        global_batch=8,
        pp=2,
        recompute="full",
        optimizer=lambda groups: torch.optim.AdamW(groups["all"], lr=1e-3),
        sample_keywords={"mask": SAMPLE},
        cluster="a800",
        tied=None,
    )
    number: float = model.eval_step(SAMPLE, SAMPLE, mask=SAMPLE)
    found: Tensor = model.train_step(SAMPLE, SAMPLE, mask=SAMPLE).loss
    del number, found


def wrong() -> None:
    zeropp.parallelize(LAYERS, loss, sample=SAMPLE, global_batch=8, tp=2)  # type: ignore[call-arg]
    zeropp.parallelize(LAYERS, loss, sample=SAMPLE, global_batch=8, pp="two")  # type: ignore[arg-type]
    zeropp.parallelize(LAYERS, loss, sample=SAMPLE, global_batch=8, recompute="all")  # type: ignore[arg-type]
    zeropp.parallelize(LAYERS, loss, sample=SAMPLE, global_batch=8, precision="fp16")  # type: ignore[arg-type]
    zeropp.parallelize(LAYERS, loss, sample=SAMPLE, global_batch=8, tied=(0, "weight"))  # type: ignore[arg-type]
    zeropp.parallelize(LAYERS, loss, sample=SAMPLE)  # type: ignore[call-arg]
