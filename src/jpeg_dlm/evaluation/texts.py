"""Sources of texts: a model sampled once per seed, sample files of any program, and baselines of real text."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from jpeg_dlm.api import Model, load
from jpeg_dlm.encoders.frozen import tensors_sha256
from jpeg_dlm.evaluation.cache import key_of
from jpeg_dlm.evaluation.metrics import shuffle_words, training_rows
from jpeg_dlm.methods.base import Batch, Trainable
from jpeg_dlm.options import to_dict
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.distributed import on_main, shared
from jpeg_dlm.util.errors import DataError, JpegDlmError
from jpeg_dlm.util.files import cache_dir
from jpeg_dlm.util.rng import generator


@dataclass(frozen=True)
class SourceTexts:
    """Texts, the token ids of their own model (if known), and the seconds that sampling took, summed over processes."""

    texts: list[str]
    ids: list[list[int]] | None = None
    seconds: float | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()

    @property
    def throughput(self) -> dict[str, float] | None:
        """Speed of sampling; `jpeg-dlm benchmark` measures it by the paper's rule instead."""
        if not self.seconds:
            return None
        counts = {"texts_per_second": len(self.texts), "tokens_per_second": sum(map(len, self.ids or []))}
        return {"seconds": self.seconds} | {name: count / self.seconds for name, count in counts.items()}


@dataclass(frozen=True)
class Real:
    """Real texts; those from a file differ in length from generated ones and must be cut for a fair perplexity."""

    texts: SourceTexts
    origin: str
    same_length: bool


def batches(n: int, size: int) -> list[range]:
    """Return the rows 0 to n - 1 in batches, which processes share whole: other sizes would change the last bits."""
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


class ModelSource:
    """A model; `heldout` holds real blocks of its own length, and the file `reference`, if given, replaces them."""

    def __init__(
        self, model: Model, name: str, batch: int, heldout: Blocks | None = None, reference: SampleFile | None = None
    ) -> None:
        self.model, self.name, self.batch, self.heldout, self.reference = model, name, batch, heldout, reference
        self.sha256 = tensors_sha256(model.method.export_state())

    def runs(self, seeds: Sequence[int]) -> list[int]:
        """Return the numbers of its runs: seeds, or files."""
        return list(seeds)

    @property
    def blocks(self) -> Blocks:
        """The held-out text, of which there must be some."""
        if not self.heldout:
            raise DataError(
                f"There is no held-out text for '{self.name}': name some with --data, or real texts with --reference."
            )
        return self.heldout

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        """Return everything that the texts of a run depend on."""
        return {
            "checkpoint_sha256": self.sha256,
            "tokenizer": self.model.tokenizer.fingerprint,
            "seed": run,
            "sampler": to_dict(self.model.sampler_options(**sampler)),
            "dtype": self.model.dtype,
            "device": self.model.method.device.type,
            **({"sources": self.blocks.fingerprint} if self.model.config.data.source_len else {}),
        }

    def about(self, sampler: dict[str, Any], n: int, **more: Any) -> dict[str, Any]:
        """Return what tells the results of a task on n held-out texts from others."""
        options = self.model.sampler_options(**sampler)
        return {
            "name": self.name,
            "title": self.model.method.title,
            "heldout": self.blocks.fingerprint,
            "n": n,
            **more,
            "sampler": to_dict(options),
            "sampler_label": options.label(),
        }

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        """Return the texts of a run; those of a model of pairs are targets of the sources of held-out rows, in order."""

        def sample(rows: range) -> tuple[Tensor, float]:
            pairs = self.model.config.data.source_len > 0
            source = self.blocks.sources([row % len(self.blocks) for row in rows]) if pairs else None
            began = time.perf_counter()
            tokens = self.model.sample(len(rows), seed=run, first=rows.start, batch=self.batch, source=source, **sampler)
            return tokens, time.perf_counter() - began

        parts, seconds = zip(*shared(batches(n or 1, self.batch), sample), strict=True)
        return self.texts(torch.cat(parts), specials, sum(seconds))

    def texts(self, tokens: Tensor, specials: bool, seconds: float | None = None) -> SourceTexts:
        """Decode rows; with `specials`, keep special tokens by name, as the code of MDLM and Duo does."""
        tokenizer = self.model.tokenizer
        around = {tokenizer.eos_id, tokenizer.pad_id} if self.model.config.data.rows_end else set()
        rows = [[i for i in row if i not in around] for row in self.model.ended(tokens).tolist()]
        texts = list(map(tokenizer.decode_with_specials, rows)) if specials else self.model.to_text(tokens)
        return SourceTexts(texts, rows, seconds)

    def real(self, n: int, specials: bool = False, first: int = 0) -> Real:
        """Return real texts for comparison, in the same form, from the `first` on."""
        if self.reference is not None:
            texts = self.reference.texts[first : first + n]
            ids = [self.model.tokenizer.encode(text) for text in texts]
            return Real(SourceTexts(texts, ids), self.reference.origin, same_length=False)
        rows = self.blocks.rows(range(len(self.blocks))[first : first + n])
        return Real(self.texts(rows, specials), f"held-out {self.blocks.fingerprint[:12]}", same_length=True)

    def reconstruction(self, n: int) -> float | None:
        """Return the share of held-out tokens that the codec reconstructs; None without codec, encoder or held-out text."""
        if type(self.model.method).reconstruction is Trainable.reconstruction or not self.heldout:
            return None
        try:
            codec = self.model.complete_method()
        except JpegDlmError:
            return None
        heldout, n = self.heldout, min(n, len(self.heldout))

        def kept(rows: range) -> float | None:
            tokens = heldout.rows(rows).to(codec.device)
            share = codec.reconstruction(Batch(tokens, heldout.mask(tokens)), self.model.config.sampler)
            return None if share is None else float(share) * len(tokens)

        parts = [part for part in shared(batches(n, 64), kept) if part is not None]
        return sum(parts) / n if parts else None


