"""The error for a user's bad input. It is a module of its own, which imports nothing, so that every
command can answer ``--help`` at once."""


class SpecError(ValueError):
    """Bad input. The message is one line with the field, its value and what would work."""
