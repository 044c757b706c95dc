"""Published measurements beside the simulator's predictions: ``python -m benchmarks.validate``."""
