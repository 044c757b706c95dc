"""How far a step may be from that of one process, by the type in which layers compute: the one
table of ``zeropp.check`` and of the suite's gate. All are relative to what one process gives.

A sum in another order is rounded otherwise, by about what the type resolves: 1e-7 in fp32 and 8e-3
in bf16. What several layers make of that grows, and a mistake in parallelism (a part that is left
out or added twice, another microbatch's mask) is of the size of the number itself. ``zeropp.check``
compares with one process in the same types, and takes the root of what the type resolves, which is
far from both. The gate measures what rounding does, between one process in the same types and one
in wider ones, and allows a contender some times that.
"""

from __future__ import annotations

from dataclasses import dataclass

BEGIN = 1e-6  # of first values, which are copies
# Of what is in fp32 whatever layers compute in: an update by the same gradient, for check; for the
# gate all that it allows beside what rounding does (``measure.gate_tolerance`` by default).
EXACT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What one type allows. ``step``: check, of a layer's output, a loss, a gradient, or a number
    that a layer keeps. ``first`` and ``later``: the gate, as multiples of what rounding does, of
    the norms of the first step's updates, and of all else. ``order``: the gate, of an update, where
    microbatches come in another order. ``run``: the loss of any step of a timed run, in which
    differences add up."""

    step: float
    first: int
    later: int
    order: float
    run: float


_BF16 = Tolerance(
    step=2.0**-3.5,  # bf16 resolves 2^-7
    # Many rounded numbers, nearly the same for every order. Later ones differ also by what rounding
    # has moved along the steepest direction, which is a single number.
    first=3,
    later=8,
    order=2.0**-12,  # sums are in fp32; sums in bf16 differ by 2^-10
    run=0.02,  # the gate's steps, which are larger than a run's, were off by 4e-3
)
TOLERANCES = {
    # It resolves 2^-23. Contenders were at most 1e-5 apart after 12 steps.
    "fp32": Tolerance(step=2.0**-11.5, first=8, later=8, order=2.0**-12, run=0.01),
    "bf16": _BF16,
    # For check, one process multiplies in 8 bits, too: what differs is what bf16 rounds before.
    "fp8": _BF16,
}
