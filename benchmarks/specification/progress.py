"""How a command shows progress: as a bar on a terminal, as occasional lines in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

T = TypeVar("T")

CONSOLE = Console(stderr=True)
_FIRST_LINE_S = 2.0  # work that takes less time prints no line in a log
_LOG_EVERY_S = 5.0


def progress_line() -> Progress:
    """A progress bar with counts, time and the current work, in one line of the terminal; in a log
    it prints a line after 2 s and then every 5 s, until the last item is done."""
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
    """A progress bar that prints lines instead if there is no terminal, whatever its owner waits
    for: a thread of its own looks at the clock."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._ended = threading.Event()

    def start(self) -> None:
        """Start as rich does, and the lines, too, if there is no terminal."""
        super().start()
        if self.disable:
            threading.Thread(target=self._tell, args=(time.monotonic(),), daemon=True).start()

    def stop(self) -> None:
        """Stop as rich does, and the lines, too."""
        self._ended.set()
        super().stop()

    def _tell(self, started: float) -> None:
        wait_s = _FIRST_LINE_S
        while not self._ended.wait(wait_s):
            wait_s = _LOG_EVERY_S
            for task in self.tasks:
                if task.completed != task.total:
                    done = f"{task.completed:.0f} of {task.total:.0f}, " if task.total else ""
                    line = f"  {time.monotonic() - started:.0f} s: {done}{task.description}"
                    self.console.print(line, markup=False, soft_wrap=True)


def track(items: Iterable[T], total: int | None, title: str) -> Generator[T, None, None]:
    """The items, with a progress line while they are consumed. Whoever may be stopped by an error
    in between closes it, or its lines go on as long as somebody keeps the error."""
    with progress_line() as bar:
        line = bar.add_task(title, total=total)
        for item in items:
            yield item
            bar.advance(line)
