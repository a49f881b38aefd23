"""Dataclasses of results as JSON: nested, inlined and absent ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jpeg_dlm.results.plain import INLINED, plain


@dataclass(frozen=True)
class Inner:
    a: int
    b: float | None


@dataclass(frozen=True)
class Outer:
    first: str
    inner: Inner | None = field(metadata=INLINED)
    more: Mapping[str, object] = field(metadata=INLINED)
    last: Sequence[Inner]


def test_fields_stand_where_they_are_declared():
    found = plain(Outer("x", Inner(1, None), {"m": (Inner(2, 0.5),), "n": "ab"}, [Inner(3, 0.0)]))
    assert found == {"first": "x", "a": 1, "b": None, "m": [{"a": 2, "b": 0.5}], "n": "ab", "last": [{"a": 3, "b": 0.0}]}
    assert list(found) == ["first", "a", "b", "m", "n", "last"] and json.loads(json.dumps(found)) == found


def test_an_inlined_field_that_is_none_has_no_fields():
    assert plain(Outer("x", None, {}, ())) == {"first": "x", "last": []}


def test_plain_values_stay_as_they_are():
    value = {"a": [1, 2.5, None, True, "text"], "b": {"c": []}}
    assert plain(value) == value
