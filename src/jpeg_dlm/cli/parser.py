"""An argparse parser whose errors suggest the nearest known word and whose help shows defaults and choices."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jpeg_dlm.errors import UsageError


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Uses short names for values, and adds defaults and choices that the help text does not mention."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **({"max_help_position": 34} | options))

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "PATH" if action.type is Path else action.dest.upper() if action.type is None else "N"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        notes = []
        if action.choices and action.metavar and action.option_strings:  # otherwise argparse shows them instead of a metavar
            notes.append(f"one of {', '.join(map(str, action.choices))}".replace("%", "%%"))
        if action.nargs != 0 and action.default not in (None, "", [], argparse.SUPPRESS) and "default:" not in said:
            notes.append("default: %(default)s")
        if notes and said.endswith(")"):
            return f"{said[:-1]}; {'; '.join(notes)})"
        return f"{said} ({'; '.join(notes)})" if notes else said


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError`; `dotted` lists the config options that the verb documents."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"formatter_class": Formatter, "allow_abbrev": False} | options))
        self.dotted: Sequence[str] = ()
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def unknown(self, words: Iterable[str]) -> UsageError | None:
        """Return the error for the first unknown word, with the nearest known option, or None."""
        for word in words:
            name = word.partition("=")[0]
            if not name.startswith("-"):
                return UsageError(f"Unexpected argument '{word}'. See  {self.prog} --help")
            if name not in self._option_string_actions:
                return UsageError(f"Unknown option '{word}'{nearest(name, [*self._option_string_actions, *self.dotted], self)}")
        return None

    def error(self, message: str) -> NoReturn:
        if "required" in message:  # if a required option is mistyped, name the typo
            error = self.unknown(word for word in self._words if re.fullmatch(r"--[^\s=]+(=.*)?", word))
            if error:
                raise error
        if match := re.fullmatch(r"argument (\S+): (.+)", message, re.DOTALL):
            message = f"{match[1]} {'needs a value' if match[2].startswith('expected') else match[2]}"
        raise UsageError(f"{message[0].upper() + message[1:]}. See  {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest).capitalize()
        raise UsageError(f"{name} '{value}' is unknown{nearest(str(value), known, self, tell_all=True)}")


def nearest(word: str, known: Sequence[str], parser: argparse.ArgumentParser, tell_all: bool = False) -> str:
    """Return the end of an error message about an unknown word."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f": choose one of {', '.join(known)}." if tell_all else f". See  {parser.prog} --help"
