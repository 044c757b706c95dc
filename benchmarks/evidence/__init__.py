"""Programs that make committed tables in results/reference: schedules, memory, replays, orders.

In: plans and schedules. Out: CSV and JSON files. Each module is a command of its own
(``python -m benchmarks.evidence.schedules``); ``renew`` runs all that is computed, those of
``benchmarks.validation`` and ``benchmarks.verdict``, too.
"""
