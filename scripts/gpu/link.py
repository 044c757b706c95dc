"""The rate of the link between the GPU and its host, in pinned memory as the engine takes it: one
way, both ways at once, and beside matrix products. The cost model's is ``host`` of the cluster."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
from common import SMALL, Results, Watch, gpu_alone, log

from zeropp.engine.layers.offload import new_slab
from zeropp.engine.ranks.lanes import make_lane

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
ROUNDS = 1 if SMALL else 16


def main() -> None:
    results = Results("link.json")
    host = [new_slab(DEVICE, 2**20 if SMALL else 2**28) for _ in range(2)]
    card = [torch.empty_like(slab, device=DEVICE) for slab in host]
    lanes = [make_lane(DEVICE, f"link {n}") for n in range(2)]
    side = 256 if SMALL else 8192
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)

    def copied(*ways: int, products: int = 0) -> float:
        """GB/s of each way (0: to the host, 1: back), all of them at once."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        begin, tickets = time.perf_counter(), []
        for _ in range(ROUNDS):
            for way in ways:
                into, source = ((host, card), (card, host))[way]
                pair = into[way], source[way]
                tickets.append(
                    lanes[way].run(lambda pair=pair: pair[0].copy_(pair[1], non_blocking=True))
                )
        for _ in range(products):
            torch.mm(a, b, out=c)
        for ticket in tickets:
            ticket.wait()
        if DEVICE.type == "cuda":
            for _ in tickets[-1:]:
                torch.cuda.current_stream().synchronize()
        return ROUNDS * len(host[0]) / (time.perf_counter() - begin) / 1e9

    with gpu_alone("link"), Watch() as watch:
        copied(0, 1, products=1)
        for name, ways in {"to host": (0,), "back": (1,), "both": (0, 1)}.items():
            with results.part(name):
                results.put(f"{name}, GB/s", max(copied(*ways) for _ in range(3)))
        with results.part("beside products"):
            # As many products as the copies take, at 700 TFLOP/s and 50 GB/s.
            products = 1 if SMALL else int(ROUNDS * 2**28 / 50e9 / (2 * side**3 / 700e12))
            results.put("both beside products, GB/s", copied(0, 1, products=products))
    results.put("clocks", watch.summary())
    for lane in lanes:
        lane.close()
    log("link done")


main()
