"""A finished preparation: its summary, and the check that it matches the requested data and can be reused."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jpeg_dlm.config import DataConfig
from jpeg_dlm.errors import DataError
from jpeg_dlm.text.blocks import read_index
from jpeg_dlm.text.corpora import open_corpus
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.wording import counted

SPLITS = ("train", "heldout")
UNCOMPARED = ("cache_features",)  # options that do not change the blocks


@dataclass(frozen=True)
class Prepared:
    """A finished preparation."""

    path: Path
    train_rows: int
    heldout_rows: int
    token_len: int
    vocab_size: int
    tokenizer: str  # fingerprint
    reused: bool
    note: str = field(default="", compare=False)  # remarks on fields, when they were just read, and on the split


def reuse(data: DataConfig, out: Path, tokenizer: TextTokenizer | None) -> Prepared | None:
    """Return the finished preparation in `out`, or None when there is none; raise `DataError` when it does not match."""
    if not (out / "index.json").is_file():
        return None
    index = read_index(out)
    old, new = {"field": ""} | index["data"], asdict(data)  # `DataConfig.options` leaves out an empty field
    packing = ("packing",) if index.get("given_rows") else ()  # determined from the rows, not an option
    for name in new:
        if name not in (*UNCOMPARED, *packing) and old.get(name, new[name]) != new[name]:  # newer options are not in the index
            raise DataError(
                f"'{out}' was prepared with data.{name} {old[name]!r}, not {new[name]!r}: name another folder or delete it."
            )
    if tokenizer and tokenizer.fingerprint != index["tokenizer"]:
        raise DataError(f"'{out}' was prepared with another tokenizer: name another folder or delete it.")
    if _changed(data, index["source"]):
        raise DataError(f"The text '{data.source}' has changed since '{out}' was prepared: delete it or name another folder.")
    return describe(out, index, reused=True)


def _changed(data: DataConfig, fingerprint: str) -> bool:
    if not fingerprint.startswith(("files:", "hub:")):
        return False  # a named corpus: comparing would need a download
    try:
        return open_corpus(data.source).fingerprint != fingerprint
    except DataError:
        return False  # the text is gone, but its blocks remain


def describe(out: Path, index: dict[str, Any], reused: bool) -> Prepared:
    """Return a summary of the preparation in `out`, read from its `index`."""
    rows = {name: index["splits"][name]["rows"] for name in SPLITS}
    facts = index["token_len"], index["vocab_size"], index["tokenizer"]
    return Prepared(out, rows["train"], rows["heldout"], *facts, reused, _note(index))


def _note(index: dict[str, Any]) -> str:
    """Return sentences about documents that are left out or split between both parts, or "" when there are none."""
    splits = [index["splits"][name] for name in SPLITS]
    sentences = []
    unknown = sum(split.get("left_out", 0) for split in splits)
    if unknown:
        sentences.append(f"{counted(unknown, 'document')} with words outside the vocabulary {_are(unknown)} left out.")
    long = index.get("long_documents", 0)
    if long:
        train, heldout = (split["rows"] for split in splits)
        sentences.append(
            f"{counted(long, 'document')} {_are(long)} longer than all the text to hold out, so parts of long documents are "
            f"held out ({heldout / max(1, train + heldout):.1%} of the blocks)."
        )
    return " ".join(sentences)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
