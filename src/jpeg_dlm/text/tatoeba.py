"""Everyday English sentences of Tatoeba, each once: a line has the sentence, a translation and the attribution."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jpeg_dlm.errors import DataError
from jpeg_dlm.text.tokenizer import collapse

FRENCH, SPANISH = "fra-eng.zip", "spa.txt"  # in the carrier package
FRENCH_MEMBER = "fra.txt"


def pair_lines(folder: Path) -> Iterator[str]:
    """Yield the lines of both files of pairs."""
    try:
        with zipfile.ZipFile(folder / FRENCH) as bundle, bundle.open(FRENCH_MEMBER) as raw:
            yield from io.TextIOWrapper(raw, encoding="utf-8")
        with (folder / SPANISH).open(encoding="utf-8") as file:
            yield from file
    except (OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise DataError(f"The sentences in '{folder}' cannot be read ({error}): delete it to fetch them again.") from error


def english(lines: Iterable[str]) -> Iterator[str]:
    """Yield the English sentences of pairs, each once."""
    seen: set[str] = set()
    for line in lines:
        text = collapse(line.partition("\t")[0])
        if text and text not in seen:
            seen.add(text)
            yield text
