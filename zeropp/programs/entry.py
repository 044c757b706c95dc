"""An entry of the registry: a program, its version, and the source of each of its traits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from zeropp.programs.traits import Program

# Traits without a default: every entry states them and has a source for them.
ALWAYS_STATED = ("bf16", "fp32")


@dataclass(frozen=True)
class Entry:
    """A program with its version and, in ``sources``, a source per trait: the file and version in
    which it was read, the table to which it was fitted, or the word "assumed" with the reason."""

    program: Program
    version: str
    sources: Mapping[str, str]

    @property
    def stated(self) -> tuple[str, ...]:
        """The names of the traits that differ from their default or that have none."""
        return tuple(
            trait.name
            for trait in fields(Program)
            if trait.name in ALWAYS_STATED
            or (trait.name != "name" and getattr(self.program, trait.name) != trait.default)
        )

    def but(self, name: str, version: str, sources: Mapping[str, str], **changed: Any) -> Entry:
        """The entry of another program, which differs from this one in the ``changed`` traits.

        The source of a changed trait is never inherited, because it speaks of the other value:
        ``sources`` must have one for each that does not change to its default. Raises ValueError
        with the traits that lack one.
        """
        program = replace(self.program, name=name, **changed)
        inherited = {trait: text for trait, text in self.sources.items() if trait not in changed}
        entry = Entry(program, version, {**inherited, **sources})
        unsourced = [trait for trait in entry.stated if trait not in entry.sources]
        if unsourced:
            raise ValueError(f"program={name!r}: no source for {', '.join(unsourced)}")
        return entry
