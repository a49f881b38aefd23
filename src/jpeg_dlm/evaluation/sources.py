"""Sources of texts: a model that is sampled once per seed, or sample files of any program, one per seed."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from jpeg_dlm.api import Model
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.encoders.frozen import tensors_sha256
from jpeg_dlm.errors import DataError, JpegDlmError
from jpeg_dlm.evaluation.samples import REAL, SampleFile, read_samples
from jpeg_dlm.machine.collectives import shared
from jpeg_dlm.methods.base import Batch, Trainable
from jpeg_dlm.text.blocks import Blocks


@dataclass(frozen=True)
class SourceTexts:
    """Texts, the token ids of their own model (if known), and the seconds that sampling took, summed over processes."""

    texts: list[str]
    ids: list[list[int]] | None = None
    seconds: float | None = None
    cut_lines: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


@dataclass(frozen=True)
class Real:
    """Real texts; those from a file differ in length from generated ones and must be cut for a fair perplexity."""

    texts: SourceTexts
    origin: str
    same_length: bool


def batches(n: int, size: int) -> list[range]:
    """Return the rows 0 to n - 1 in batches, which processes share whole: other sizes would change the last bits."""
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


class Source(Protocol):
    """One system under evaluation."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model | None: ...

    def runs(self, seeds: Sequence[int]) -> list[int]:
        """Return the numbers of its runs: seeds or files."""
        ...

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        """Return everything that the texts of a run depend on."""
        ...

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        """Return the texts of a run."""
        ...

    def real(self, n: int, specials: bool = False) -> Real:
        """Return real texts for comparison, in the same form."""
        ...


class ModelSource:
    """A model; `heldout` holds real blocks of its own length, and the file `reference`, if given, replaces them."""

    def __init__(
        self, model: Model, name: str, batch: int, heldout: Blocks | None = None, reference: SampleFile | None = None,
        path: Path | None = None,
    ) -> None:  # fmt: skip
        self.model, self.name, self.batch, self.heldout, self.reference = model, name, batch, heldout, reference
        self.path = path  # None for the bundled model
        self.sha256 = tensors_sha256(model.method.export_state())

    def runs(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    @property
    def blocks(self) -> Blocks:
        """The held-out text, of which there must be some."""
        if not self.heldout:
            raise DataError(f"There is no held-out text for '{self.name}': name its text or prepared folder with --data.")
        return self.heldout

    def options(self, sampler: dict[str, Any]) -> Any:
        """Return the model's sampler options, changed by `sampler`."""
        return self.model.sampler_options(**sampler)

    def evaluations(self, sampler: dict[str, Any]) -> int:
        """Return how many network evaluations a text takes."""
        return self.options(sampler).evaluations(self.model.config.data.token_len)

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        return {
            "checkpoint_sha256": self.sha256,
            "tokenizer": self.model.tokenizer.fingerprint,
            "seed": run,
            "sampler": to_dict(self.options(sampler)),
            "dtype": self.model.dtype,
            "device": self.model.method.device.type,
            # Do not reuse texts that earlier versions stored without cutting rows at their end.
            **({"ends": True} if self.model.config.data.rows_end else {}),
        }

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> SourceTexts:
        def sample(rows: range) -> tuple[Tensor, float]:
            began = time.perf_counter()
            tokens = self.model.sample(len(rows), seed=run, first=rows.start, batch=self.batch, **sampler)
            return tokens, time.perf_counter() - began

        # The released protocol draws its texts in order, so that one process writes all.
        released = getattr(self.options(sampler), "protocol", "default") == "released"
        parts, seconds = zip(*shared(batches(n or 1, n or 1 if released else self.batch), sample), strict=True)
        return self.texts(torch.cat(parts), specials, sum(seconds))

    def texts(self, tokens: Tensor, specials: bool, seconds: float | None = None) -> SourceTexts:
        """Decode rows; with `specials`, keep special tokens by name, as the code of MDLM and Duo does."""
        rows = self.model.text_ids(tokens)
        if not specials:
            return SourceTexts(self.model.to_text(tokens), rows, seconds)
        backend = self.model.tokenizer._backend  # `TextTokenizer.decode` drops special tokens
        return SourceTexts([backend.decode(row, skip_special_tokens=False) for row in rows], rows, seconds)

    def real(self, n: int, specials: bool = False) -> Real:
        if self.reference is not None:
            texts = self.reference.texts[:n]
            ids = [self.model.tokenizer.encode(text) for text in texts]
            return Real(SourceTexts(texts, ids), self.reference.origin, same_length=False)
        if not self.heldout:
            raise DataError("There is no held-out text: prepare more of it, or name real texts with --reference.")
        rows = self.heldout.rows(list(range(min(n, len(self.heldout)))))
        return Real(self.texts(rows, specials), f"held-out {self.heldout.fingerprint[:12]}", same_length=True)

    def reconstruction(self, n: int, batch: int = 64) -> float | None:
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
            found = codec.reconstruction(Batch(tokens, heldout.mask(tokens)), self.model.config.sampler)
            return None if found is None else float(found) * len(tokens)

        parts = [part for part in shared(batches(n, batch), kept) if part is not None]
        return sum(parts) / n if parts else None


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
        return SourceTexts(file.texts[:n], file.token_ids[:n] if file.token_ids else None, cut_lines=file.cut_lines)

    def real(self, n: int, specials: bool = False) -> Real:
        if self.reference is not None:
            return Real(SourceTexts(self.reference.texts[:n]), self.reference.origin, same_length=False)
        own = self.files[0].references
        if own is None:
            raise DataError(f"There is no real text to compare '{self.name}' with: name some with --reference FILE.")
        return Real(SourceTexts(own[:n]), f"references in {self.files[0].path.name}", same_length=False)


_SEED = re.compile(r"[-_.]?seed[-_]?\d+", re.IGNORECASE)


def file_sources(paths: Sequence[Path], reference: Path | None) -> list[FileSource]:
    """Group files by system: names that differ only in `seed<number>` are runs of one system."""
    groups: dict[tuple[Path, str], list[SampleFile]] = {}
    for path in paths:
        name = _SEED.sub("", path.stem) or path.stem
        groups.setdefault((path.parent, name), []).append(read_samples(path))
    real = read_samples(reference, REAL) if reference else None
    return [FileSource(name, files, real) for (_, name), files in groups.items()]
