"""The verdict on the claim of 33 %: ``zeropp run experiment=claim_33``.

In: the ``verdict`` mapping of the experiment. Out: plans.csv and everything derived from it. Read
``cells`` (which cells, and what is simulated in each), ``given_settings`` (plans that no search
chooses), ``study`` (simulates all cells, or runs the best plans for real), ``judge`` (the verdict)
and ``pages`` (its tables and pictures).
"""

from benchmarks.verdict.study import run

__all__ = ["run"]
