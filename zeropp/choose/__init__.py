"""Chooses plans: what a contender offers, and the search for its best plan. Imports no torch.

In: a Task and a ``Contender``. Out: an ``Outcome`` with the best plan and its simulated step. Read
``task`` (what is trained, on what), ``contender`` (what a contender provides, and a plan in one
line), ``planner`` (degrees), ``space`` (which settings are tried), ``search`` (its queue, and its
result), ``bounds`` (why a plan need not be simulated). ``auto`` chooses for the public API, over a
user's own layers, whose operators ``recorder`` finds and whose prices are in ``layer_prices``;
``degrees`` asks it without any job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeropp.literals import Recompute, if_auto

if TYPE_CHECKING:
    from zeropp.engine.walk import Layer


def degrees(layers: Sequence[Layer], num_ranks: int, /, **keywords: Any) -> dict[str, Any]:
    """What ``zeropp.parallelize`` would choose on so many ranks for these layers and keywords: the
    values of those that are ``auto``, by name, to be given to it in their place. Needs no process
    group.

    Raises InfeasibleError, in one line, for keywords or layers that do not fit.
    """
    from zeropp.choose import auto  # imports torch
    from zeropp.choose.recorder import Recorder
    from zeropp.engine.walk import walk
    from zeropp.settings import asked_for, read_keywords

    settings, auto_names = read_keywords(layers, keywords), asked_for(keywords)
    if not auto_names:
        return {}
    recompute: Recompute = if_auto(settings.recompute, "full")
    settings, sizes = auto.sized_microbatch(
        settings,
        auto_names,
        lambda tried: walk(
            layers, *tried.microbatch, recompute, recorder=Recorder, tied=tried.tied
        ),
        num_ranks,
    )
    chosen, _, _ = auto.choose(settings, auto_names, sizes, num_ranks)
    return {name: getattr(chosen, name) for name in sorted(auto_names)}
