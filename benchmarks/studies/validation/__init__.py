"""Compares published measurements with the simulator's predictions (``benchmarks.validate``).

In: CSV files with the columns of docs/published_rows.md. Out: predictions and their errors.
Read ``rows`` (the columns, and what may be in them), ``cases`` (row to Plan), ``errors`` (Plan to
the row's quantity, and its error) and ``texts`` (what is printed and written).
"""
