"""The code that this rank runs, read when the rank's modules are imported.

A checkout may be edited after the rank has started, and a job may start long after it was
submitted, so the files on disk may differ from the modules in memory. Ranks that are forked from
one process have its modules, and so its digest.
"""

from __future__ import annotations

import os

from benchmarks.records.environment import read_code

LOADED = read_code(ask_git=os.environ.get("RANK", "0") == "0")
