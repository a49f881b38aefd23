"""Small parts of sentences: numbers with their noun, commands to type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """The number with its noun in the singular or plural: "1 text", "2,000 texts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def either(names: Sequence[str]) -> str:
    """The names as alternatives: "a", "a or b", "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def command(*words: object) -> str:
    """A command of this program as a shell takes it, whatever its paths hold."""
    return shlex.join(["jpeg-dlm", *map(str, words)])
