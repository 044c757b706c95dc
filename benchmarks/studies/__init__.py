"""Programs that make the committed tables in results/reference/, one module or folder per table.

In: published measurements, plans and schedules. Out: CSV, JSON and Markdown files.
``validation`` compares the simulator with published rows (``python -m benchmarks.validate``),
``claim_33`` is the verdict (``experiment=claim_33``), and ``renew`` writes again what
is computed, not what was measured or traced.
Every other module is a command of its own: ``python -m benchmarks.studies.schedules``.
"""
