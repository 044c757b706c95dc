"""The registration of contenders: the only place that names them all. Imports no torch.

To add a contender, make its folder, add its entry here, and add a file with its knobs to
``conf/contender/``; ``docs/extending.md`` has an example.
"""

from __future__ import annotations

from typing import Any

from baselines.deepspeed_3d.contender import DEEPSPEED_3D
from baselines.fsdp.contender import FSDP
from baselines.megatron_core.contender import MEGATRON_CORE, MEGATRON_CORE_LOCAL
from baselines.public_3d import BEST_3D, MEGATRON_DEEPSPEED, ZERO_BUBBLE
from baselines.torch_pp.contender import TORCH_PP, TORCHTITAN
from baselines.zeropp.contender import ZEROPP
from zeropp.choose.contender import Contender

# Every contender that can be priced, in the order in which tables and figures show them.
PRICED: dict[str, Contender[Any]] = {
    contender.name: contender
    for contender in (
        ZEROPP,
        DEEPSPEED_3D,
        TORCH_PP,
        FSDP,
        MEGATRON_DEEPSPEED,
        MEGATRON_CORE,
        MEGATRON_CORE_LOCAL,
        ZERO_BUBBLE,
        TORCHTITAN,
        BEST_3D,
    )
}
# Those that can also be run, because they have a trainer.
CONTENDERS: dict[str, Contender[Any]] = {
    name: contender for name, contender in PRICED.items() if contender.trainer
}
