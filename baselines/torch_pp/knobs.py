"""The settings of torch's pipelines with FSDP2 and tensor parallelism. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Placement, Recompute
from zeropp.ranges import AT_LEAST_1

TorchSchedule = Literal[
    "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"
]


@dataclass(frozen=True, kw_only=True)
class TorchPPKnobs:
    """Settings of torch's pipelines. A knob that is ``auto`` is chosen by the tuner, or by a simple
    rule where the cluster has no prices (CPUs)."""

    name: Literal["torch_pp"] = "torch_pp"
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of an FSDP2 group (dp_shard)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # virtual stages per rank (V)
    schedule: TorchSchedule | Auto = "auto"
    sequence_parallel: bool | Auto = "auto"
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    placement: Placement | Auto = "auto"  # which ranks share a node
    split_blocks: bool | Auto = "auto"  # a stage may end inside a block; auto: where it is searched
    compile: bool = False  # torch.compile every block

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class TorchtitanKnobs(TorchPPKnobs):
    """torchtitan has the same degrees and torch's own schedules. It cuts a model between blocks
    (``torchtitan/distributed/pipeline_parallel.py``: stages are lists of whole layers), and it is
    priced with ``torch.compile``, so that its schedules do not split the backward."""

    name: Literal["torchtitan"] = "torchtitan"  # type: ignore[assignment]
    split_blocks: Literal[False] = False
    compile: Literal[True] = True
