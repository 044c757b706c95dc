"""Reports: derived from records alone, at any time."""
