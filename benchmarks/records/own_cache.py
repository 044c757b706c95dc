"""Tables that are their own cache: a study computes the lines that its table lacks, and no others.

A study names its lines by keys, with a job for each. It may be stopped at any time: what has ended
is in the table, and the next run goes on from there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.record import write_atomically
from benchmarks.specification.command import workers
from benchmarks.specification.progress import progress_line

Line = dict[str, Any]
# Computes lines in a process of its own; it gets the last lines that its chain has found.
Job = Callable[[list[Line]], list[Line]]
_LAST = 3  # lines of a chain that its next job gets


def fill(
    path: Path,
    chains: Iterable[Iterable[tuple[Hashable, Job]]],
    key_of: Callable[[Line], Hashable],
    words: str,
    *,
    anew: bool = False,
) -> list[Line]:
    """The lines of the CSV ``path``, to which those of jobs have been added whose keys it lacked,
    on all cores; none counts as there if ``anew``. A job of a chain begins when the one before it
    has ended. ``words`` name the jobs in the progress line."""
    is_kept = path.exists() and not anew
    lines: list[Line] = pd.read_csv(path).to_dict("records") if is_kept else []  # type: ignore[assignment]
    have = set(map(key_of, lines))
    waiting = [deque(job for key, job in chain if key not in have) for chain in chains]
    running: dict[Future[list[Line]], tuple[deque[Job], list[Line]]] = {}
    with workers(os.cpu_count() or 1) as pool, progress_line() as bar:
        shown = bar.add_task(words, total=sum(map(len, waiting)))

        def begin(chain: deque[Job], before: list[Line]) -> None:
            if chain:
                running[pool.submit(chain.popleft(), before)] = chain, before

        for chain in waiting:
            begin(chain, [])
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                chain, before = running.pop(done)
                found = done.result()
                lines += found
                write(path, lines)
                begin(chain, [*before, *found][-_LAST:])
                bar.advance(shown)
    return lines


def write(path: Path, lines: list[Line] | pd.DataFrame) -> None:
    """Write a table of lines, with six digits of each number."""
    write_atomically(path, pd.DataFrame(lines).to_csv(index=False, float_format="%.6g"))
