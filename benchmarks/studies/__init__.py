"""Programs that make committed tables under results/reference/, one module or folder per table.

``validation`` holds the simulator against published rows, ``claim_33`` is the verdict; the others
are run as modules, for example ``python -m benchmarks.studies.schedule_table``.
"""
