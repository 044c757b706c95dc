"""Reports, which are made from records alone, at any time.

In: folders of records. Out: tables (CSV, Parquet, Markdown, LaTeX, HTML), figures and one page.
Read ``row`` and ``frame`` (a record becomes a row of a DataFrame), ``table`` and ``forms`` (how
tables are written), ``headline``, ``paper`` and ``tables`` (which tables there are), the figures
(``picture``, ``style``, then any of them), and ``write``, which puts a report together.
"""
