"""An entry of the registry: a program, its version, and where each of its traits was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from zeropp.programs.traits import Program

# Every entry states these, so every entry has a source for them.
ALWAYS_STATED = ("bf16", "fp32")


@dataclass(frozen=True)
class Entry:
    """``sources`` gives for a trait the file and version that it was read in, the table that it was
    fitted on, or the word "assumed" with the reason."""

    program: Program
    version: str
    sources: Mapping[str, str]

    @property
    def stated(self) -> tuple[str, ...]:
        """The traits that differ from the default, and the bytes, which have none."""
        return tuple(
            trait.name
            for trait in fields(Program)
            if trait.name in ALWAYS_STATED
            or (trait.name != "name" and getattr(self.program, trait.name) != trait.default)
        )

    def but(self, name: str, version: str, sources: Mapping[str, str], **changed: Any) -> Entry:
        """Another program that differs in the ``changed`` traits, whose ``sources`` come along."""
        program = replace(self.program, name=name, **changed)
        return Entry(program, version, {**self.sources, **sources})
