"""An argparse parser whose errors suggest the nearest known word, and which adds config options when it parses.

The types of option values reject wrong ones before torch is imported.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jpeg_dlm.config import BOUNDS, LARGEST_INT
from jpeg_dlm.methods.registry import names
from jpeg_dlm.util.errors import UsageError


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Uses short names for values, and adds defaults and choices that the help text does not mention."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **({"max_help_position": 34} | options))

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "PATH" if action.type is Path else action.dest.upper() if action.type is None else "N"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        notes = []
        if action.choices and action.metavar and action.option_strings:  # otherwise argparse shows them instead of a metavar
            notes.append(f"one of {', '.join(map(str, action.choices))}".replace("%", "%%"))
        if action.nargs != 0 and action.default not in (None, "", [], argparse.SUPPRESS) and "default:" not in text:
            notes.append("default: %(default)s")
        if notes and text.endswith(")"):
            return f"{text[:-1]}; {'; '.join(notes)})"
        return f"{text} ({'; '.join(notes)})" if notes else text


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`.

    `add_options`, if set, is called with the words of the command before they are parsed, and adds the config options.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"formatter_class": Formatter, "allow_abbrev": False} | options))
        self.add_options: Callable[[Sequence[str]], None] | None = None
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        if self.add_options:
            self.add_options(self._words)
        return super().parse_known_args(args, namespace)

    def unknown(self, words: Iterable[str]) -> UsageError | None:
        """Return the error for the first unknown word, with the nearest known option, or None."""
        for word in words:
            name = word.partition("=")[0]
            if not name.startswith("-"):
                return UsageError(f"Unexpected argument '{word}'. See  {self.prog} --help")
            if name not in self._option_string_actions:
                known = [option for option in self._option_string_actions if "_" not in option]  # dashes equal underscores
                return UsageError(f"Unknown option '{name}'{nearest(name, known, self.prog)}")
        return None

    def error(self, message: str) -> NoReturn:
        if "required" in message:  # if a required option is mistyped, name the typo
            error = self.unknown(word for word in self._words if re.fullmatch(r"--[^\s=]+(=.*)?", word))
            if error:
                raise error
        if match := re.fullmatch(r"argument (\S+?)(?:/\S+)?: (.+)", message, re.DOTALL):
            message = f"{match[1]} {'needs a value' if match[2].startswith('expected') else match[2]}"
        raise UsageError(f"{message[0].upper() + message[1:]}. See  {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest).capitalize()
        raise UsageError(f"{name} '{value}' is unknown{nearest(str(value), list(map(str, action.choices)))}")


def nearest(word: str, known: Sequence[str], program: str = "") -> str:
    """Return the end of an error message about an unknown word: the nearest known one, or where all of them are listed."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f". See  {program} --help" if program else f": choose one of {', '.join(known)}."


# ---------------------------------------------------------------- types of option values


def number(kind: type = float, **bounds: float) -> Callable[[str], Any]:
    """Return a parser of numbers within bounds (`ge`, `gt`, `le`, `lt`)."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # not within any bounds
        if not all(BOUNDS[name][0](value, limit) for name, limit in bounds.items()):
            rule = " and ".join(f"{BOUNDS[name][1]} {limit:,}" for name, limit in bounds.items())
            raise argparse.ArgumentTypeError(f"must be a {'whole ' if kind is int else ''}number {rule}, not '{text}'")
        return value

    return read


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `least`."""
    return number(int, ge=least, le=LARGEST_INT)


positive = number(gt=0, le=1e9)
from_zero = number(ge=0, le=1e9)
share = number(gt=0, le=1)
unit = number(ge=0, le=1)


def words(text: str) -> list[str]:
    """Read comma-separated words."""
    parts = [word.strip() for word in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"must be words with commas between them, not '{text}'")
    return parts


def systems(text: str) -> list[str]:
    """Read `all` or comma-separated names of systems."""
    known = list(names("system"))
    chosen = known if text == "all" else words(text)
    if not set(chosen) <= set(known):
        raise argparse.ArgumentTypeError(f"must be all, or some of {','.join(known)}, not '{text}'")
    return chosen


def scorer(text: str) -> str:
    """Check the name of a scorer for `evaluation.scorer.build_scorer`."""
    kind, _, rest = text.partition(":")
    if text != "smollm2" and not (kind in ("hf", "gguf") and rest):
        raise argparse.ArgumentTypeError(f"must be smollm2, hf:NAME (hf:gpt2-large is the paper's) or gguf:FILE, not '{text}'")
    return text


def several(read: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Return a parser of one or several comma-separated values."""
    return lambda text: [read(part) for part in text.split(",")]