# ---------------------------------------------------------------- sample files

SUFFIXES = (".txt", ".jsonl")
LARGEST_ID = 1 << 31
GENERATED, REAL = ("prediction", "text", "generated"), ("reference", "text", "prediction")


@dataclass(frozen=True)
class SampleFile:
    """The texts of one file, with their token ids and references if every line has them."""

    path: Path
    sha256: str
    texts: list[str]
    token_ids: list[list[int]] | None
    references: list[str] | None

    @property
    def origin(self) -> str:
        """The file and its content, as results name them."""
        return f"{self.path.name} {self.sha256[:12]}"


def is_samples(path: Path) -> bool:
    """Return True if a path names a sample file, not a model."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def read_samples(path: Path, fields: Sequence[str] = GENERATED) -> SampleFile:
    """Read a text or JSON value per line; of a JSON object, the first of `fields` that is present, else the first string."""
    if not is_samples(path):
        raise DataError(f"'{path}' is not a file of texts: give .txt with one text per line, or .jsonl.")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read '{path}': {error.strerror or error}.") from error
    rows: list[Any] = []
    texts: list[str] = []
    # Only a line feed ends a line, because texts may contain other separators.
    for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n"), 1):
        try:
            row: Any = line.decode("utf-8").removesuffix("\r")
            if path.suffix.lower() == ".jsonl":
                if not row.strip():
                    continue
                row = json.loads(row)
        except (ValueError, RecursionError) as error:
            form = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            raise DataError(f"Line {number} of '{path}' is not {form}: repair or remove it.") from error
        rows.append(row)
        texts.append(_text(row, number, path, fields))
    if not any(text.strip() for text in texts):
        raise DataError(f"'{path}' holds no text: every line is blank.")
    return SampleFile(path, hashlib.sha256(raw).hexdigest(), texts, _all_ids(rows), _all_references(rows))


def _text(row: Any, number: int, path: Path, fields: Sequence[str]) -> str:
    if isinstance(row, dict):
        named = [row[name] for name in fields if isinstance(row.get(name), str)]
        row = named[0] if named else next((v for v in row.values() if isinstance(v, str)), None)
    if not isinstance(row, str):
        raise DataError(f"Line {number} of '{path}' holds no text: give a string, or an object with '{fields[0]}'.")
    return row.encode("utf-8", "replace").decode("utf-8")  # JSON can contain lone surrogates, which no tokenizer accepts


def _all_ids(rows: Sequence[Any]) -> list[list[int]] | None:
    ids: list[Any] = [row.get("token_ids") if isinstance(row, dict) else None for row in rows]
    good = all(isinstance(one, list) and all(type(i) is int and 0 <= i < LARGEST_ID for i in one) for one in ids)
    return ids if good else None


def _all_references(rows: Sequence[Any]) -> list[str] | None:
    pairs = all(isinstance(row, dict) and any(name in row for name in GENERATED) for row in rows)
    references: list[Any] = [row.get("reference") for row in rows] if pairs else [None]
    return references if all(isinstance(text, str) and text.strip() for text in references) else None


class FileSource:
    """Sample files of one system; each counts as one seed."""

    model: Model | None = None

    def __init__(self, name: str, files: Sequence[SampleFile], reference: SampleFile | None) -> None:
        self.name, self.files, self.reference = name, files, reference

    def runs(self, seeds: Sequence[int]) -> list[int]:
        return list(range(len(self.files)))

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        return {"file": self.files[run].path.name, "file_sha256": self.files[run].sha256}

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        file = self.files[run]
        return SourceTexts(file.texts[:n], file.token_ids[:n] if file.token_ids else None)

    def real(self, n: int, specials: bool = False, first: int = 0) -> Real:
        if self.reference is not None:
            return Real(SourceTexts(self.reference.texts[first : first + n]), self.reference.origin, same_length=False)
        own = self.files[0].references
        if own is None:
            raise DataError(f"There is no real text to compare '{self.name}' with: name some with --reference FILE.")
        return Real(SourceTexts(own[first : first + n]), f"references in {self.files[0].path.name}", same_length=False)


_SEED = re.compile(r"[-_.]?seed[-_]?\d+", re.IGNORECASE)


def file_sources(paths: Sequence[Path], reference: Path | None) -> list[FileSource]:
    """Group files by system: names that differ only in `seed<number>` are runs of one system."""
    groups: dict[tuple[Path, str], list[SampleFile]] = {}
    for path in paths:
        name = _SEED.sub("", path.stem) or path.stem
        groups.setdefault((path.parent, name), []).append(read_samples(path))
    real = read_samples(reference, REAL) if reference else None
    return [FileSource(name, files, real) for (_, name), files in groups.items()]


def is_prepared(folder: Path) -> bool:
    return (folder / "index.json").is_file()


def heldout_blocks(model: Model, source: str | None, console: Console) -> Blocks:
    """Return the held-out part of `source`, or of the model's training corpus; prepare raw text in the cache."""
    data = replace(model.config.data, source=source or model.config.data.source)
    folder = Path(data.source)
    if not is_prepared(folder):
        # With the model's tokenizer and the same split by document, text held out in training is held out here too.
        # Systems with the same tokenizer may pack rows differently, so the name depends on every option.
        key = key_of(asdict(data) | {"fingerprint": model.tokenizer.fingerprint})
        folder = cache_dir() / "prepared" / f"{folder.name}-{data.token_len}-{key[:16]}"
        on_main(lambda: prepare(data, folder, console, model.tokenizer))
    return prepared_blocks(model, folder, "heldout")


