"""Markdown tables for the verdict's page."""

from __future__ import annotations


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table in which columns of numbers are aligned to the right."""
    rules = ["---:" if _is_numeric([row[i] for row in rows]) else "---" for i in range(len(heads))]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join(rules) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _is_numeric(texts: list[str]) -> bool:
    return bool(texts) and all(text.replace(".", "", 1).isdigit() for text in texts)
