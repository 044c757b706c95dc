"""The verdict on the claim of 33 %: ``python -m benchmarks.run experiment=claim_33``.

In: the ``verdict`` mapping of the experiment. Out: plans.csv and everything derived from it. Read
``grid`` (which cells), ``cells`` and ``given_settings`` (what is simulated in a cell), ``study``
(runs it), ``judge`` (the verdict), ``maps`` and ``page_tables``; ``measure`` runs the best plans.
"""

from benchmarks.studies.claim_33.study import run

__all__ = ["run"]
