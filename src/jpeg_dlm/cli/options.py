"""Config options on the command line: `--preset`, `--config FILE`, and `--section.option VALUE` for every value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from jpeg_dlm.cli.parser import Parser
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import flatten, option_choices, option_names, override, read_json_file
from jpeg_dlm.errors import UsageError
from jpeg_dlm.presets import PRESETS, preset

NOT_OPTIONS = ("preset", "method")  # they determine the other options
GROUPS = ("data", "encoder", "model", "objective", "train", "sampler")


def add_config_arguments(parser: Parser, default: str = "tiny", groups: Sequence[str] = GROUPS, required: bool = True) -> None:
    """Add `--preset`, None by default unless `required`, `--config` and `--help-all`, and accept the options of all groups."""
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), default=default if required else None, metavar="NAME",
        help="base values of all options" if required else f"base values of all options (default: {default})",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON file with options that override the preset's")
    document_options(parser, groups, default)
    parser.set_defaults(accepts=GROUPS)


def document_options(parser: Parser, groups: Sequence[str], default: str = "") -> None:
    """Add `--help-all`, which shows the options of these groups, and accept these options."""
    names = [f"--{name.replace('_', '-')}" for name in option_names() if name.split(".")[0] in groups]
    shown = ", ".join(f"--{group}.*" for group in groups)
    parser.dotted = [name for name in names if "." in name]
    parser.epilog = f"{len(parser.dotted)} more options ({shown}) are shown by  {parser.prog} --help-all"
    parser.set_defaults(accepts=groups)
    said = "show this help and all configuration options"
    parser.add_argument("--help-all", action=HelpAll, groups=groups, preset=default, help=said)


class HelpAll(argparse.Action):
    """Prints the help with all options of some groups, with the values of the preset if there is one."""

    def __init__(self, groups: Sequence[str], preset: str, **options: Any) -> None:
        super().__init__(**options, nargs=0, default=argparse.SUPPRESS)
        self.groups, self.preset = groups, preset

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        name = getattr(namespace, "preset", None) or self.preset
        add_every_option(parser, self.groups, preset(name) if isinstance(name, str) and name in PRESETS else None)
        parser.epilog = "For the options of other systems than jpeg-dlm, see  jpeg-dlm info --method NAME --options"
        parser.print_help()
        parser.exit()


def add_every_option(parser: argparse.ArgumentParser, groups: Sequence[str], config: Config | None) -> None:
    """Add config options as arguments for help and completion; `split_overrides` removes them before argparse runs."""
    parser.usage = parser.format_usage().removeprefix("usage: ").strip().replace("%", "%%")
    choices = option_choices()
    for group in groups:
        values = f"values of the preset {config.preset}" if config else "default: the model's own values"
        section = parser.add_argument_group(f"options of {group}, {values}")
        for name, field in option_names().items():
            if name.split(".")[0] == group:
                default = _shown(config, name) if config else None
                section.add_argument(
                    f"--{name.replace('_', '-')}", default=default, choices=choices.get(name), metavar="VALUE",
                    help=field.metadata["help"].replace("%", "%%"),
                )  # fmt: skip


def refused_override(rest: Sequence[str], accepts: Sequence[str], parser: Parser) -> UsageError | None:
    """Return the error for the first config option that a verb does not accept, or None."""
    for word in rest:
        group = word[2:].split(".")[0]
        if word.startswith("--") and group not in accepts:
            if not accepts or group not in GROUPS:
                return parser.unknown([word])
            return UsageError(f"'{word}' cannot be changed here; only --{accepts[0]}.* options can. See  {parser.prog} --help")
    return None


def list_options(config: Config) -> str:
    """List every option of a config with its value and help."""
    rows = [
        (f"--{name.replace('_', '-')}", _shown(config, name), field.metadata["help"])
        for name, field in option_names(config).items()
        if name not in NOT_OPTIONS
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {said}" for name, value, said in rows)


def _shown(config: Config, dotted: str) -> str:
    value = attrgetter(dotted)(config)
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into (the verb's own words, config options with their values); only config options have a dot in their name."""
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
        if not equals and queue and not queue[0].startswith("--"):
            overrides.append(queue.pop(0))
    return words, overrides


def parse_overrides(rest: Sequence[str]) -> dict[str, Any]:
    """Parse `--model.latent-len 16` and `--model.latent-len=16` into dotted names and strings."""
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
            if not queue or queue[0].startswith("--"):
                raise UsageError(f"The option '{word}' needs a value.")
            value = queue.pop(0)
        values[name] = value
    return values


def read_config(
    args: argparse.Namespace, rest: Sequence[str], base: Config | None = None, default: str = "tiny", **fixed: str | None
) -> Config:  # fmt: skip
    """Merge `base` or a preset, the JSON file, the command line and `fixed`, in this order, and validate the result.

    The preset is the one of `--preset` or of the JSON file, which must not name two, or `default`.
    """
    values = read_json_file(args.config) if args.config else {}
    named, asked = values.pop("preset", None), base.preset if base else args.preset
    if named and asked and named != asked:
        raise UsageError(f"'{args.config}' begins with the preset {named}, not {asked}: leave one of the two out.")
    config = base or preset(str(named or asked or default))
    method = fixed.pop("method", None) or values.get("method")
    if method and method != config.method:
        from jpeg_dlm.methods.registry import for_method

        config = for_method(config, str(method))
    values = flatten({name: value for name, value in values.items() if name != "method"})
    return validate(override(config, values | parse_overrides(rest) | {k: v for k, v in fixed.items() if v}))
