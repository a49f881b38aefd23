"""Config options on the command line: `--preset`, `--config FILE`, and `--group.option VALUE` for every option of a method.

A command takes the options of all methods, since a file or a model may name the method; `override` refuses those of others.
For `--help-all` a command is parsed twice: first for its preset and method, then with the options of that method.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.config import GROUP_NAMES, Config, validate
from jpeg_dlm.methods.registry import default_config, for_method, names
from jpeg_dlm.options import flatten, option_choices, option_names, override, read_options_file
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.util.errors import UsageError

NOT_OPTIONS = ("preset", "method")  # they determine the other options


def add_config_arguments(parser: Parser, default: str = "tiny", groups: Sequence[str] = GROUP_NAMES) -> None:
    """Add `--preset`, `--config` and the options of all methods; document those of `groups`."""
    values = f"base values of all options (default: {default})"
    parser.add_argument("--preset", choices=tuple(PRESETS), metavar="NAME", help=values)
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or YAML file with options that override the preset's")
    add_options(parser, GROUP_NAMES, default, groups)


def add_options(parser: Parser, groups: Sequence[str], default: str = "", documented: Sequence[str] = ()) -> None:
    """Let a verb take the config options of these groups, and add `--help-all`, which shows the documented ones.

    `default` is the preset whose values are shown if the command names none; '' if the values are those of a model.
    """
    documented, prefixes = documented or groups, tuple(f"--{group}." for group in groups)
    count = sum(name.split(".")[0] in documented for name in option_names() if name not in NOT_OPTIONS)
    parser.add_argument("--help-all", action="help", help="show this help and all configuration options")
    parser.epilog = (
        f"{count} more options ({', '.join(f'--{group}.*' for group in documented)}) are shown by  {parser.prog} --help-all"
    )

    def add(words: Sequence[str]) -> None:
        if "--help-all" in words:
            _add_documented(parser, _chosen_config(words, default), documented, bool(default))
            return
        options = list(option_names())
        dotted = [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith(prefixes)]
        if not set(options).issuperset(dotted):  # those of other methods need torch
            options += [name for method in names("system", "stage", "student") for name in option_names(default_config(method))]
        for name in dict.fromkeys(name for name in options if name.split(".")[0] in groups):
            spellings = dict.fromkeys((flag(name), f"--{name}"))
            parser.add_argument(*spellings, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    parser.add_options = add


def _chosen_config(words: Sequence[str], default: str) -> Config:
    """Return the config of the preset and the method that a command names, as far as it names them rightly."""
    first = Parser(add_help=False)
    first.add_argument("--preset", nargs="?")
    first.add_argument("--method", nargs="?")
    chosen, _ = first.parse_known_args(words)
    name = chosen.preset if chosen.preset in PRESETS else default
    base = preset(name) if name in PRESETS else default_config()
    return for_method(base, chosen.method) if chosen.method in names("system", "stage") else base


def _add_documented(parser: Parser, config: Config, groups: Sequence[str], with_defaults: bool) -> None:
    """Add the options of some groups with their help texts."""
    parser.usage = parser.format_usage().removeprefix("usage: ").strip().replace("%", "%%")
    parser.epilog = None
    choices = option_choices(config)
    for group in groups:
        values = f"values of {config.method} and the preset {config.preset}" if with_defaults else "default: the model's own"
        section = parser.add_argument_group(f"options of {group}, {values}")
        for name, field in option_names(config).items():
            if name.split(".")[0] == group:
                section.add_argument(
                    flag(name),
                    default=_value_text(config, name) if with_defaults else None,
                    choices=choices.get(name),
                    metavar="VALUE",
                    help=field.metadata["help"].replace("%", "%%"),
                )


def overrides(args: argparse.Namespace, group: str = "") -> dict[str, str]:
    """Return the config options of a command by dotted name, or those of one group by their own names."""
    prefix = f"{group}." if group else ""
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if "." in name and name.startswith(prefix)}


def flag(name: str) -> str:
    """Return how an option is typed."""
    return f"--{name.replace('_', '-')}"


def list_options(config: Config) -> str:
    """List every option of a config with its value and help."""
    rows = [
        (flag(name), _value_text(config, name), field.metadata["help"])
        for name, field in option_names(config).items()
        if name not in NOT_OPTIONS
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {help}" for name, value, help in rows)


def _value_text(config: Config, dotted: str) -> str:
    value = attrgetter(dotted)(config)
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def read_config(args: argparse.Namespace, base: Config | None = None, default: str = "tiny", **fixed: str | None) -> Config:
    """Merge `base` or a preset, the file, the command line and `fixed`, in this order, and validate the result.

    The preset is the one of `--preset` or of the file, which must not name two, or `default`.
    """
    values: dict[str, Any] = read_options_file(args.config) if args.config else {}
    named, chosen = values.pop("preset", None), base.preset if base else args.preset
    if named and chosen and named != chosen:
        raise UsageError(f"'{args.config}' begins with the preset {named}, not {chosen}: leave one of the two out.")
    config = base or preset(str(named or chosen or default))
    method = fixed.pop("method", None) or values.get("method")
    if method and method != config.method:
        config = for_method(config, str(method))
    values = flatten({name: value for name, value in values.items() if name != "method"})
    return validate(override(config, values | overrides(args) | {k: v for k, v in fixed.items() if v}))
