"""Held-out text of a model, packed like its training text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jpeg_dlm.api import Model, load
from jpeg_dlm.errors import DataError
from jpeg_dlm.evaluation.sources import ModelSource
from jpeg_dlm.machine.cache import cache_dir
from jpeg_dlm.machine.collectives import on_main
from jpeg_dlm.machine.console import Console
from jpeg_dlm.results.resumable import key_of
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.corpora import bring
from jpeg_dlm.text.prepare import prepare


def is_prepared(folder: Path) -> bool:
    return (folder / "index.json").is_file()


def heldout_blocks(model: Model, source: str | None, console: Console) -> Blocks:
    """Return the held-out part of `source`, or of the model's training corpus; prepare raw text in the cache."""
    data = replace(model.config.data, source=source or model.config.data.source)
    folder = Path(data.source)
    if not is_prepared(folder):
        # With the model's tokenizer and the same split by document, text held out in training is held out here too.
        # Systems with the same tokenizer may pack rows differently, so the name depends on every option.
        key = key_of(data.options() | {"fingerprint": model.tokenizer.fingerprint})
        folder = cache_dir() / "prepared" / f"{folder.name}-{data.token_len}-{key[:16]}"

        def make() -> None:
            bring(data.source, folder, console)
            with console.progress("Preparing text", "bytes") as progress:
                prepare(data, folder, progress, model.tokenizer)

        on_main(make)
    blocks = Blocks(folder, "heldout")
    if (blocks.index["tokenizer"], blocks.token_len) != (model.tokenizer.fingerprint, data.token_len):
        raise DataError(f"'{folder}' was prepared for another model: name the text itself with --data.")
    blocks.verify()
    return blocks


def names_of(paths: Sequence[Path | None]) -> list[str]:
    """Return a short name for each model, or its whole path if that is ambiguous."""
    names = [path.resolve().name if path else "bundled" for path in paths]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def model_sources(
    paths: Sequence[Path | None], device: str | None, batch: int, data: str | None, console: Console
) -> list[ModelSource]:
    """Load models with their held-out text; None is the bundled model."""
    found = []
    for path, name in zip(paths, names_of(paths), strict=True):
        model = load(path, device)
        found.append(ModelSource(model, name, batch, heldout_blocks(model, data, console), path=path))
    return found
