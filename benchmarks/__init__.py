"""The suite: compares contenders by real runs, by simulation, and with published numbers.

The modules here are the commands (``zeropp --help``) and ``api``, which returns a sweep's results
in Python. What they call is in one folder per role, listed here in the direction in which data
flows:

* ``specification``: turns a command line into a frozen, validated RunSpec.
* ``launch``: plans the RunSpec and starts an attempt at it; there is one launcher per kind (local,
  slurm, trace, simulate, replay).
* ``worker``: what a rank runs: the comparison with one process (the gate), the timed steps, memory,
  recorded spans.
* ``records``: the files that an attempt leaves, and the statistics that are derived from them.
* ``report``: turns records into tables, figures and one page.

Beside them stand folders that the suite itself never imports. Some answer questions: ``tune`` (the
best plans on a cluster), ``explain`` (another program's configuration), ``measured`` (step times
that a user has) and ``calibrate`` (the constants of a machine). Others make the committed tables:
``validation`` (the simulator against published runs), ``verdict`` (the claim of 33 %) and
``evidence`` (schedules, memory, replays).

Importing any of this changes nothing in the process; ``specification.command`` is how commands
start and end.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
