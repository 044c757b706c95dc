"""Runs torchtitan 0.3 with a pipeline schedule that ``python -m benchmarks.show schedule --as
torch`` wrote: torchtitan's own trainer, model, FSDP2 and optimizer, without this project's engine.

    torchrun --nproc-per-node 8 scripts/examples/torchtitan/train.py --module llama3 \\
        --config llama3_8b --parallelism.pipeline_parallel_schedule_csv zeropp.csv ...

All arguments are torchtitan's. What differs from ``python -m torchtitan.train`` is one default: the
file holds gathers, releases and reductions, and torchtitan reads it as a file without them. The
rest of this file is for machines without a GPU, on which torchtitan does not run by itself.
"""

from __future__ import annotations

from functools import partialmethod
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torchtitan.tools import utils as tools

if not torch.cuda.is_available():  # before other modules of torchtitan import these names
    tools.device_type, tools.device_module = "cpu", torch.cpu

from torchtitan.components import metrics
from torchtitan.distributed import fsdp, utils
from torchtitan.train import main


def run_on_cpus() -> None:
    """Leave out what torchtitan asks of a GPU: its memory, and barriers that name it."""
    nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="CPU", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
    )
    utils.set_pg_timeouts = lambda **_: None
    fsdp.disable_fsdp_gradient_division = sum_gradients


def sum_gradients(model: nn.Module) -> None:
    """Add gradients up, as torchtitan does: NCCL by a product with 1, which gloo does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


if __name__ == "__main__":
    _PipelineScheduleRuntime._load_csv = partialmethod(
        _PipelineScheduleRuntime._load_csv, format="compute_comms"
    )
    if not torch.cuda.is_available():
        run_on_cpus()
    main()
