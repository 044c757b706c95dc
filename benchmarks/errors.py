"""Bad input in one line: errors of the suite and of Hydra, and folders that cannot be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from omegaconf.errors import MissingMandatoryValue

from benchmarks.spec import SpecError


def one_line(error: Exception) -> str:
    """The first things an error says, and the options of a group that has no such one."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: missing; it has no default"
    lines = [line.strip(" \t;") for line in str(error).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("Available options"):
            options = [o for o in lines[number + 1 :] if "=" not in o and ":" not in o]
            return f"{lines[0]} (try {', '.join(options)})"
    return "; ".join(lines[:2])


def check_writable(field: str, directory: Path) -> None:
    """Make a folder for results, or raise SpecError before there are any."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SpecError(f"{field}={directory}: cannot be written to: {why}") from None
