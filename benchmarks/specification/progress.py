"""How a command shows progress: as a bar on a terminal, as occasional lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

T = TypeVar("T")

CONSOLE = Console(stderr=True)
_FIRST_LINE_S = 2.0  # work that takes less time prints no line in a log
_LOG_EVERY_S = 10.0


def progress_line() -> Progress:
    """A progress bar with counts, time and the current work, in one line of the terminal; in a log
    it prints a line after 2 s and then every 10 s, until the last item is done."""
    rest_of_the_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return _Logged(
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest_of_the_line),
        console=CONSOLE,
        transient=True,
        expand=True,
        disable=not CONSOLE.is_terminal,
    )


class _Logged(Progress):
    """A progress bar that prints lines instead if there is no terminal."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._started = time.monotonic()
        self._next = self._started + _FIRST_LINE_S

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Update a task as rich does, and print a line from time to time if there is no
        terminal."""
        super().update(task_id, **fields)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task as rich does, and print a line from time to time if there is no
        terminal."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        now = time.monotonic()
        task = next(task for task in self.tasks if task.id == task_id)
        if not self.disable or now < self._next or task.completed == task.total:
            return
        self._next = now + _LOG_EVERY_S
        done = "" if task.total is None else f"{task.completed:.0f} of {task.total:.0f}, "
        line = f"  {now - self._started:.0f} s: {done}{task.description}"
        self.console.print(line, markup=False, soft_wrap=True)


def track(items: Iterable[T], total: int | None, title: str) -> Iterator[T]:
    """The items, with a progress line while they are consumed."""
    with progress_line() as bar:
        line = bar.add_task(title, total=total)
        for item in items:
            yield item
            bar.advance(line)
