"""Where texts come from: a model that writes them seed by seed, or files that any program wrote, one per seed."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from jpeg_dlm.api import Model
from jpeg_dlm.config_io import to_dict
from jpeg_dlm.encoders.base import tensors_sha256
from jpeg_dlm.errors import DataError, JpegDlmError
from jpeg_dlm.evaluation.samples import REAL, SampleFile, read_samples
from jpeg_dlm.methods.base import Batch, Method
from jpeg_dlm.text.blocks import Blocks


@dataclass(frozen=True)
class Texts:
    """Texts, the ids that their own model wrote (where known), and how long the writing took."""

    texts: list[str]
    ids: list[list[int]] | None = None
    seconds: float | None = None
    cut_lines: int = 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


@dataclass(frozen=True)
class Real:
    """Real texts; those from a file are not of the generated length and have to be cut for a fair perplexity."""

    texts: Texts
    origin: str
    same_length: bool


class Source(Protocol):
    """One system under evaluation."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model | None: ...

    def runs(self, seeds: Sequence[int]) -> list[int]:
        """The numbers of its runs: seeds, or files."""
        ...

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        """Everything the texts of a run depend on."""
        ...

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> Texts:
        """The texts of a run."""
        ...

    def real(self, n: int, specials: bool = False) -> Real:
        """Real text to hold beside, in the same form."""
        ...


class ModelSource:
    """A model; `heldout` are real blocks of its own length, `reference` a file of texts that takes their place.

    `path` is where the model was loaded from: None for the bundled one.
    """

    def __init__(
        self, model: Model, name: str, batch: int, heldout: Blocks | None = None, reference: SampleFile | None = None,
        path: Path | None = None,
    ) -> None:  # fmt: skip
        self.model, self.name, self.batch, self.heldout, self.reference = model, name, batch, heldout, reference
        self.path = path
        self.sha256 = tensors_sha256(model.method.export_state())

    def runs(self, seeds: Sequence[int]) -> list[int]:
        return list(seeds)

    def options(self, sampler: dict[str, Any]) -> Any:
        """The sampler's options with these in place."""
        return self.model.sampler_options(**sampler)

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        options = self.options(sampler)
        released = getattr(options, "protocol", "default") == "released"
        return {
            "checkpoint_sha256": self.sha256,
            "tokenizer": self.model.tokenizer.fingerprint,
            "seed": run,
            "sampler": to_dict(options),
            "batch": self.batch if released else None,  # else it changes nothing
            "dtype": self.model.dtype,
            "device": self.model.method.device.type,
            # Texts that were kept before rows were ended are not used.
            **({"ends": True} if self.model.config.data.rows_end else {}),
        }

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> Texts:
        began = time.perf_counter()
        tokens = self.model.sample(n or 1, seed=run, batch=self.batch, **sampler)
        seconds = time.perf_counter() - began
        return self.texts(tokens, specials, seconds)

    def texts(self, tokens: Tensor, specials: bool, seconds: float | None = None) -> Texts:
        """Rows as text; with `specials` their special tokens stand by name, as the code of MDLM and Duo passes it on."""
        rows = self.model.text_ids(tokens)
        if not specials:
            return Texts(self.model.to_text(tokens), rows, seconds)
        backend = self.model.tokenizer._backend  # its own `decode` drops them, as every other use wants
        return Texts([backend.decode(row, skip_special_tokens=False) for row in rows], rows, seconds)

    def real(self, n: int, specials: bool = False) -> Real:
        if self.reference is not None:
            texts = self.reference.texts[:n]
            ids = [self.model.tokenizer.encode(text) for text in texts]
            return Real(Texts(texts, ids), f"{self.reference.path.name} {self.reference.sha256[:12]}", same_length=False)
        if self.heldout is None or len(self.heldout) == 0:
            raise DataError("There is no held-out text: prepare more of it, or name real texts with --reference.")
        rows = self.heldout.rows(list(range(min(n, len(self.heldout)))))
        return Real(self.texts(rows, specials), f"held-out {self.heldout.fingerprint[:12]}", same_length=True)

    def reconstruction(self, n: int, batch: int = 64) -> float | None:
        """Share of held-out tokens that come back through the method's own codec.

        None for a method that has none, on a machine without the text encoder, and without held-out text.
        """
        if type(self.model.method).reconstruction is Method.reconstruction:
            return None
        if self.heldout is None or len(self.heldout) == 0:
            return None
        try:
            codec = self.model.complete_method()
        except JpegDlmError:
            return None
        options = {"w": self.model.config.sampler.w} if codec.latent_sampler is not None else {}
        n, kept = min(n, len(self.heldout)), 0.0
        for start in range(0, n, batch):
            tokens = self.heldout.rows(list(range(start, min(start + batch, n)))).to(codec.device)
            found = codec.reconstruction(Batch(tokens, self.heldout.mask(tokens)), **options)
            if found is None:
                return None
            kept += float(found) * len(tokens)
        return kept / n


class FileSource:
    """Files of one system; each counts as one seed."""

    model: Model | None = None

    def __init__(self, name: str, files: Sequence[SampleFile], reference: SampleFile | None) -> None:
        self.name, self.files, self.reference = name, files, reference

    def runs(self, seeds: Sequence[int]) -> list[int]:
        return list(range(len(self.files)))

    def identity(self, run: int, sampler: dict[str, Any]) -> dict[str, Any]:
        return {"file": self.files[run].path.name, "file_sha256": self.files[run].sha256}

    def write(self, run: int, n: int | None, sampler: dict[str, Any], specials: bool) -> Texts:
        file = self.files[run]
        return Texts(file.texts[:n], file.token_ids[:n] if file.token_ids else None, cut_lines=file.cut_lines)

    def real(self, n: int, specials: bool = False) -> Real:
        if self.reference is not None:
            return Real(
                Texts(self.reference.texts[:n]), f"{self.reference.path.name} {self.reference.sha256[:12]}", same_length=False
            )
        own = self.files[0].references
        if own is None:
            raise DataError(
                f"The perplexity of '{self.name}' says nothing without real text beside it: name some with --reference FILE."
            )
        return Real(Texts(own[:n]), f"references in {self.files[0].path.name}", same_length=False)


_SEED = re.compile(r"[-_.]?seed[-_]?\d+", re.IGNORECASE)


def file_sources(paths: Sequence[Path], reference: Path | None) -> list[FileSource]:
    """Files that differ only in `seed<number>` of their names are runs of one system."""
    groups: dict[tuple[Path, str], list[SampleFile]] = {}
    for path in paths:
        name = _SEED.sub("", path.stem) or path.stem
        groups.setdefault((path.parent, name), []).append(read_samples(path))
    real = read_samples(reference, REAL) if reference else None
    return [FileSource(name, files, real) for (_, name), files in groups.items()]
