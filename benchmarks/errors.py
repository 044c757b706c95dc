"""Errors of the suite and of Hydra in one line, with what would work where that is known."""

from __future__ import annotations

from omegaconf.errors import MissingMandatoryValue


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
