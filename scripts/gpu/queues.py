"""Says whether any two of the engine's streams share a hardware queue, on one GPU and without
peers: while a kernel spins on one stream, a kernel on another must end.

    python scripts/gpu/queues.py

Lanes are made by the engine. The streams of messages are made as NCCL makes those of the engine's
groups (a rank with two neighbours has four): from torch's pool with high priority.
"""

from __future__ import annotations

import itertools
import sys

import torch

from zeropp.engine.ranks.lanes import (
    make_lane,  # zeropp sets what CUDA reads when it is initialised
)

LANES = ("zeropp gathers", "zeropp reductions", "zeropp replicas")
MESSAGES = ("to the next", "from the next", "to the one before", "from the one before")
SPIN_CYCLES = 200_000_000  # about 0.1 s


def main() -> int:
    torch.cuda.init()
    streams = {"compute": torch.cuda.current_stream()}
    streams |= {name: _stream_of_lane(name) for name in LANES}
    streams |= {name: torch.cuda.Stream(priority=-1) for name in MESSAGES}
    place = torch.zeros(1, device="cuda")
    for stream in streams.values():  # loads the kernels
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1)
            place.add_(1)
    torch.cuda.synchronize()
    shared = [
        f"{spinning} and {other}"
        for spinning, other in itertools.permutations(streams, 2)
        if _waits(streams[spinning], streams[other], place)
    ]
    print(f"{len(streams)} streams; pairs that share a hardware queue: {shared or 'none'}")
    return bool(shared)


def _stream_of_lane(name: str) -> torch.cuda.Stream:
    """The stream on which a lane of the engine runs its work."""
    found = []
    lane = make_lane(torch.device("cuda"), name)
    lane.run(lambda: found.append(torch.cuda.current_stream()))
    return found[0]


def _waits(spinning: torch.cuda.Stream, other: torch.cuda.Stream, place: torch.Tensor) -> bool:
    """Whether a kernel on ``other`` begins only after the one that spins on ``spinning``."""
    spun, done = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(spinning):
        torch.cuda._sleep(SPIN_CYCLES)
        spun.record()
    with torch.cuda.stream(other):
        place.add_(1)
        done.record()
    done.synchronize()
    waited = spun.query()
    spun.synchronize()
    return waited


if __name__ == "__main__":
    sys.exit(main())
