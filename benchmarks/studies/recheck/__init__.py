"""Checks committed tables: rows are computed again and compared, or whole tables are renewed.

In: the tables in results/reference. Out: an exit status and the rows that differ. Read
``committed_tables`` (which there are), ``again`` (how a row of each is computed), ``rounding``
(when two cells are equal), ``__main__``, and ``renew``, which writes whole tables.
"""
