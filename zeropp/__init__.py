"""ZeroPP: pipeline parallelism over fully sharded data parallelism, without tensor parallelism.

    import zeropp

    model = zeropp.parallelize(layers, loss_fn, sample=inputs[:1], global_batch=64, pp=4, shard=2)
    result = model.train_step(inputs, targets)

In: a model as a list of layers, a loss function and the degrees of parallelism. Out: a model that
trains in pipeline stages, on one rank of a process group.

What trains: ``train`` (the door, and what it returns), ``schedule`` (which action when, and a plan
of what every rank does) and ``engine`` (what runs it). What a step takes: ``price``. Which plan is
best: ``choose``. Neither is loaded where nothing is ``auto`` and no cluster is named. What a step
would issue on a GPU: ``emulate``. What all of these share: ``types``. Importing the package imports
no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Its variables must be set before anything initialises CUDA.
from zeropp.engine.ranks import cuda_settings as cuda_settings

if TYPE_CHECKING:
    from zeropp.engine.checkpoint import CheckpointError
    from zeropp.price.cluster import Cluster
    from zeropp.train.api import parallelize
    from zeropp.train.auto import degrees
    from zeropp.train.check import DifferenceError, check
    from zeropp.train.parallel_model import ParallelModel
    from zeropp.types.layout import InfeasibleError
    from zeropp.types.training import OptimizerConfig, StepResult

__all__ = [
    "CheckpointError",
    "Cluster",
    "DifferenceError",
    "InfeasibleError",
    "OptimizerConfig",
    "ParallelModel",
    "StepResult",
    "check",
    "degrees",
    "parallelize",
]
_HOMES = {
    "CheckpointError": "zeropp.engine.checkpoint",
    "Cluster": "zeropp.price.cluster",
    "DifferenceError": "zeropp.train.check",
    "InfeasibleError": "zeropp.types.layout",
    "OptimizerConfig": "zeropp.types.training",
    "StepResult": "zeropp.types.training",
    "ParallelModel": "zeropp.train.parallel_model",
    "check": "zeropp.train.check",
    "degrees": "zeropp.train.auto",
    "parallelize": "zeropp.train.api",
}
# What few need: transformers and safetensors, and the tuner.
_MODULES = ("huggingface", "choose")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"zeropp.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zeropp' has no attribute {name!r}")
