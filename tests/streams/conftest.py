"""The tests of streams run on the same world of ranks as those of ``tests/gloo``."""

from tests.gloo.conftest import world

__all__ = ["world"]
