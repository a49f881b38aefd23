"""A finished preparation: what it tells, and whether it is the one that is asked for again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
    note: str = ""  # what a user should know of the split


def reuse(data: DataConfig, out: Path, tokenizer: TextTokenizer | None) -> Prepared | None:
    """The finished preparation in `out` when it is the one asked for; None when there is none yet."""
    if not (out / "index.json").is_file():
        return None
    index = read_index(out)
    old, new = index["data"], asdict(data)
    packing = ("packing",) if index.get("given_rows") else ()  # found in the rows, not asked for
    for name in new:
        if name not in (*UNCOMPARED, *packing) and old.get(name, new[name]) != new[name]:  # what it does not name came later
            raise DataError(
                f"'{out}' was prepared with data.{name} {old[name]!r}, not {new[name]!r}: name another folder or delete it."
            )
    if tokenizer and tokenizer.fingerprint != index["tokenizer"]:
        raise DataError(f"'{out}' was prepared with another tokenizer: name another folder or delete it.")
    if _changed(data, index["source"]):
        raise DataError(f"The text '{data.source}' has changed since '{out}' was prepared: delete it or name another folder.")
    return describe(out, index, reused=True)


def _changed(data: DataConfig, fingerprint: str) -> bool:
    if not fingerprint.startswith("files:"):
        return False  # pinned or named: nothing to compare without a download
    try:
        return open_corpus(data.source).fingerprint != fingerprint
    except DataError:
        return False  # the text is no longer there; its blocks are


def describe(out: Path, index: dict[str, Any], reused: bool) -> Prepared:
    """The preparation in `out` that `index` describes."""
    rows = {name: index["splits"][name]["rows"] for name in SPLITS}
    facts = index["token_len"], index["vocab_size"], index["tokenizer"]
    return Prepared(out, rows["train"], rows["heldout"], *facts, reused, _note(index))


def _note(index: dict[str, Any]) -> str:
    """A sentence on documents that are in both parts; empty where all are whole."""
    long = index.get("long_documents", 0)
    if not long:
        return ""
    train, heldout = (index["splits"][name]["rows"] for name in SPLITS)
    return (
        f"{counted(long, 'document')} {'is' if long == 1 else 'are'} longer than all the text to hold out, so stretches inside "
        f"are held out ({heldout / max(1, train + heldout):.1%} of the blocks)."
    )
