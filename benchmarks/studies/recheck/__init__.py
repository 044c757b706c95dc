"""Committed tables held against today's code: a sample that is computed again, or all renewed."""
