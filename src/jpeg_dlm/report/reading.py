"""Reading files that may be missing, damaged or of another version: what cannot be read becomes a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jpeg_dlm.errors import JpegDlmError
from jpeg_dlm.report.page_blocks import Details, Facts, Figure, Note, code
from jpeg_dlm.results.table import Span, Table

TEXT_BYTES = 4 << 20  # of a Markdown or sample file (assumed): a page with more is no longer read by anyone
PNG_BYTES = 16 << 20  # of a picture (assumed): ours have a hundredth of it

T = TypeVar("T")


@dataclass
class Trouble:
    """Sentences about what could not be shown, in the order in which it was met."""

    sentences: list[str] = field(default_factory=list)

    def attempt(self, what: str, make: Callable[[], T], otherwise: T) -> T:
        """Return what `make` gives; if it fails, return `otherwise` and keep a sentence."""
        try:
            return make()
        except (JpegDlmError, OSError) as error:
            reason = str(error) if isinstance(error, JpegDlmError) else error.strerror or type(error).__name__
        except Exception as error:  # the content is anyone's: it may break any assumption, but never the report
            reason = str(error) if type(error) is ValueError else f"its content is not as expected ({type(error).__name__})"
        self.sentences.append(f"{what} cannot be shown: {reason.rstrip('.')}.")
        return otherwise

    def notes(self) -> list[Note]:
        return [Note(sentence) for sentence in self.sentences]


def read_text(path: Path) -> str:
    """A text file of bounded size; bytes that are no text are replaced."""
    return _read(path, TEXT_BYTES).decode("utf-8", "replace")


def read_figure(path: Path, alt: str, caption: str) -> Figure:
    """A picture, refused unless it is a whole PNG."""
    return Figure(_read(path, PNG_BYTES), alt, caption)


def _read(path: Path, most: int) -> bytes:
    with open(path, "rb") as handle:
        data = handle.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it is larger than {most >> 20} MB")
    return data


def shown(value: Any) -> str:
    """A plain value as a table shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)


def facts(pairs: Iterable[tuple[str, Any]]) -> Facts:
    """Return the pairs that have a value; text that is already styled stays so."""
    return Facts(tuple((name, v if isinstance(v, Span) else shown(v)) for name, v in pairs if v not in (None, "")))


def options_table(label: str, options: Mapping[str, Any]) -> Table:
    return Table(label, ("option", "value"), tuple((code(name), shown(value)) for name, value in options.items()))


def folded_options(summary: str, options: Mapping[str, Any]) -> Details:
    return Details(summary, (options_table(summary, options),))
