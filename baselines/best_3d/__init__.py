"""The best of all public 3D parallelism at once: a bound to price against, and nobody's program."""
