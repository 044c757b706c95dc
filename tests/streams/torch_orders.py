"""Torch's own orders, read from its schedules."""

from __future__ import annotations

from torch.distributed.pipelining import schedules as torch_schedules

from baselines.torch_pp.private_names import PlannedStage
from zeropp.schedule.program import Schedule, parse_action


def torch_schedule(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """The order with torch's own transfers and gathers."""
    count = chunks * ranks
    on_a_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    held = (0, count - 1) if on_a_v else range(0, count, ranks)
    stages = [PlannedStage(index, count, ranks) for index in held]
    source = getattr(torch_schedules, name)(stages, microbatches, loss_fn=lambda *_: None)
    programs = tuple(
        tuple(
            parse_action(str(part))
            for cell in source.pipeline_order_with_comms[rank]
            for part in cell.sub_actions or (cell,)
        )
        for rank in range(ranks)
    )
    stage_rank = tuple(source.stage_index_to_group_rank[s] for s in range(count))
    return Schedule(
        name=name,
        num_microbatches=microbatches,
        unit=microbatches,
        stage_rank=stage_rank,
        programs=programs,
    )
