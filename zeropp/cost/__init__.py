"""FLOPs, bytes, link times and memory: the only home of formulas. Imports no torch."""
