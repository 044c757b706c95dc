"""Checks committed tables: rows are computed again and compared, or whole tables are renewed.

In: the tables in results/reference. Out: an exit status and the rows that differ. Read ``tables``
(which there are), ``again`` (how a row of each is computed), ``compare`` (when two cells are
equal), ``__main__``, and ``renew``, which writes whole tables.
"""
