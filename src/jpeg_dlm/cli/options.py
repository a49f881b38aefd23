"""Config options on the command line: `--preset`, `--config FILE`, and `--section.option VALUE` for every value."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import flatten, option_names, override, read_json_file
from jpeg_dlm.errors import UsageError
from jpeg_dlm.presets import PRESETS, preset

NOT_OPTIONS = ("preset", "method")  # they choose what the others are


def add_config_arguments(parser: argparse.ArgumentParser, default: str = "tiny") -> None:
    """`--preset` and `--config`, and the list of every option below the help."""
    parser.add_argument("--preset", default=default, metavar="NAME", help=f"one of {', '.join(PRESETS)} (default: {default})")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON file with options that replace the preset's")
    lines = [
        "every option can be given, for example --model.latent-len 16; those of another method than jpeg-dlm are shown by",
        "jpeg-dlm info --method NAME --options, those of jpeg-dlm are:",
    ]
    for name, field in option_names().items():
        if name not in NOT_OPTIONS:
            lines.append(f"  --{name.replace('_', '-'):<30} {field.metadata['help']}")
    parser.epilog = "\n".join(lines).replace("%", "%%")


def list_options(config: Config) -> str:
    """Every option of a config with its value and meaning."""
    rows = [
        (f"--{name.replace('_', '-')}", _shown(config, name), field.metadata["help"])
        for name, field in option_names(config).items()
        if name not in NOT_OPTIONS
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {said}" for name, value, said in rows)


def _shown(config: Config, dotted: str) -> str:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the verb's own words, options of the config with their values); only the latter have a dot in their name."""
    words: list[str] = []
    overrides: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            words.append(word)
            continue
        overrides.append(word)
        if not equals and queue and _is_value(queue[0]):
            overrides.append(queue.pop(0))
    return words, overrides


def unknown_option(words: Sequence[str], known: Sequence[str], has_config: bool) -> UsageError:
    """The error for words that a verb does not understand, with the nearest option that it does."""
    word = next((w for w in words if w.startswith("-")), words[0])
    if not word.startswith("-"):
        return UsageError(f"Unexpected argument '{word}': see --help.")
    dotted = [f"--{name.replace('_', '-')}" for name in option_names()] if has_config else []
    close = difflib.get_close_matches(word.partition("=")[0], [*known, *dotted], n=1)
    return UsageError(f"Unknown option '{word}'{f'; did you mean {close[0]}?' if close else ': see --help.'}")


def parse_overrides(rest: Sequence[str]) -> dict[str, Any]:
    """`--model.latent-len 16` and `--model.latent-len=16` as dotted names and strings."""
    values: dict[str, Any] = {}
    queue = list(rest)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"Unexpected argument '{word}': options begin with --, see --help.")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if "." not in name:
                raise UsageError(f"Unknown option '{word}': see --help.")
            if not queue or not _is_value(queue[0]):
                raise UsageError(f"The option '{word}' needs a value.")
            value = queue.pop(0)
        values[name] = value
    return values


def _is_value(word: str) -> bool:
    """Whether a word can follow an option: anything but the next option, so negative numbers can."""
    if not word.startswith("--"):
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True


def refuse_rest(rest: Sequence[str], known: Sequence[str] = ()) -> None:
    """For verbs without config options: anything left over is a mistake."""
    if rest:
        close = difflib.get_close_matches(rest[0], known, n=1)
        raise UsageError(f"Unknown option '{rest[0]}'{f'; did you mean {close[0]}?' if close else ': see --help.'}")


def read_config(args: argparse.Namespace, rest: Sequence[str], base: Config | None = None, **fixed: str | None) -> Config:
    """`base` or the preset, then the JSON file, then the command line, then what the verb itself says; validated."""
    config = base or preset(args.preset)
    values = read_json_file(args.config) if args.config else {}
    method = fixed.pop("method", None) or values.get("method")
    if method and method != config.method:
        from jpeg_dlm.methods.registry import for_method

        config = for_method(config, str(method))
    values = flatten({name: value for name, value in values.items() if name != "method"})
    return validate(override(config, values | parse_overrides(rest) | {k: v for k, v in fixed.items() if v}))
