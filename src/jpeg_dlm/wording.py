"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun in the singular or plural: "1 text", "2,000 texts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
