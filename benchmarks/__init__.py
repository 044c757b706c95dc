"""The suite: compare contenders for real, by simulation, and with published numbers.

The modules here are the commands (`python -m benchmarks.run --help`); everything they call lies in
a folder per role, listed in the direction in which data flows:

* ``specification``: what is asked for. A command line becomes a frozen, validated RunSpec.
* ``launch``: RunSpec to planned point to attempt, by one launcher per kind (local, slurm, trace,
  simulate).
* ``worker``: what a rank runs. Gate against one process, timed steps, memory, recorded spans.
* ``records``: what an attempt leaves on disk, and the statistics that are derived from it.
* ``report``: records to tables, figures and one page. ``studies``: programs that make the
  committed tables (validation, the verdict on the 33 %, memory, schedules).
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
