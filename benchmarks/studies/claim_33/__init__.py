"""The verdict on the claim of 33 %: ``python -m benchmarks.run experiment=claim_33``."""

from benchmarks.studies.claim_33.study import run

__all__ = ["run"]
