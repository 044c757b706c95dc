"""Where a model is cut into stages, so that every pipeline rank has the same amount of work.

With several chunks per rank the sum over a rank's stages counts, so that a short stage makes up for
a long one. All blocks of a model take the same time, so a cut is a number of blocks per stage.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from zeropp.price.cluster import Cluster
from zeropp.price.communication import TensorTimes, tensor_times
from zeropp.price.pieces import Work, piece_times
from zeropp.price.price import work_of
from zeropp.price.programs import Program
from zeropp.schedule.cuts import spread_blocks

if TYPE_CHECKING:
    from zeropp.schedule.plan import SizedPlan


def cut_by_cost(
    plan: SizedPlan, cluster: Cluster, program: Program | None = None
) -> tuple[int, ...]:
    """The cuts of a plan's model by the times of its pieces (embedding, blocks, head) on the
    cluster: forward, input gradient and weight gradient of one microbatch.

    The plan's own ``cuts`` are not read; ``program`` is as in ``price_plan``. ``spread_blocks``
    says what is minimised.
    """
    work = work_of(plan, cluster, program)
    return _cuts(work, tensor_times(plan, cluster, work), plan.schedule.stage_rank)


@lru_cache(maxsize=65536)
def _cuts(work: Work, tensor: TensorTimes, stage_rank: tuple[int, ...]) -> tuple[int, ...]:
    times = piece_times(work, tensor.forward, tensor.backward, tensor.again)
    embedding, head = (
        # Rounded, so that plans that differ little share their cuts.
        round((end.total + 2 * tensor.collective) / times.block.total, 3)
        for end in (times.embedding, times.head)
    )
    return spread_blocks(work.shape.layers, stage_rank, embedding, head)
