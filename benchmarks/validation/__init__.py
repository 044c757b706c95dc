"""Compares published measurements with the simulator's predictions (``benchmarks.validation``).

In: CSV files with the columns of docs/published_rows.md. Out: predictions and their errors.
Read ``rows`` (the columns, and what may be in them), ``stated`` (a row's machine and work, in SI
units), ``cases`` (row to Plan), ``predict`` (Plan to the row's quantity), ``errors`` (over all
rows), ``fit_constants`` and ``strangers`` (a source is left out) and ``texts`` (what is printed and
written).
"""
