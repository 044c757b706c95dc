"""Answers for a configuration of another trainer: will it fit, why is
it slow, and what would be better. Every number is simulated.

    zeropp explain llama3_70b.toml num_gpus=64 cluster=h100
    zeropp explain train_gpt3_175b.sh num_gpus=1536 cluster=h100 --as overrides
    zeropp explain config.json model.seq=8192 cluster=h100 num_gpus=64 \\
        global_batch=512 contender=megatron_core contender.tp=4
    zeropp explain num_gpus=64 cluster=a100 model.vocab=51200 -- \\
        --num-layers 40 --hidden-size 6144 --num-attention-heads 48 --seq-length 2048 \\
        --micro-batch-size 1 --global-batch-size 512 --tensor-model-parallel-size 8 --bf16
    python -m benchmarks.explain llama3_8b.toml num_gpus=16 cluster=h100 --measured train.log \\
        --measured "5120tokens/s/GPU num_gpus=64" --tokens 1e12

A file is a torchtitan TOML, a script or a log of Megatron-LM, the YAML of Megatron-LM's tests or of
Megatron-Bridge, or a config.json, alone or with DeepSpeed's JSON or Accelerate's YAML;
MODULE:FUNCTION, such as llama3:llama3_8b, is one of torchtitan 0.3's configurations. Behind --
stand the arguments of a script, of torchtitan, or of Megatron-LM where there is no file.

Words are key=value: num_gpus, cluster, global_batch, microbatch_size, precision, contender,
model.KEY, contender.KNOB, cluster.KEY; they replace what the file says. What has no price is named.

--measured takes a trainer's log, or a number such as 843ms or 10456tokens/s/GPU, and behind it the
words in which that run differs. It stands beside its price and the nearest published runs.

The exit status is 0 if the plan fits, 1 if it does not, 2 on bad input.
"""

from __future__ import annotations

import argparse
import sys
from math import inf

from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, command

_DIALECTS = ("torchtitan", "megatron", "overrides")


@command
def main() -> int:
    """Run the command line; returns its exit status."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = CommandParser(
        prog="zeropp explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="FILE or key=value")
    parser.add_argument("-v", "--verbose", action="store_true", help="list keys without effect")
    parser.add_argument(
        "--as", dest="dialect", choices=_DIALECTS, help="write the plan's arguments"
    )
    parser.add_argument(
        "--measured", action="append", default=[], metavar="TIME", help="a log, or 843ms"
    )
    parser.add_argument("--tokens", type=float, metavar="N", help="how long N tokens would take")
    given = parser.parse_args(words[:split])
    if given.tokens is not None and not 0 < given.tokens < inf:
        raise SpecError(f"--tokens {given.tokens:g}: must be finite and above 0")
    from rich.console import Console

    from benchmarks.explain.answer import answer, best_plans, changes_of
    from benchmarks.explain.question import ask
    from benchmarks.explain.screen import (
        show,
        show_best,
        show_changes,
        show_training,
        written_as,
    )

    files = [word for word in given.words if "=" not in word]
    asked = files, [word for word in given.words if "=" in word], words[split + 1 :]
    question = ask(*asked)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    if given.measured:  # only then numpy, which takes as long to import as all the rest
        from benchmarks.explain.measured import measured_run, show_measured

        show_measured([measured_run(text, *asked) for text in given.measured], console)
    answered = answer(question)
    show(answered, console, verbose=given.verbose)
    if given.tokens is not None:
        show_training(given.tokens, answered, console)
    if given.dialect:  # that of the plan itself, so there is nothing to search
        print(written_as(given.dialect, answered.asked.plan, answered.asked.candidate))
    else:

        def changes() -> None:
            show_changes(answered, changes_of(answered), console)

        show_best(answered, best_plans(question, beside=changes), console)
    return 0 if answered.fits else 1


if __name__ == "__main__":
    sys.exit(main())
