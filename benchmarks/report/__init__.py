"""Reports, which are made from records alone, at any time.

In: folders of records. Out: tables (CSV, Parquet, Markdown, LaTeX, HTML), figures and one page.
Read ``row`` and ``frame`` (a record becomes a row of a DataFrame), ``table`` and ``forms`` (how
tables are written), ``pairs`` (speed-ups), ``headline``, ``paper`` and ``tables`` (which tables
there are), the figures (``picture``, ``style``, then any of them), and ``write`` and ``page``,
which put a report together. ``words`` has the labels and the rounding of numbers, and ``trackers``
sends records to services that collect experiments.
"""
