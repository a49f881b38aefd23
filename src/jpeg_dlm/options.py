"""Read and write options as JSON, YAML and command-line strings, strictly, without importing torch.

Kept instead of tyro or OmegaConf: the method determines which options exist, and files and command line share one check.
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
from jpeg_dlm.methods.registry import default_config, groups_of
from jpeg_dlm.util.errors import UsageError, reason_of
from jpeg_dlm.util.files import load_json, unique

LARGEST_FILE = 1 << 20  # bytes of an options file; a whole config has 3,000
YAML_TAGS = frozenset("str int float bool null timestamp merge value map seq".split())  # that a value has without writing one


def option_names(config: Any = None, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return every option of a config (default: JPEG-DLM's) by its dotted name, in order."""
    config = default_config() if config is None else config
    names: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(config):
        group, name = getattr(config, f.name), prefix + f.name
        names |= option_names(group, f"{name}.") if dataclasses.is_dataclass(group) else {name: f}
    return names


def option_types(config: Any) -> dict[str, Any]:
    """Return the type of every option of a config by its dotted name."""
    owners = {"": config} | {f"{name}.": group for name, group in vars(config).items() if dataclasses.is_dataclass(group)}
    hints = {start + name: hint for start, owner in owners.items() for name, hint in typing.get_type_hints(type(owner)).items()}
    return {name: hints[name] for name in option_names(config)}


def option_choices(config: Any = None) -> dict[str, tuple[str, ...]]:
    """Return the possible values of all options with a fixed set of values, by dotted name."""
    types = option_types(default_config() if config is None else config).items()
    choices = {name: tuple(map(str, typing.get_args(hint))) for name, hint in types if typing.get_origin(hint) is Literal}
    return choices | {name: ("true", "false") for name, hint in types if hint is bool}


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
    raise UsageError(f"'{path}' must be {kinds.get(hint, hint)}, not {reprlib.repr(value)}.")


def from_dict(values: Mapping[str, Any], cls: type = Config, path: str = "") -> Any:
    """Build a config of type `cls` from nested mappings; an unknown key is an error that suggests the nearest name."""
    hints = typing.get_type_hints(cls)
    groups = groups_of(str(values.get("method", "jpeg-dlm"))) if cls is Config else {}
    hints |= groups
    known = [f.name for f in dataclasses.fields(cls)]
    kwargs = {name: group() for name, group in groups.items()}
    for key, value in values.items():
        full = f"{path}.{key}" if path else key
        if key not in known:
            raise UsageError(f"Unknown option '{full[:80]}'{_suggest(key[:80], known)}")
        kwargs[key] = _convert(value, hints[key], full)
    return cls(**kwargs)


to_dict = dataclasses.asdict  # the inverse of `from_dict`


def changed(config: Config) -> dict[str, Any]:
    """Return the options that differ from their defaults, which stays comparable when later versions add options."""
    plain = Config(method=config.method, **{name: type(getattr(config, name))() for name in ("model", "objective", "sampler")})
    before, now = flatten(to_dict(plain)), flatten(to_dict(config))
    return {"method": config.method} | {name: value for name, value in now.items() if value != before[name]}


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """Replace dotted options of a config, as in `override(c, {"model.latent_len": "16"})`; dashes equal underscores."""
    types = option_types(config)
    for dotted, value in values.items():
        key = dotted.replace("-", "_")
        if key not in types:
            raise UsageError(f"Unknown option '{dotted}'{_suggest(key, list(types))}")
        if key == "method" and value != config.method:
            raise UsageError(f"These are the options of {config.method}: change the method with --method {value}.")
        group, _, name = key.rpartition(".")
        option = {name: _convert(value, types[key], key)}
        whole = {group: dataclasses.replace(getattr(config, group), **option)} if group else option
        config = dataclasses.replace(config, **whole)
    return config


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names, as `override` takes them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a file of options; raise `UsageError` if it is unreadable or not a JSON object."""
    return load_json(path, LARGEST_FILE, UsageError, "name another file of options")


def read_options_file(path: Path) -> dict[str, Any]:
    """Read a file of options that a user wrote: YAML if its name ends so, else JSON."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        return read_json_file(path)
    return load_json(path, LARGEST_FILE, UsageError, "name another file of options", parse_yaml)


def parse_yaml(raw: bytes) -> Any:
    """Parse a YAML document with unique keys and no tags or aliases; raise ValueError for any other.

    No objects are made, which is stricter than `safe_load`: a value stays the word that it is, such as 1e-3 or off, and is
    checked like a word of the command line.
    """
    import yaml

    seen: set[int] = set()  # an alias is the node that it repeats

    def plain(node: Any) -> Any:
        line = f"in line {node.start_mark.line + 1}"
        if id(node) in seen:
            raise ValueError(f"what begins {line} is repeated by an alias")
        seen.add(id(node))
        if node.tag.removeprefix("tag:yaml.org,2002:") not in YAML_TAGS:
            raise ValueError(f"there is a tag {line}")
        if isinstance(node, yaml.MappingNode):
            return unique((str(plain(key)), plain(value)) for key, value in node.value)
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        return None if node.tag.endswith(":null") else node.value

    try:
        document = yaml.compose(raw.decode("utf-8"), yaml.SafeLoader)
        return document and plain(document)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{error.problem} in line {line}") from None
    except yaml.YAMLError as error:
        raise ValueError(reason_of(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
