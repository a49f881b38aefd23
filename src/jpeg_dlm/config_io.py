"""Read and write options as JSON and command-line strings, strictly, without importing torch.

Kept instead of tyro or OmegaConf: the method determines which options exist, and JSON and command line share one check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import reprlib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jpeg_dlm.config import Config
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import default_config, groups_of
from jpeg_dlm.strict_json import parse_json

LARGEST_FILE = 1 << 20  # bytes of an options file; a whole config has 3,000


def option_names(config: Any = None, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return every leaf option of a config (default: JPEG-DLM's) by its dotted name, in order."""
    config = default_config() if config is None else config
    names: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            names |= option_names(value, f"{prefix}{f.name}.")
        else:
            names[prefix + f.name] = f
    return names


def option_choices(config: Any = None) -> dict[str, tuple[str, ...]]:
    """Return the possible values of all options with a fixed set of values, by dotted name."""
    config = default_config() if config is None else config
    found: dict[str, tuple[str, ...]] = {}
    for group in dataclasses.fields(config):
        options = getattr(config, group.name)
        hints = typing.get_type_hints(type(options)) if dataclasses.is_dataclass(options) else {}
        for name, hint in hints.items():
            if typing.get_origin(hint) is Literal:
                found[f"{group.name}.{name}"] = tuple(map(str, typing.get_args(hint)))
            elif hint is bool:
                found[f"{group.name}.{name}"] = ("true", "false")
    return found


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}."


def _convert(value: Any, hint: Any, path: str) -> Any:
    """Convert a JSON value or command-line string to the annotated type; raise `UsageError` if it does not fit."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UsageError(f"'{path}' must be a group of options, not {reprlib.repr(value)}.")
        return from_dict(value, typing.cast(type, hint), path)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UsageError(f"'{path}' must be one of {', '.join(map(str, choices))}, not {reprlib.repr(value)}.")
        return value
    if typing.get_origin(hint) is tuple:  # of numbers: a list in JSON, comma-separated on the command line
        items = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)):
            return tuple(_convert(item, typing.get_args(hint)[0], path) for item in items)
    if hint is bool:
        table = {True: True, False: False, "true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, (bool, str)) and key in table:
            return table[key]
    elif hint in (int, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
            if hint is float and math.isfinite(number):
                return number
            if hint is int and number == int(number):
                return int(value) if isinstance(value, (int, str)) and str(value).lstrip("+-").isdigit() else int(number)
    elif hint is str and isinstance(value, str):
        return value
    kinds = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}
    raise UsageError(f"'{path}' must be {kinds.get(hint, 'a list of numbers')}, not {reprlib.repr(value)}.")


def from_dict(values: Mapping[str, Any], cls: type = Config, path: str = "") -> Any:
    """Build a config of type `cls` from nested mappings; an unknown key is an error that suggests the nearest name."""
    hints = typing.get_type_hints(cls)
    groups = groups_of(str(values.get("method", "jpeg-dlm"))) if cls is Config else {}
    hints |= groups
    known = [f.name for f in dataclasses.fields(cls)]
    kwargs = {f.name: f.metadata["earlier"] for f in dataclasses.fields(cls) if "earlier" in f.metadata}
    kwargs |= {name: group() for name, group in groups.items()}
    for key, value in values.items():
        full = f"{path}.{key}" if path else key
        if key not in known:
            raise UsageError(f"Unknown option '{full[:80]}'{_suggest(key[:80], known)}")
        kwargs[key] = _convert(value, hints[key], full)
    return cls(**kwargs)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the inverse of `from_dict`, with lists for tuples as in JSON."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in items}

    return dataclasses.asdict(config, dict_factory=plain)


def changed(config: Config) -> dict[str, Any]:
    """Return the options that differ from their defaults, which stays comparable when later versions add options."""
    plain = Config(method=config.method, **{name: type(getattr(config, name))() for name in ("model", "objective", "sampler")})
    before, now = flatten(to_dict(plain)), flatten(to_dict(config))
    return {"method": config.method} | {name: value for name, value in now.items() if value != before[name]}


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """Replace dotted options of a config, as in `override(c, {"model.latent_len": "16"})`; dashes equal underscores."""
    names = option_names(config)
    for dotted, value in values.items():
        key = dotted.replace("-", "_")
        if key not in names:
            raise UsageError(f"Unknown option '{dotted}'{_suggest(key, list(names))}")
        if key == "method" and value != config.method:
            raise UsageError(f"These are the options of {config.method}: change the method with --method {value}.")
        config = _replace(config, key.split("."), value, key)
    return config


def _replace(node: Any, parts: list[str], value: Any, path: str) -> Any:
    head, rest = parts[0], parts[1:]
    new = (
        _replace(getattr(node, head), rest, value, path)
        if rest
        else _convert(value, typing.get_type_hints(type(node))[head], path)
    )
    return dataclasses.replace(node, **{head: new})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names, as `override` takes them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise `UsageError` if it is unreadable or not an object."""
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
        if len(raw) > LARGEST_FILE:
            raise UsageError(f"'{path}' is larger than {LARGEST_FILE} bytes, too large for an options file: name another.")
        values = parse_json(raw)
    except OSError as error:
        raise UsageError(f"Cannot read '{path}': {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"'{path}' is not valid JSON ({error}).") from error
    if not isinstance(values, dict):
        raise UsageError(f"'{path}' must hold a JSON object with options.")
    return values
