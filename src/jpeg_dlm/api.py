"""Use from Python: `load()` returns a `Model` that generates, reconstructs, interpolates, encodes and decodes text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch
from torch import Tensor

from jpeg_dlm.arguments import as_texts, check_given, check_latents, check_tokens, counts, real_number, shown, whole_number
from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import override
from jpeg_dlm.continuing import LongTexts, context_blocks
from jpeg_dlm.encoders import FrozenEncoder
from jpeg_dlm.errors import CheckpointError, DataError, JpegDlmError, UsageError
from jpeg_dlm.export.fastest import Form, available_forms, ranked
from jpeg_dlm.export.folder import is_exported, read_exported
from jpeg_dlm.flow.control import Control, Origin
from jpeg_dlm.flow.guides import Guide, contains
from jpeg_dlm.flow.latent_sampler import LatentSampler, Watch, Writer, networks_of
from jpeg_dlm.folders.model_folder import ModelParts, bundled_folder, is_bundled, named_folder, read_model, write_model
from jpeg_dlm.machine.cpu import recall_limit, with_limit
from jpeg_dlm.machine.dist import read_ranks
from jpeg_dlm.methods.base import FREE, Batch, Method, require
from jpeg_dlm.sampling.engine import accelerated
from jpeg_dlm.sampling.given import prompt_row, template_row
from jpeg_dlm.sampling.linear import DTYPES, Dtype
from jpeg_dlm.sampling.sampler import sample_batches
from jpeg_dlm.text.rows import Layout, end_rows, first_copy, layout_of
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.texts import Texts


class Model:
    """A trained model with its tokenizer and encoder, which are loaded when they are first needed."""

    def __init__(self, parts: ModelParts, device: str | torch.device = "cpu") -> None:
        self.parts = parts
        self.config: Config = parts.config
        if parts.trained is not None:
            parts.trained.to(device)
        self.writer: Writer = parts.writer  # what samples: until `accelerate`, as the paper writes it
        self.form: Form | None = None  # that of a writer which is not the trained method
        self._scratch: Any = None  # a temporary folder that must live as long as the model

    def __repr__(self) -> str:
        """Describe the model: system, size and origin."""
        data = self.config.data
        size = 0  # those of an exported model are in its graphs
        if self.parts.trained is not None:  # encoder and target network are frozen
            size = sum(p.numel() for p in self.parts.trained.parameters() if p.requires_grad)
        parameters = f"{size:,} parameters, " if size else ""
        latents = f"{self.config.model.latent_len} latents for " if self.config.rate is not None else ""
        origin = "the package" if is_bundled(self.parts.origin) else repr(str(self.parts.origin))
        return (
            f"<{self.writer.title}: {parameters}{latents}{data.token_len} tokens, vocabulary {data.vocab_size:,}, "
            f"preset {self.config.preset}, {self.dtype} on {self.writer.device}, from {origin}>"
        )

    # ------------------------------------------------------------ generation

    def sample(
        self, n: int = 1, *, seed: int = 0, first: int = 0, batch: int = 64, watch: Watch | None = None,
        given: Tensor | None = None, guide: Guide | None = None, strength: float = 1.0, **sampler: Any,
    ) -> Tensor:  # fmt: skip
        """Token ids (n, L) of samples `first` to `first + n - 1` of `seed`, `ended` where rows end.

        `given` (L), or (n, L) with a row for each, holds ids that samples keep, and -1 elsewhere. `guide` is a
        differentiable function of token logits, `fn(logits_BLV) -> loss_B`, whose loss sampling lowers; `strength` scales
        the moves of guides and given tokens. Keyword arguments are options of the method's sampler; for JPEG-DLM: steps,
        solver, grid, w, protocol, ...
        """
        if guide is not None and not callable(guide):
            raise UsageError(f"A guide is a function fn(logits_BLV) -> loss_B, not {shown(guide)}.")
        strength = real_number(strength, "strength", 0)
        control = Control(guide, strength) if guide is not None or strength != 1 else None
        if given is not None and self.config.data.rows_end and "guides" in self.writer.supports:
            control = replace(control or Control(), end_id=self.tokenizer.eos_id)
        return self._sample(n, seed, first, batch, watch, given, control, sampler)

    def _sample(
        self, n: int, seed: int, first: int, batch: int, watch: Watch | None, given: Tensor | None, control: Control | None,
        sampler: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        n, seed, first, batch = counts(n, seed, first, batch)
        if given is not None:
            check_given(given, n, self.config.data.token_len, self.config.data.vocab_size)
            if self.writer.latent_sampler and self.writer.latent_sampler.known:
                self.complete_method()  # a causal codec encodes what is given
        if control is not None and control.strength != 1:
            require("guides", self.writer)
        options = self.sampler_options(**sampler)
        tokens = torch.cat(list(sample_batches(self.writer, n, options, seed, batch, first, watch, given, control))).cpu()
        return self.ended(tokens, given)

    @property
    def method(self) -> Method:
        """The trained method; a model of exported networks refuses."""
        return self.parts.method

    @property
    def dtype(self) -> str:
        """The type that the writer computes in, as results record it."""
        if self.form is not None:
            name = f"{self.form.dtype} engine" if self.form.runtime == "torch" else self.form.name
            reduced = self.form.dtype != "fp32" and self.writer.device.type == "cpu"
            return with_limit(name) if reduced else name
        if self.parts.trained is None:
            return "float32"
        return str(next(self.parts.trained.parameters()).dtype).removeprefix("torch.")

    @property
    def can_accelerate(self) -> bool:
        return networks_of(self.parts.writer) is not None

    def accelerate(self, dtype: Dtype = "fp32", compile: bool = False) -> Model:
        """Sample with weights prepared as they are now, in this dtype; `compile` fuses what lies between matrix products."""
        if dtype not in DTYPES:
            raise UsageError(f"The dtype must be one of {', '.join(DTYPES)}, not '{dtype}'.")
        self.writer, self.form = accelerated(self.parts.writer, dtype, compile), Form("torch", dtype)
        return self

    def take_fastest(self, reduced: bool = False) -> Model:
        """Sample in the form that is fastest on this machine and writes the tokens of fp32; `reduced` also allows others.

        Forms are torch's engine and exports that `generate` would find; other systems than jpeg-dlm stay as they are.
        """
        if not self.can_accelerate:
            return self
        for form in ranked(self.config, available_forms(self.parts, reduced, self.parts.writer.device.type)):
            try:
                return self._take(form)
            except JpegDlmError:  # what ran when it was measured may not run now
                continue
        return self.accelerate()

    def _take(self, form: Form) -> Model:
        if form.folder is None:
            return self.accelerate(form.dtype)
        self.writer, self.form = read_exported(form.folder).writer, form
        return self

    def sampler_options(self, fast: bool = False, **options: Any) -> Any:
        """The options of the method's sampler, or of its fast one, with these in place."""
        config = self.config
        if fast:
            if self.writer.latent_sampler is None:
                raise UsageError(f"{self.writer.title} has no fast sampler: leave it at its own.")
            config = replace(config, sampler=config.sampler.fast())
        known = [f.name for f in fields(self.config.sampler)]
        for name in options:
            if name not in known:
                raise UsageError(f"The sampler of {self.writer.title} has no option '{name}': it has {', '.join(known)}.")
        if options.get("protocol") == "released" and config.sampler.solver == "sde":
            options = {"solver": "euler"} | options  # the authors' code has no other solver
        return validate(override(config, {f"sampler.{name}": value for name, value in options.items()})).sampler

    def generate(
        self, n: int = 1, *, seed: int = 0, prompt: str | None = None, template: str | None = None,
        length: int | None = None, context_scale: float = 1.0, **options: Any,
    ) -> Texts:  # fmt: skip
        """n texts; the same seed gives the same texts in any batch size. Options are those of `sample`.

        Every text begins with `prompt`, or with `template`, in which [MASK] and [MASK:n] are places of 1 and n tokens to
        fill. `contains` gives a guide to texts with some words. A model that was trained with a context writes `length` tokens
        after the prompt, block after block, or fewer if the document ends; `context_scale` is the guidance over the context.
        """
        if template is None and (length is not None or context_scale != 1 or (prompt is not None and context_blocks(self))):
            wishes = {name: options.pop(name) for name in ("guide", "strength") if name in options}
            long = LongTexts.of(self, prompt, length, context_scale, **wishes)
            if long.notice:
                warnings.warn(long.notice, stacklevel=2)
            return long.texts(n, seed=seed, **options)
        if length is not None or context_scale != 1:
            raise UsageError("A template is of one block: leave out the length and the context scale.")
        if prompt is not None or template is not None:
            options["given"] = self.given(prompt, template)
        return self.to_text(self.sample(n, seed=seed, **options), options.get("given"))

    def given(self, prompt: str | None = None, template: str | None = None) -> Tensor | None:
        """Return the row of ids that `sample` keeps for a prompt or a template."""
        if prompt is not None and template is not None:
            raise UsageError("Give a prompt or a template, not both.")
        if prompt is None and template is None:
            return None
        kind, make, text = ("prompts", prompt_row, prompt) if template is None else ("templates", template_row, template)
        require(kind, self.writer)
        row = make(self.tokenizer, self.layout, *as_texts([text]))
        self.refuse_large_ids(row.tolist())
        return row

    def contains(self, *words: str) -> Guide:
        """Return a guide to texts that contain all of these words, or phrases, somewhere."""
        require("guides", self.writer)
        tok, spelled = self.tokenizer, []
        for word in as_texts(words):
            spellings = [tok.encode(word), *tok.encode_batch([f" {word}"], following=True)]
            if not spellings[0]:
                raise DataError("A word to contain is empty: give at least one character.")
            tok.refuse_unknown(word)
            self.refuse_large_ids([i for ids in spellings for i in ids])
            if min(map(len, spellings)) > self.layout.payload:
                raise UsageError(f"'{word}' is longer than a text of this model, {self.layout.payload} tokens: shorten it.")
            spelled.append([list(ids) for ids in dict.fromkeys(map(tuple, spellings)) if len(ids) <= self.layout.payload])
        return contains(spelled, tok.eos_id if self.config.data.rows_end else None)

    def refuse_large_ids(self, ids: Sequence[int]) -> None:
        """Raise `DataError` if the tokenizer of the text has more ids than the model."""
        if max(ids) >= self.config.data.vocab_size:
            raise DataError(f"The text holds the token {max(ids)}, which the model does not know: leave that word out.")

    def ended(self, tokens: Tensor, given: Tensor | None = None) -> Tensor:
        """Rows with padding behind the first end token (and behind what was `given`), for a model of rows that end."""
        if not self.config.data.rows_end:
            return tokens
        return end_rows(tokens, self.tokenizer.eos_id, self.tokenizer.pad_id, given)

    def to_text(self, tokens: Tensor, given: Tensor | None = None) -> Texts:
        """Rows of token ids as strings, which end where the rows do."""
        check_tokens(tokens)
        return Texts(self.tokenizer.decode(row) for row in self.ended(tokens, given).tolist())

    def text_ids(self, tokens: Tensor) -> list[list[int]]:
        """The ids of each row that are text: whole rows, or what stands before the end where rows end."""
        rows = self.ended(tokens).tolist()
        if not self.config.data.rows_end:
            return rows
        around = {self.tokenizer.eos_id, self.tokenizer.pad_id}
        return [[i for i in row if i not in around] for row in rows]

    # ------------------------------------------------------------ the codec

    @property
    def codec(self) -> LatentSampler:
        """The sampler that decodes latents, on the torch networks or on exported ones."""
        found = self.parts.writer.latent_sampler
        if found is None:
            raise UsageError(f"{self.config.method} has no latent codec: encode, decode and interpolate need jpeg-dlm.")
        return found

    @torch.no_grad()
    def encode(self, texts: str | Sequence[str]) -> Tensor:
        """Standardized latents (B, N, D) of texts, or of one, of at most L tokens each."""
        return self._encode_rows(self._rows(map(self._ids, as_texts(texts)))[0])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[str]:
        """Texts of latents, through the decode branch; what `encode` repeated to fill a block is given back once."""
        m = self.codec.config.model
        check_latents(latents, m.latent_len, m.latent_dim)
        tokens = self._decode_rows(latents)
        if self.config.data.rows_end:
            return self.to_text(tokens)
        rows = tokens[:, self.layout.start :][:, : self.layout.payload].tolist()
        return Texts(self.tokenizer.decode(first_copy(row, self.layout.separator)) for row in rows)

    @torch.no_grad()
    def reconstruct(self, texts: str | Sequence[str]) -> list[str]:
        """Compress texts, or one text, to N latents and decode them; longer texts go block by block."""
        return Texts(self.tokenizer.decode(self.round_trip(text)[1]) for text in as_texts(texts))

    @torch.no_grad()
    def round_trip(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and as many that its latents decode to."""
        ids, size, start = self._ids(text), self.layout.payload, self.layout.start
        rows, lengths = self._rows(ids[i : i + size] for i in range(0, len(ids), size))
        back = self._decode_rows(self._encode_rows(rows)).tolist()
        return ids, [i for row, n in zip(back, lengths, strict=True) for i in row[start : start + n]]

    @torch.no_grad()
    def interpolate(self, *texts: str, points: int = 5) -> list[str]:
        """Texts along straight lines between the latents of two or more texts, `points` for each line, ends included."""
        if whole_number(points, "points") < 2:
            raise UsageError("An interpolation needs at least 2 points.")
        rows, lengths = self._rows(map(self._ids, as_texts(texts)))
        if len(rows) < 2:
            raise UsageError("An interpolation needs at least 2 texts.")
        z_BND = self._encode_rows(rows)
        mix = torch.linspace(0, 1, points, device=z_BND.device).view(-1, 1, 1)
        lines = [(1 - mix) * a + mix * b for a, b in pairwise(z_BND)]
        tokens = self._decode_rows(torch.cat([lines[0], *(line[1:] for line in lines[1:])]))
        # Short texts were repeated to fill the block; what lies beyond the longest of them is only that.
        return self.to_text(tokens[:, self.layout.start :][:, : max(lengths)])

    def edit(
        self, text: str, n: int = 1, *, noise: float = 0.4, seed: int = 0, batch: int = 64, watch: Watch | None = None,
        **sampler: Any,
    ) -> Texts:  # fmt: skip
        """n variations of a text: its latents get this share of noise, and are written anew from there.

        Noise 0 gives the text back, noise 1 a text that has nothing to do with it. Options are those of the sampler.
        """
        noise = real_number(noise, "noise", 0, 1)
        require("edits", self.writer)
        rows, lengths = self._rows(map(self._ids, as_texts([text])))
        if whole_number(n, "n") < 1:
            raise UsageError("The number of texts must be at least 1.")
        tokens = self.rewritten(rows.expand(n, -1), noise, seed=seed, batch=batch, watch=watch, **sampler)
        if self.config.data.rows_end:
            return self.to_text(tokens)
        return self.to_text(tokens[:, self.layout.start :][:, : max(lengths)])  # the rest repeats the text

    @torch.no_grad()
    def rewritten(
        self, rows: Tensor, noise: float, *, seed: int = 0, batch: int = 64, watch: Watch | None = None, **sampler: Any
    ) -> Tensor:
        """Token ids of rows (n, L) that were given noise and written anew; row i draws the noise of sample i of `seed`."""
        require("edits", self.writer)
        view = self.complete_method().latent_view()
        assert view is not None  # what takes edits has latents
        pad_id, ends = self.layout.pad_id, self.config.data.rows_end
        batches = [Batch(part, part != pad_id if ends else None) for part in rows.to(self.method.device).split(batch)]
        z_BND = torch.cat([view.encode(part) for part in batches])
        control = Control(origin=Origin(z_BND, rows.masked_fill(rows == pad_id, FREE) if ends else rows, noise))
        return self._sample(len(rows), seed, 0, batch, watch, None, control, sampler)

    def _encode_rows(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.codec.device)
        mask = rows != self.tokenizer.pad_id if self.config.data.rows_end else None
        found = self.complete_method().latent_space(Batch(rows, mask))
        assert found is not None  # what has a codec has latents
        return found.z_BND

    def _decode_rows(self, latents: Tensor) -> Tensor:
        return self.codec.tokens(latents.to(self.codec.device), self.config.sampler.w).cpu()

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer.known_ids(text)
        self.refuse_large_ids(ids)
        return ids

    def _rows(self, texts: Iterable[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Return texts of ids as rows in the form the model was trained on, and how many tokens each text has."""
        texts, size = list(texts), self.layout.payload
        for ids in texts:
            if len(ids) > size:
                raise DataError(f"The text has {len(ids)} tokens, the model takes {size}: shorten it or use reconstruct.")
        return torch.tensor([self.layout.text_row(ids) for ids in texts]), [len(ids) for ids in texts]

    # ------------------------------------------------------------ parts

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer the model was trained with."""
        found = self.parts.read_tokenizer()
        if found.vocab_size < self.config.data.vocab_size:
            raise CheckpointError(
                f"The tokenizer has {found.vocab_size} ids, the model {self.config.data.vocab_size}: use the model's own."
            )
        return found

    @cached_property
    def layout(self) -> Layout:
        """The form of the rows that the model was trained on."""
        return layout_of(self.config.data, self.tokenizer)

    @cached_property
    def encoder(self) -> FrozenEncoder:
        """The frozen text encoder; generating does not need it."""
        return self.parts.read_encoder().to(self.writer.device)

    def complete_method(self) -> Method:
        """The method with its text encoder in place, if it uses one."""
        if self.method.needs_encoder(self.config):
            self.method.encoder = self.encoder
        return self.method

    # ------------------------------------------------------------ files and hub

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a model folder that `load` reads; refuses to overwrite."""
        return write_model(self.parts, Path(path))

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> str | None:
        """`ModelHubMixin.save_pretrained` of huggingface_hub: a model folder with the hub's model card beside it."""
        from jpeg_dlm.hub import HubModel

        return HubModel(self.parts).save_pretrained(Path(save_directory), **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """`ModelHubMixin.push_to_hub` of huggingface_hub."""
        from jpeg_dlm.hub import HubModel

        return HubModel(self.parts).push_to_hub(repo_id, **options)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **options: Any) -> Model:
        """`ModelHubMixin.from_pretrained` of huggingface_hub: from a repository of the hub or a folder."""
        from jpeg_dlm.hub import HubModel

        device = options.pop("device", "cpu")
        stored = HubModel.from_pretrained(str(name_or_path), **options)
        model = cls(stored.parts, device)
        model._scratch = stored.scratch  # tokenizer and encoder are read from it on first use
        return model


def load(
    path: str | os.PathLike[str] | None = None, device: str | torch.device | None = None,
    dtype: Dtype | Literal["exact", "auto"] | None = None, compile: bool = False,
) -> Model:  # fmt: skip
    """A model from a model folder, an exported folder, a run or a checkpoint; without a path, the bundled one.

    The names 'bundled' and 'stories' are the two models of the package.

    `device` None takes a GPU if there is one. `dtype` and `compile` are those of `Model.accelerate`, for jpeg-dlm; 'exact'
    is `Model.take_fastest()`, the fastest form on this machine that writes the tokens of fp32, and 'auto' also allows types
    that change some tokens. Without a dtype a model samples as the paper writes it, and its weights may change.
    """
    if not isinstance(path, (str, os.PathLike, NoneType)):
        raise UsageError(f"A model is loaded from a path, not from {shown(path)}.")
    recall_limit()
    folder = bundled_folder() if path is None else named_folder(path)
    if is_exported(folder):
        if dtype not in (None, "exact", "auto") or compile:
            raise UsageError(f"'{folder}' is run as it was exported: leave the dtype and compilation out.")
        return Model(read_exported(folder), "cpu")  # its runtimes are on the CPU
    model = Model(read_model(folder), read_ranks(None if device is None else str(device), {}).device)
    if dtype in ("exact", "auto") and not compile:
        return model.take_fastest(reduced=dtype == "auto")
    if dtype is None and not compile:
        return model
    return model.accelerate("fp32" if dtype in (None, "exact", "auto") else dtype, compile)
