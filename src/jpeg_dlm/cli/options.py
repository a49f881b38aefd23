"""Config options on the command line: `--preset`, `--config FILE`, and `--section.option VALUE` for every value."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpeg_dlm.config import Config, flatten, option_names, override, read_json_file, validate
from jpeg_dlm.errors import UsageError
from jpeg_dlm.presets import PRESETS, preset


def add_config_arguments(parser: argparse.ArgumentParser, default: str = "tiny") -> None:
    """`--preset` and `--config`, and the list of every option below the help."""
    parser.add_argument("--preset", default=default, metavar="NAME", help=f"one of {', '.join(PRESETS)} (default: {default})")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON file with options that replace the preset's")
    lines = ["every option of the preset can be given, for example --model.latent-len 16:"]
    for name, field in option_names().items():
        if name not in ("preset", "method"):
            lines.append(f"  --{name.replace('_', '-'):<30} {field.metadata['help']}")
    parser.epilog = "\n".join(lines).replace("%", "%%")


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
            if not queue or (queue[0].startswith("--") and not _is_number(queue[0])):
                raise UsageError(f"The option '{word}' needs a value.")
            value = queue.pop(0)
        values[name] = value
    return values


def _is_number(word: str) -> bool:
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


def read_config(args: argparse.Namespace, rest: Sequence[str], **fixed: str) -> Config:
    """Preset, then the JSON file, then the command line, then what the verb itself says; validated."""
    config = preset(args.preset)
    if args.config:
        config = override(config, flatten(read_json_file(args.config)))
    return validate(override(config, parse_overrides(rest) | {name: value for name, value in fixed.items() if value}))
