"""Measures this machine and writes its constants as a preset: conf/cluster/NAME.yaml, for
cluster=NAME, and a page about them, results/reports/calibrate_NAME.md.

    zeropp calibrate --name mine --like h100                       # all GPUs of this machine
    torchrun --nnodes 4 --nproc-per-node 8 ... -m benchmarks.calibrate --name mine --like h100
    python -m benchmarks.calibrate --name my_laptop --ranks 2       # CPUs, over gloo

It takes up to five minutes on GPUs, and half a minute on CPUs. Kernels are those of a block of
llama_8b, on CPUs of llama_mini. Exit status 0, or 2 on bad input.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, run_command


def main() -> int:
    """Run the command line; returns its exit status."""
    return run_command(_calibrate)


def _calibrate() -> int:
    parser = CommandParser(
        prog="zeropp calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", required=True, help="of the preset; replaces one measured before")
    parser.add_argument("--like", default="", help="the preset of the machine's kind")
    parser.add_argument("--ranks", type=int, default=0, help="without torchrun (GPUs: all)")
    given = parser.parse_args()
    import torch
    from torch.multiprocessing.spawn import spawn

    from benchmarks.calibrate.constants import MEASURED
    from benchmarks.calibrate.ranks import Asked, be_rank
    from benchmarks.specification.reading import preset
    from zeropp.price.cluster import Cluster

    on_gpu = torch.cuda.is_available()
    if not re.fullmatch(r"\w+", given.name):
        raise SpecError(f"--name {given.name}: must consist of letters, digits and _")
    if given.ranks < 0:
        raise SpecError(f"--ranks {given.ranks}: must be at least 1")
    own = CHECKOUT / "conf" / "cluster" / f"{given.name}.yaml"
    if own.is_file() and not own.read_text(encoding="utf-8").startswith(MEASURED):
        raise SpecError(f"--name {given.name}: a preset that was not measured (take another name)")
    if on_gpu and not given.like:
        raise SpecError("--like: name the preset of these GPUs' kind, such as h100")
    asked = Asked(given.name, given.like or "cpu_gloo")
    preset("cluster", asked.like, Cluster)
    if "RANK" in os.environ:
        be_rank(int(os.environ["LOCAL_RANK"]), asked, "env://", 0)
        return 0
    ranks = given.ranks or (torch.cuda.device_count() if on_gpu else 2)
    with tempfile.TemporaryDirectory() as folder:
        spawn(be_rank, (asked, f"file://{folder}/store", ranks), ranks)  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
