"""The engine: an interpreter over a Plan's programs, in real processes."""
