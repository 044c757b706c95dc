#!/usr/bin/env python3
"""In the place of the ranks' Python: ``stand_in.py -m benchmarks.worker SPEC --out DIR``.

Writes the events that a worker writes, in a second and without torch, and ends in the way that
the spec's seed asks for, unless a file ``calm`` lies beside the runs, and after a file ``wait`` is
gone from there.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

OK, RAISES, TAKES_MEMORY, GOES_ON = range(4)
_TAKEN_BYTES = 600 * 2**20
_STEPS, _ENDLESS = 3, 10_000
_WAIT_S = 300.0


def wait_for_the_others(directory: Path) -> None:
    """Return when every rank has stepped: real ones go in step, by their collectives. Raises
    TimeoutError where one does not in time."""
    deadline = time.monotonic() + _WAIT_S
    others = [directory / f"rank_{rank:03d}.jsonl" for rank in range(int(os.environ["WORLD_SIZE"]))]
    while not all(f.exists() and f.read_text().count('"step"') == _STEPS for f in others):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every rank has stepped within {_WAIT_S:g} s")
        time.sleep(0.05)


def die_with_launcher() -> None:
    """As a real worker does where it was started by the local launcher."""
    if launcher := os.environ.get("SUITE_LAUNCHER_PID"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):
            os._exit(5)


def main() -> None:
    die_with_launcher()
    spec, directory = Path(sys.argv[3]), Path(sys.argv[5])
    rank = int(os.environ["RANK"])
    behaviour = json.loads(spec.read_text())["seed"] % 10
    if (directory.parents[2] / "calm").exists():
        behaviour = OK
    with (directory / f"rank_{rank:03d}.jsonl").open("a", buffering=1) as file:

        def write(kind: str, **fields: object) -> None:
            file.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")

        def leave(number: int, frame: object) -> None:
            write("signal", name=signal.Signals(number).name)
            os._exit(5)

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGUSR1, leave)
        (directory / f"rank_{rank:03d}.pid").write_text(str(os.getpid()))
        while (directory.parents[2] / "wait").exists():
            time.sleep(0.05)
        places = ["OMP_NUM_THREADS", "SLURM_NODEID", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        places += ["SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES"]
        seen = {name: os.environ.get(name, "") for name in places}
        # Under "code", since all else of an environment tells runs apart.
        code = {"clock": time.time(), **seen}
        write("environment", host=seen["SLURMD_NODENAME"], code=code)
        for index in range(_ENDLESS if behaviour == GOES_ON else _STEPS):
            time.sleep(0.1)
            write("step", index=index, seconds=0.1, loss=5.0 - index / _ENDLESS)
        if rank == 1 and behaviour == RAISES:
            wait_for_the_others(directory)
            write("error", type="ValueError", message="token 999 is not in the vocabulary")
            sys.exit(1)
        if behaviour == TAKES_MEMORY:
            taken = bytearray(_TAKEN_BYTES) if rank == 1 else b""
            time.sleep(_WAIT_S)  # until Slurm ends it
            del taken
        if behaviour == RAISES:
            time.sleep(_WAIT_S)
        write("done")


main()
