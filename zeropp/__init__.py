"""ZeroPP: pipeline parallelism over fully sharded data parallelism, without tensor parallelism.

    import zeropp

    model = zeropp.parallelize(layers, loss_fn, sample=inputs[:1], global_batch=64, pp=4, shard=2)
    result = model.train_step(inputs, targets)

In: a model as a list of layers, a loss function and the degrees of parallelism. Out: a model that
trains in pipeline stages, on one rank of a process group.

For the library itself read ``layout``, ``shape`` and ``cluster`` (degrees, model sizes, hardware),
``schedule`` (which action when), ``plan`` (what every rank does), ``programs`` (what training
software there is), ``cost`` and ``sim`` (what a plan takes), ``planner``, ``tune`` and
``contender`` (how a plan is chosen), and ``engine`` (what runs it). For the public API read
``api``, then ``settings`` (what it takes), ``stages`` (layers become stages, and ``auto``) and
``parallel_model`` (what it returns). Importing the package imports no torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.api import parallelize
    from zeropp.cluster import Cluster
    from zeropp.engine.checkpoint import CheckpointError
    from zeropp.layout import InfeasibleError
    from zeropp.parallel_model import ParallelModel
    from zeropp.training import OptimizerConfig, StepResult

__all__ = [
    "CheckpointError",
    "Cluster",
    "InfeasibleError",
    "OptimizerConfig",
    "ParallelModel",
    "StepResult",
    "parallelize",
]
_HOMES = {
    "CheckpointError": "zeropp.engine.checkpoint",
    "Cluster": "zeropp.cluster",
    "InfeasibleError": "zeropp.layout",
    "OptimizerConfig": "zeropp.training",
    "StepResult": "zeropp.training",
    "ParallelModel": "zeropp.parallel_model",
    "parallelize": "zeropp.api",
}

# CUDA's driver reads these when it is initialised; without them steps may hang. Kernels that are
# loaded on their first use, on several ranks at once, would wait for messages that wait for these
# ranks; and of the 8 hardware queues that are the default, two streams could share one, in which a
# send would wait for a receive that waits for its own sender.
CUDA_SETTINGS = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def _driver_is_initialised() -> bool:
    """Whether something in this process has initialised CUDA's driver."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # nobody has loaded it
    not_initialised = 3
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialised)


# The settings that the driver was initialised without, before this package was imported.
CUDA_MISSED = [n for n in CUDA_SETTINGS if n not in os.environ] if _driver_is_initialised() else []
if not CUDA_MISSED:
    for _name, _value in CUDA_SETTINGS.items():
        os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    if name == "huggingface":  # needs transformers and safetensors
        return importlib.import_module("zeropp.huggingface")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zeropp' has no attribute {name!r}")
