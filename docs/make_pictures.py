"""Draw the pictures of the documentation: ``python -m docs.make_pictures``.

The schedules are the suite's own programs, priced by its event loop; no clock is involved.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.timeline_figure import timeline_figure
from zeropp.schedule import build, lower
from zeropp.schedule.program import StageCost
from zeropp.sim.events import run
from zeropp.timeline import Timeline

_IMAGES = Path(__file__).parent / "images"
_RANKS, _MICROBATCHES = 4, 8


def step(name: str, words: str, chunks: int, gather: bool, unit: int | None = None) -> Timeline:
    """One step of a schedule; a model chunk takes 1/chunks of a rank's share of the model."""
    share = 2 / chunks  # in units of half a rank's forward, for every schedule the same work
    cost = StageCost(share, share, share, transfer=0.05)
    if gather:
        cost = StageCost(share, share, share, unshard=0.6, reduce_grad=0.6, transfer=0.05)
    costs = [cost] * (_RANKS * chunks)
    compute = build(
        name,
        num_ranks=_RANKS,
        chunks=chunks,
        num_microbatches=_MICROBATCHES,
        unit=unit,
        costs=costs,
    )
    result = run(lower(compute, gather=gather), costs)
    title = f"{words}: step {result.over_ideal:.2f} x ideal"
    return Timeline(title, "simulated", result.spans())


def main() -> None:
    """Write ``docs/images/schedules.png`` and ``.svg``."""
    figure = timeline_figure(
        [
            step("1f1b", "1F1B, what DeepSpeed runs (no gathers)", 1, gather=False),
            step("interleaved_1f1b", "interleaved 1F1B, V=2 (no gathers)", 2, gather=False),
            step("zeropp", "ZeroPP, V=2, U=4, parameters sharded", 2, gather=True, unit=4),
        ],
        time_unit="half a rank's forward",
    )
    _IMAGES.mkdir(exist_ok=True)
    figure.savefig(_IMAGES / "schedules.png", dpi=130)
    figure.savefig(_IMAGES / "schedules.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
