"""The verdict on the claim of 33 %: ``python -m benchmarks.run experiment=claim_33``."""

from benchmarks.verdict.run import run

__all__ = ["run"]
