"""The suite: compares contenders by real runs, by simulation, and with published numbers.

The modules here are the commands (`python -m benchmarks.run --help`). What they call is in one
folder per role, listed here in the direction in which data flows:

* ``specification``: turns a command line into a frozen, validated RunSpec.
* ``launch``: plans the RunSpec and starts an attempt at it; there is one launcher per kind (local,
  slurm, trace, simulate).
* ``worker``: what a rank runs: the comparison with one process (the gate), the timed steps, memory,
  recorded spans.
* ``records``: the files that an attempt leaves, and the statistics that are derived from them.
* ``report``: turns records into tables, figures and one page. ``studies``: programs that make the
  committed tables (validation, the verdict on the 33 %, memory, schedules).
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
