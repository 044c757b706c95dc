"""ZeroPP: pipeline parallelism over fully sharded data parallelism, without tensor parallelism.

    import zeropp

    engine = zeropp.parallelize(layers, loss_fn, sample=inputs[:1], global_batch=64, pp=4, shard=2)
    result = engine.step((inputs, targets))

Importing the package imports no torch: planning and schedules need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.api import ParallelModel, parallelize
    from zeropp.training import OptimizerConfig

__all__ = ["OptimizerConfig", "ParallelModel", "parallelize"]


def __getattr__(name: str) -> Any:
    if name == "OptimizerConfig":
        from zeropp.training import OptimizerConfig

        return OptimizerConfig
    if name in __all__:
        from zeropp import api

        return getattr(api, name)
    raise AttributeError(f"module 'zeropp' has no attribute {name!r}")
