"""What an attempt leaves on disk, and what is derived from it.

Ranks write events (``rank_events``) and their ``environment``; a launcher folds them into one
``record`` per attempt; ``metrics`` and ``stats`` are computed when a record is read, and
``recorded_spec`` reads the specs of older versions.
"""
