"""``zeropp replay my_train.py --ranks 16 --cluster h100``: the step time of a plain
training script on a cluster, without a GPU."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, check_writable, command

_WORDS = {
    "gather": "gathers of parameters",
    "reduce": "reductions of gradients",
    "replicas": "other collectives",
    "transfer": "messages of the pipeline",
    "host": "launches of the host",
}


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and the words for the script."""
    parser = CommandParser(
        prog="zeropp replay",
        usage="%(prog)s [options] script [-- the script's own arguments]",
        description="Run a training script (FSDP2, torch.distributed.pipelining, DDP or your own) "
        "with fake tensors, as every rank of one pipeline, and say how long its second step would "
        "take on a cluster. No GPU is needed.",
        epilog="example: zeropp replay my_train.py --ranks 16 --cluster h100 "
        "--timeline step.json -- --batch 8",
    )
    parser.add_argument("script", type=Path, help="the script, as torchrun would start it")
    parser.add_argument("--ranks", type=int, required=True, help="GPUs of the job")
    parser.add_argument("--cluster", default="h100", help="a file in conf/cluster")
    parser.add_argument("--timeline", type=Path, help="write (over) this file, for ui.perfetto.dev")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]


@command
def main() -> int:
    """Command line; see ``--help``."""
    options, arguments = _arguments()
    if options.ranks < 1:
        raise SpecError(f"--ranks={options.ranks}: must be at least 1")
    if not options.script.is_file():
        raise SpecError(f"script={options.script}: no such file")
    if options.timeline:  # before minutes of work
        check_writable("--timeline", options.timeline.parent)
        if options.timeline.is_dir():
            raise SpecError(f"--timeline={options.timeline}: is a folder (name a file)")
    from benchmarks.launch.running import say
    from benchmarks.specification.reading import preset
    from zeropp.emulate.clock import StuckError, kernel_s, replay
    from zeropp.emulate.script import ScriptError
    from zeropp.emulate.trace import trace_script
    from zeropp.price.cluster import NEWEST, Cluster

    cluster = preset("cluster", options.cluster, Cluster)
    script, device = str(options.script), cluster.device.of_year(NEWEST)
    traced = 0

    def tell(done: int) -> None:
        nonlocal traced
        traced = done
        say(f"traced {done} ranks")

    try:
        traces = trace_script(script, arguments, options.ranks, cluster, tell)
        replayed = replay(
            {trace.rank: trace.log for trace in traces},
            cluster,
            options.ranks,
            kernel_prices=partial(kernel_s, device, host=cluster.host),
            launch_s=device.launch_us * 1e-6,
            title=f"{options.script.name} on {options.ranks} x {cluster.name}",
        )
    except (ScriptError, StuckError) as error:
        raise SpecError(str(error)) from None
    peak = max(trace.memory.total for trace in traces) / 2**30
    if traced < options.ranks:
        print(f"{traced} of {options.ranks} ranks were traced; the others are taken to do the same")
    if traces[0].by_backwards:
        print("the script makes no optimizer: a step lies between the ends of two backwards")
    print(f"{replayed.step_s:.4g} s per step on {options.ranks} x {cluster.name} (replayed)")
    print(f"  compute of the busiest rank: {max(replayed.busy_s.values()):.4g} s")
    for cause, words in _WORDS.items():
        waited = fmean(waits.get(cause, 0.0) for waits in replayed.waits_s.values())
        print(f"  waits for {words}, mean of the ranks: {waited:.4g} s")
    memory = f"{peak:.2f} of the device's {cluster.device.memory_gib:g} GiB"
    print(f"  tensors at the peak of the fullest rank: {memory}")
    if options.timeline:
        replayed.timeline.write_chrome(options.timeline)
        print(f"  timeline: {options.timeline}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
