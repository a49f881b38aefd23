"""Fields of requests, declared once: read from JSON with one sentence for each mistake, and described as JSON Schema."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jpeg_dlm.serve.http_errors import ApiError

T = TypeVar("T")

LONGEST_TEXT = 20_000  # characters
TEXT = f"a string of at most {LONGEST_TEXT} characters"

# Fields of the OpenAI conventions that say nothing at these values, and have no meaning here at others.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (0, False), "presence_penalty": (0,),
    "suffix": ("",), "temperature": (1,), "top_p": (1,), "user": (), "service_tier": ("auto", "default"),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """The values that a field may have."""

    kind: str  # text, texts, whole, number, flag, object
    help: str
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def read(self, name: str, value: Any) -> Any:
        """Return the checked value; lists become tuples."""
        found = getattr(self, f"_{self.kind}")(value)
        if found is None or (self.choices and found not in self.choices):
            raise ApiError(422, f"`{name}` must be {self.wanted}.", name)
        return found

    @property
    def wanted(self) -> str:
        """The rule in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        noun = {
            "text": TEXT, "texts": f"{TEXT} or a list of these", "whole": "a whole number", "number": "a number",
            "flag": "true or false", "object": "an object",
        }[self.kind]  # fmt: skip
        if self.kind == "texts" and self.most < math.inf:
            return f"{noun}, at most {self.most:g}"
        bounds = {"at least": self.least, "at most": self.most}
        said = " and ".join(f"{side} {bound:g}" for side, bound in bounds.items() if math.isfinite(bound))
        return f"{noun} of {said}" if said else noun

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the field."""
        texts = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        kinds = {"text": "string", "whole": "integer", "number": "number", "flag": "boolean", "object": "object"}
        found: dict[str, Any] = {"anyOf": texts} if self.kind == "texts" else {"type": kinds[self.kind]}
        bounds = {"minimum": self.least, "maximum": self.most} if self.kind in ("whole", "number") else {}
        found |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
        return found | ({"enum": list(self.choices)} if self.choices else {}) | {"description": self.help}

    def _text(self, value: Any) -> str | None:
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            return None
        return None if any("\ud800" <= c <= "\udfff" for c in value) else value  # halves of characters

    def _texts(self, value: Any) -> tuple[str, ...] | None:
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not 1 <= len(found) <= self.most or any(self._text(one) is None for one in found):
            return None
        return tuple(found)

    def _whole(self, value: Any) -> int | None:
        number = self._number(value)
        return int(value) if number is not None and number.is_integer() else None

    def _number(self, value: Any) -> float | None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and self.least <= value <= self.most
        return float(value) if good else None

    def _flag(self, value: Any) -> bool | None:
        return value if isinstance(value, bool) else None

    def _object(self, value: Any) -> dict[str, Any] | None:
        return value if isinstance(value, dict) else None


def entry(
    kind: str, help: str, default: Any = None, *, least: float = -math.inf, most: float = math.inf,
    choices: Sequence[str] = (), required: bool = False,
) -> Any:  # fmt: skip
    """Declare a field of a request."""
    rule = Rule(kind, help, least, most, tuple(choices))
    return dataclasses.field(default=default, metadata={"rule": rule, "required": required})


def rules(cls: type) -> dict[str, Rule]:
    """Return the rules of a request's fields."""
    return {field.name: field.metadata["rule"] for field in dataclasses.fields(cls)}


def required(cls: type) -> list[str]:
    """Return the names of the fields that a request must have."""
    return [field.name for field in dataclasses.fields(cls) if field.metadata["required"]]


def read(cls: type[T], body: Any) -> T:
    """Return a request from its JSON body; null means absent."""
    if not isinstance(body, dict):
        raise ApiError(422, "The body must be a JSON object.")
    known, values = rules(cls), {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            values[name] = known[name].read(name, value)
        elif name not in NEUTRAL:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}."
            raise ApiError(422, f"There is no field `{name[:80]}`: {hint}", name[:80])
        elif NEUTRAL[name] and value not in NEUTRAL[name]:
            raise meaningless(name, "the models of this server")
    for name in required(cls):
        if name not in values:
            raise ApiError(422, f"The field `{name}` is missing.", name)
    return cls(**values)


def meaningless(name: str, title: str) -> ApiError:
    """Return the error for a field that a model has no use for."""
    return ApiError(422, f"`{name}` has no meaning for {title}: leave it out.", name, "unsupported_parameter")