def prepared_blocks(model: Model, folder: Path, split: Literal["train", "heldout"]) -> Blocks:
    """Return a split of a prepared folder, which must be of the model's tokenizer and sizes."""
    blocks, data = Blocks(folder, split), model.config.data
    sizes = (blocks.token_len, blocks.source_len)
    if (blocks.index["tokenizer"], *sizes) != (model.tokenizer.fingerprint, data.token_len, data.source_len):
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
    sources = []
    for path, name in zip(paths, names_of(paths), strict=True):
        model = load(path, device)
        sources.append(ModelSource(model, name, batch, heldout_blocks(model, data, console)))
    return sources


# ---------------------------------------------------------------- baselines

BASELINES: Mapping[str, str] = {"unigram": "tokens by frequency", "words": "words shuffled", "real": "real text"}


class TextBaseline:
    """One of these as a source of texts beside a model, whose tokenizer and held-out text it takes."""

    names = BASELINES

    def __init__(self, kind: str, source: ModelSource) -> None:
        self.kind, self.name = kind, self.names[kind]
        self.source, self.heldout = source, source.blocks
        self.model: Model = source.model

    def runs(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)[:1] if self.kind == "real" else list(seeds)

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        tokenizer = self.model.tokenizer.fingerprint
        return {"anchor": self.kind, "heldout": self.heldout.fingerprint, "tokenizer": tokenizer, "seed": run}

    def real(self, n: int, specials: bool = False, first: int = 0) -> Real:
        return self.source.real(n, specials, first)

    def enough(self, n: int) -> bool:
        """Return True if there are n real texts more than the n with which texts are compared."""
        return len(self.heldout) >= 2 * n

    def others(self, n: int | None) -> Tensor:
        """Return n held-out rows other than those with which texts are compared, if there are so many."""
        n = min(n or 1, len(self.heldout))
        first = n if self.enough(n) else 0
        return self.heldout.rows(range(first, first + n))

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        rows_BL = self.others(n)
        if self.kind == "unigram":
            rows_BL = self.drawn(rows_BL, run)
        texts = self.source.texts(rows_BL, specials)
        if self.kind != "words":
            return texts
        g = generator(run, "words")
        mixed = [shuffle_words(text, g) for text in texts.texts]
        return SourceTexts(mixed, [self.model.tokenizer.encode(text) for text in mixed])

    def drawn(self, rows_BL: Tensor, seed: int) -> Tensor:
        """Return rows of the same lengths with each token drawn by its frequency in the training text."""
        train = Blocks(self.heldout.folder, "train")
        counts_V = torch.bincount(training_rows(train).flatten(), minlength=train.vocab_size).double()
        kept_BL = torch.zeros_like(rows_BL, dtype=torch.bool)
        if train.index["padded"]:
            ends = torch.tensor([train.pad_id, train.index["eos_id"]])
            counts_V[ends] = 0
            kept_BL = torch.isin(rows_BL, ends)
        tokens = torch.multinomial(counts_V, rows_BL.numel(), replacement=True, generator=generator(seed, "unigram"))
        return torch.where(kept_BL, rows_BL, tokens.view_as(rows_BL))


Source = ModelSource | FileSource | TextBaseline  # one system under evaluation
