"""Format parts of messages: counted nouns and commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Return the number with its noun in the singular or plural: "1 text", "2,000 texts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def either(names: Sequence[str]) -> str:
    """The names as alternatives: "a", "a or b", "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def command(*words: object) -> str:
    """Return a command of this program, quoted for the shell."""
    return shlex.join(["jpeg-dlm", *map(str, words)])
