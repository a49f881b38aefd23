"""Results as plain values: the one way from their dataclasses to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

INLINED = {"inlined": True}  # metadata of a field whose own fields `plain` puts in its place; None has no fields


def plain(value: Any) -> Any:
    """Return a result with dicts in place of its dataclasses and mappings, and lists in place of its sequences."""
    if is_dataclass(value):
        found: dict[str, Any] = {}
        for member in fields(value):
            part = plain(getattr(value, member.name))
            found |= (part or {}) if member.metadata.get("inlined") else {member.name: part}
        return found
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value
