"""Finds the best feasible plan of every contender on a cluster, by the simulator.

    zeropp tune model=gpt_14_6b cluster=a800 num_gpus=64 global_batch=512

The exit status is 0, or 2 with one line on bad input or if nothing fits. Every number is simulated,
and for PP x ZeRO-3 with gathers per unit (ZeroPP) there is no published measurement to compare it
with.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.specification import SpecError
from benchmarks.specification.command import command


@command
def main() -> int:
    """Run the command line, whose keys are those of ``conf/tune.yaml``; returns its exit status."""
    from benchmarks.specification.compose import compose

    if not (configs := compose("tune")):  # Hydra has answered --help
        return 0
    from benchmarks.tune import best_plans  # these imports take longer than --help

    specs = [best_plans.checked(config) for config in configs]
    for spec in specs:
        outcomes, missing = best_plans.searched(spec)
        best_plans.show(spec.task, outcomes, spec.tolerance)
        best_plans.print_commands(spec, outcomes)
        best_plans.show_answer(spec.task, outcomes, missing)
        if all(outcome.winner is None for outcome in outcomes):
            raise SpecError("no plan of any contender fits (try more GPUs)")
        if spec.out is not None:
            best_plans.write_pictures(spec.task, Path(spec.out), outcomes)
        if spec.arguments_as is not None:
            best_plans.print_arguments(spec.arguments_as, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
