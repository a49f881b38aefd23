"""Read documents from records: the field that holds the text, and a refusal where that is doubtful."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jpeg_dlm.errors import DataError

SAMPLE = 1000  # records by which the choice of a field is judged, or all if there are fewer (assumed)
SMALL = 0.25  # a field with less than this share of another's characters is not taken for the text unasked (assumed)

Ids = tuple[int, ...]


class RecordReader:
    """Reads one field: the named one, else "text", else "input_ids", else the first with text; remembers all it saw."""

    def __init__(self, source: str = "", field: str = "", verbatim: bool = False) -> None:
        self.source, self.field, self.verbatim = source, field, verbatim  # verbatim: keep the white space of documents
        self.read: Counter[str] = Counter()  # records of each field that was read
        self._guessed: set[str] = set()
        self._sizes: Counter[str] = Counter()  # characters of each text field
        self._spaced: set[str] = set()  # text fields with white space in them

    def value(self, record: Any) -> str | Ids:
        """Return the text or token ids of a record; raise ValueError if it has none."""
        if not isinstance(record, dict):
            raise ValueError("not an object")
        name = self.field or self._choose(record)
        value = _lookup(record, name)
        if isinstance(value, list):
            if not all(type(i) is int and i >= 0 for i in value):
                raise ValueError(f"{name} are not whole numbers from 0")
        elif not isinstance(value, str):
            listed = ", ".join(map(str, record)) or "(none)"
            raise ValueError(f"no text {f'in {name!r} ' if self.field else ''}among the fields {listed}")
        self.read[name] += 1
        if self.read.total() <= SAMPLE:
            for other, text in _texts(record):
                self._sizes[other] += len(text)
                self._spaced |= {other} if " " in text.strip() else set()
        if self.read.total() == SAMPLE:
            self.check()
        return value if isinstance(value, str) else tuple(value)

    def _choose(self, record: dict[Any, Any]) -> str:
        if isinstance(record.get("text"), str):
            return "text"
        if isinstance(record.get("input_ids"), list):
            return "input_ids"
        first = next((str(name) for name, value in record.items() if isinstance(value, str)), "text")
        self._guessed.add(first)
        return first

    def check(self) -> None:
        """Raise `DataError` if a field that nobody named is an id or a small part of another field."""
        for name in self._guessed:
            larger = {
                other: size for other, size in self._sizes.items()
                if other not in self.read
                and (self._sizes[name] < SMALL * size or (other in self._spaced and name not in self._spaced))
            }  # fmt: skip
            if larger:
                other = max(larger, key=larger.__getitem__)
                raise DataError(
                    f"The records of '{self.source}' have no field 'text', and their first, '{name}', holds "
                    f"{size_of(self._sizes[name])} where '{other}' holds {size_of(larger[other])}: name the field to read, "
                    f"as in --data.field {other}."
                )

    def summary(self, records: int, size: int) -> str:
        """Return a sentence about the field that was read, or "" if there were no records."""
        if not self.read:
            return ""
        unread = [f"'{name}'" for name in self._sizes if name not in self.read]
        rest = f"; not read: {', '.join(unread)}" if unread else ""
        names = " or ".join(f"'{name}'" for name in self.read)
        return f"Field {names} of {records:,} records, {size_of(size)}{rest}."


def size_of(size: int) -> str:
    """Return a number of bytes in words: "355 KB"."""
    unit = min(len(f"{size:d}") - 1, 11) // 3
    return f"{size / 1000**unit:.3g} {('bytes', 'KB', 'MB', 'GB')[unit]}"


def _lookup(record: dict[Any, Any], name: str) -> Any:
    """Return the value of a field; dots lead into nested records."""
    if name in record or "." not in name:
        return record.get(name)
    head, _, rest = name.partition(".")
    inner = record.get(head)
    return _lookup(inner, rest) if isinstance(inner, dict) else None


def _texts(record: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and values of all text fields, nested ones with dots in their names."""
    for name, value in record.items():
        if isinstance(value, str):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _texts(value, f"{prefix}{name}.")
