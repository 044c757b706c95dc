"""Compares published measurements with the simulator's predictions (``benchmarks.validate``).

In: CSV files with the columns of docs/published_rows.md. Out: predictions and their errors.
Read ``rows`` (the columns; ``spelling`` and ``quantities`` say what may be in them), ``reader``
(CSV to rows), ``cases`` (row to Plan, on the cluster of ``clusters``), ``predict`` (Plan to the
row's quantity), ``run_pairs`` (ratios of runs), ``errors``, ``texts`` (what is printed) and
``files``. ``since`` compares the errors with those of an earlier version.
"""
