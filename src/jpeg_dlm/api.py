"""Use from Python: `load()` returns a `Model` that generates, reconstructs, interpolates, edits, encodes and decodes text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.checkpoints.model_folder import BUNDLED_FOLDER, ModelParts, named_folder, read_model, write_model
from jpeg_dlm.config import validate
from jpeg_dlm.encoders import FrozenEncoder
from jpeg_dlm.export.onnx_model import PRECISIONS, OnnxNetworks, Precision, is_exported, onnx_backend, read_exported
from jpeg_dlm.flow.guidance import EditSource, Guidance, Guide, contains
from jpeg_dlm.flow.sampler import Capability, TextSampler, Watch
from jpeg_dlm.methods.base import FREE, Batch, Method, require_capability
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.sources import most_agreed, sample
from jpeg_dlm.options import override
from jpeg_dlm.sampling.long_text import BlockwiseSampler
from jpeg_dlm.sampling.prompts import prompt_row, rows_of, template_row
from jpeg_dlm.text.packing import RowLayout, end_rows, first_copy, layout_of
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.arguments import as_latents, as_texts, check_fixed, check_ids, describe, real_number, whole_number
from jpeg_dlm.util.distributed import read_ranks
from jpeg_dlm.util.errors import CheckpointError, DataError, UsageError
from jpeg_dlm.util.rng import RowNoise

Backend = Literal["torch", "onnx"]
CODEC_ROWS = 64  # rows that are encoded or decoded at once (assumed)


class Model:
    """A trained model with its tokenizer and encoder, which are loaded when they are first needed."""

    def __init__(
        self,
        parts: ModelParts,
        device: str | torch.device = "cpu",
        backend: Backend = "torch",
        precision: Precision | None = None,
    ) -> None:
        self.parts, self.config = parts, parts.config
        if parts.trained is not None:
            parts.trained.to(device)
        self.precision = precision or parts.precision
        # What samples freely; requests that need gradients or a context use `parts.writer`, whatever the backend.
        self.writer: TextSampler = onnx_backend(parts, self.precision) if backend == "onnx" and parts.trained else parts.writer

    def __repr__(self) -> str:
        """Describe the model: system, size and origin."""
        latents = f"{self.config.model.latent_len} latents for " if self.config.rate is not None else ""
        sizes = f"{latents}{self.config.data.token_len} tokens, vocabulary {self.config.data.vocab_size:,}"
        return f"<{self.writer.title}: {sizes}, {self.dtype} on {self.writer.device}, from '{self.parts.origin}'>"

    @property
    def method(self) -> Method:
        """The trained method; a model of exported networks refuses."""
        return self.parts.method

    @property
    def supports(self) -> frozenset[Capability]:
        """The kinds of requests that the model takes, whatever its backend."""
        return self.parts.writer.supports

    @property
    def dtype(self) -> str:
        """The backend and type that samples are computed with, as results record it."""
        if self.writer is not self.parts.trained:
            return f"onnx {self.precision}"
        return str(next(self.method.parameters()).dtype).removeprefix("torch.")

    @property
    def context_blocks(self) -> int:
        """How many blocks before a block the model sees; 0 if it writes single blocks."""
        return getattr(self.config.model, "context_blocks", 0) if self.parts.trained is not None else 0

    # ------------------------------------------------------------ generation

    def generate(
        self,
        n: int = 1,
        *,
        seed: int = 0,
        prompt: str | None = None,
        template: str | None = None,
        length: int | None = None,
        context_scale: float = 1.0,
        source: str | Sequence[str] | None = None,
        candidates: int = 1,
        **options: Any,
    ) -> list[str]:
        """n texts; the same seed gives the same texts in any batch size. Options are those of `sample`.

        A model of pairs writes n targets of `source`, or of each of several sources in turn; of `candidates` for each target
        it keeps the one that agrees most with the others (minimum Bayes risk).

        Every text begins with `prompt`, or with `template`, in which [MASK] and [MASK:n] are places of 1 and n tokens to
        fill. `contains` gives a guide to texts with some words. A model that was trained with a context writes `length` tokens
        after the prompt, block after block, or fewer if the document ends; `context_scale` is the guidance over the context.
        """
        is_long = length is not None or context_scale != 1
        if template is None and (is_long or (prompt is not None and self.context_blocks)):
            rows = {name: options.pop(name) for name in ("first", "batch", "watch") if name in options}
            long = self.blockwise(prompt, length, context_scale, **options)
            if long.notice:
                warnings.warn(long.notice, stacklevel=2)
            return [self.tokenizer.decode(row) for row in long.tokens(n, seed=seed, **rows)]
        if is_long:
            raise UsageError("A template is of one block: leave out the length and the context scale.")
        if prompt is not None or template is not None:
            options["fixed"] = self.fixed_tokens(prompt, template)
        if source is None:
            return self._texts(self.sample(n, seed=seed, **options))
        copies = whole_number(n, "n", 1) * whole_number(candidates, "candidates", 1)
        sources = self.source_rows(source).repeat_interleave(copies, 0)
        return most_agreed(self._texts(self.sample(len(sources), seed=seed, source=sources, **options)), candidates)

    @torch.no_grad()
    def sample(
        self,
        n: int = 1,
        *,
        seed: int = 0,
        first: int = 0,
        batch: int = 64,
        watch: Watch | None = None,
        fixed: Tensor | None = None,
        guide: Guide | None = None,
        strength: float = 1.0,
        edit: EditSource | None = None,
        source: Tensor | None = None,
        **sampler: Any,
    ) -> Tensor:
        """Token ids (n, L) of samples `first` to `first + n - 1` of `seed`, `ended` where rows end.

        `fixed` (L), or (n, L) with a row for each, holds ids that samples keep, and -1 elsewhere. `guide` is a
        differentiable function of token logits, `fn(logits_BLV) -> loss_B`, whose loss sampling lowers; `strength` scales
        the moves of guides and given tokens. `edit` has texts to begin from, `source` the `source_rows` (n, S) of a model of
        pairs. Keyword arguments are options of the sampler.
        """
        n, seed, first = whole_number(n, "n", 1), whole_number(seed, "seed"), whole_number(first, "first", 0)
        options, batch = self.sampler_options(**sampler), whole_number(batch, "batch", 1)
        guidance = guidance_for(guide, strength, edit)
        writer = self.writer if fixed is None and guidance is None else self.parts.writer  # guidance needs gradients
        if guide is not None or strength != 1:
            require_capability("guides", writer)
        if edit is not None:
            require_capability("edits", writer)
        if (source is None) != (self.config.data.source_len == 0):
            raise UsageError("A model of pairs needs a source to write a target of, and no other model takes one.")
        if fixed is not None:
            require_capability("templates", writer)
            check_fixed(fixed, n, self.config.data.token_len, self.config.data.vocab_size)
            if self.config.data.rows_end and "guides" in self.supports:
                guidance = replace(guidance or Guidance(), end_id=self.tokenizer.eos_id)
        tokens = []
        for start in range(0, n, batch):
            rows = slice(start, min(start + batch, n))
            if guidance is not None and edit is not None:
                z_BND, tokens_BL = (x[rows].to(writer.device) for x in (edit.z_BND, edit.tokens_BL))
                guidance = replace(guidance, source=EditSource(z_BND, tokens_BL, edit.noise))
            more: dict[str, Any] = {} if guidance is None else {"guidance": guidance}
            if source is not None:
                if writer is self.parts.trained:
                    self.complete_method()  # its encoder reads the sources
                source_BS = source[rows].to(writer.device)
                more["source"] = Batch(source_BS, source_BS != self.tokenizer.pad_id)
            noise = RowNoise(seed, range(first + rows.start, first + rows.stop), 0, writer.device)
            fixed_BL = None if fixed is None else rows_of(fixed, rows).to(writer.device)
            tokens.append(sample(writer, options, noise, watch, fixed_BL, **more).cpu())
        return self.ended(torch.cat(tokens), fixed)

    def sampler_options(self, **options: Any) -> Any:
        """The options of the method's sampler with these in place."""
        return validate(override(self.config, {f"sampler.{name}": value for name, value in options.items()})).sampler

    def fixed_tokens(self, prompt: str | None = None, template: str | None = None) -> Tensor | None:
        """The row of ids that `sample` keeps for a prompt or a template."""
        if prompt is not None and template is not None:
            raise UsageError("Give a prompt or a template, not both.")
        if prompt is None and template is None:
            return None
        kind, make, text = ("prompts", prompt_row, prompt) if template is None else ("templates", template_row, template)
        require_capability(kind, self.parts.writer)
        row = make(self.tokenizer, self.layout, *as_texts([text]))
        check_ids(row.tolist(), self.config.data.vocab_size)
        return row

    def source_rows(self, texts: str | Sequence[str]) -> Tensor:
        """Rows of ids (B, S) of one source or several."""
        size = self.config.data.source_len
        if not size:
            require_capability("sources", self.parts.writer, "train one on pairs, with --data.source-len")
        ids = [self._ids(text, "source") for text in as_texts(texts)]
        if (longest := max(map(len, ids))) >= size:
            raise DataError(f"The source has {longest} tokens, the model reads {size - 1}: shorten it.")
        return torch.tensor([replace(self.layout, token_len=size).text_row(row) for row in ids])

    def contains(self, *words: str) -> Guide:
        """A guide to texts that contain all of these words, or phrases, somewhere."""
        require_capability("guides", self.parts.writer)
        size, spellings = self.layout.payload, []
        for word in as_texts(words):
            ids = [self._ids(word), *self.tokenizer.encode_batch([f" {word}"], following=True)]
            fitting = [list(spelling) for spelling in dict.fromkeys(map(tuple, ids)) if len(spelling) <= size]
            if not fitting:
                raise UsageError(f"'{word}' is longer than a text of this model, {size} tokens: shorten it.")
            spellings.append(fitting)
        return contains(spellings, self.tokenizer.eos_id if self.config.data.rows_end else None)

    def blockwise(
        self,
        prompt: str | None = None,
        length: int | None = None,
        context_scale: float = 1.0,
        guide: Guide | None = None,
        strength: float = 1.0,
        **sampler: Any,
    ) -> BlockwiseSampler:
        """A sampler of long texts after a prompt; by default they go on to the end of the block in which it ends."""
        if not self.context_blocks:
            require_capability("long text", self.parts.writer, "train it with --model.context-blocks 1 or more")
        scale, guidance = real_number(context_scale, "context_scale", 0), guidance_for(guide, strength) or Guidance()
        ids, size = [] if prompt is None else self._ids(*as_texts([prompt]), what="prompt"), self.config.data.token_len
        length = size - len(ids) % size if length is None else whole_number(length, "length", 1)
        options, eos_id = self.sampler_options(**sampler), self.tokenizer.eos_id
        return BlockwiseSampler(cast(JpegDlm, self.method), options, self._encode_rows, eos_id, [ids], length, scale, guidance)

    # ------------------------------------------------------------ rows and texts

    def ended(self, tokens: Tensor, fixed: Tensor | None = None) -> Tensor:
        """Rows with padding behind the first end token (and behind what was `fixed`), for a model of rows that end."""
        ends = self.config.data.rows_end
        return end_rows(tokens, self.tokenizer.eos_id, self.tokenizer.pad_id, fixed) if ends else tokens

    def to_text(self, tokens: Tensor, fixed: Tensor | None = None) -> list[str]:
        """Rows of token ids as strings, which end where the rows do."""
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dim() != 2:
            raise UsageError(f"Tokens must be a tensor with rows of token ids, not {describe(tokens)}.")
        return self._texts(self.ended(tokens, fixed))

    def _texts(self, tokens: Tensor) -> list[str]:
        return [self.tokenizer.decode(row) for row in tokens.tolist()]

    def _ids(self, text: str, what: str = "text") -> list[int]:
        ids = self.tokenizer.known_ids(text, what)
        check_ids(ids, self.config.data.vocab_size)
        return ids

    def _rows(self, texts: Iterable[Sequence[int]]) -> tuple[Tensor, list[int]]:
        """Texts of ids as rows in the form the model was trained on, and how many tokens each text has."""
        texts, size = list(texts), self.layout.payload
        if (most := max(map(len, texts))) > size:
            raise DataError(f"The text has {most} tokens, the model takes {size}: shorten it or use reconstruct.")
        return torch.tensor([self.layout.text_row(ids) for ids in texts]), [len(ids) for ids in texts]

    # ------------------------------------------------------------ the codec

    @property
    def codec(self) -> JpegDlm | OnnxNetworks:
        """The networks that decode latents, in torch or exported."""
        if not isinstance(self.parts.writer, JpegDlm | OnnxNetworks):
            raise UsageError(f"{self.config.method} has no latent codec: encode, decode and interpolate need jpeg-dlm.")
        return self.parts.writer

    def encode(self, texts: str | Sequence[str]) -> Tensor:
        """Standardized latents (B, N, D) of texts, or of one, of at most L tokens each."""
        return self._encode_rows(self._rows(map(self._ids, as_texts(texts)))[0])

    def decode(self, latents: Tensor | np.ndarray) -> list[str]:
        """Texts of latents (B, N, D), or of one text's (N, D); what `encode` repeated to fill a block is given back once."""
        m = self.codec.config.model
        tokens = self._decode_rows(as_latents(latents, m.latent_len, m.latent_dim))
        if self.config.data.rows_end:
            return self.to_text(tokens)
        rows = tokens[:, self.layout.start :][:, : self.layout.payload].tolist()
        return [self.tokenizer.decode(first_copy(row, self.layout.separator)) for row in rows]

    def reconstruct(self, texts: str | Sequence[str]) -> list[str]:
        """Compress texts, or one text, to N latents and decode them; longer texts go block by block."""
        return [self.tokenizer.decode(self.round_trip(text)[1]) for text in as_texts(texts)]

    def round_trip(self, text: str) -> tuple[list[int], list[int]]:
        """The token ids of a text, and as many that its latents decode to."""
        ids, size, start = self._ids(text), self.layout.payload, self.layout.start
        rows, lengths = self._rows(ids[i : i + size] for i in range(0, len(ids), size))
        back = self._decode_rows(self._encode_rows(rows)).tolist()
        return ids, [i for row, n in zip(back, lengths, strict=True) for i in row[start : start + n]]

    def interpolate(self, *texts: str, points: int = 5) -> list[str]:
        """Texts along straight lines between the latents of two or more texts, `points` for each line, ends included."""
        rows, lengths = self._rows(map(self._ids, as_texts(texts)))
        if len(rows) < 2:
            raise UsageError("An interpolation needs at least 2 texts.")
        z_BND = self._encode_rows(rows)
        mix = torch.linspace(0, 1, whole_number(points, "points", 2), device=z_BND.device).view(-1, 1, 1)
        lines = [(1 - mix) * a + mix * b for a, b in pairwise(z_BND)]
        tokens = self._decode_rows(torch.cat([lines[0], *(line[1:] for line in lines[1:])]))
        # Short texts were repeated to fill the block; what lies beyond the longest of them is only that.
        return self.to_text(tokens[:, self.layout.start :][:, : max(lengths)])

    def edit(self, text: str, n: int = 1, *, noise: float = 0.4, **options: Any) -> list[str]:
        """n variations of a text: its latents get this share of noise, and are written anew from there.

        Noise 0 gives the text back, noise 1 a text that has nothing to do with it. Options are those of `sample`.
        """
        rows, lengths = self._rows(map(self._ids, as_texts([text])))
        tokens = self.rewritten(rows, noise, n, **options)
        # Where rows do not end, the rest of a row repeats the text.
        return self._texts(tokens if self.config.data.rows_end else tokens[:, self.layout.start :][:, : max(lengths)])

    def rewritten(self, rows: Tensor, noise: float, copies: int = 1, **options: Any) -> Tensor:
        """Token ids of `copies` of each row, given noise and written anew; result i draws the noise of sample i."""
        require_capability("edits", self.parts.writer)
        noise, copies = real_number(noise, "noise", 0, 1), whole_number(copies, "n", 1)
        ids = rows.masked_fill(rows == self.layout.pad_id, FREE) if self.config.data.rows_end else rows
        z_BND, ids = (x.repeat_interleave(copies, 0) for x in (self._encode_rows(rows), ids))
        return self.sample(len(ids), edit=EditSource(z_BND, ids, noise), **options)

    @torch.no_grad()
    def _encode_rows(self, rows: Tensor) -> Tensor:
        view, pad_id, ends = self.complete_method().latent_model(), self.layout.pad_id, self.config.data.rows_end
        if view is None:
            raise UsageError(f"{self.config.method} has no latents: use jpeg-dlm.")
        batches = rows.to(self.parts.writer.device).split(CODEC_ROWS)
        return torch.cat([view.encode(Batch(part, part != pad_id if ends else None)) for part in batches])

    @torch.no_grad()
    def _decode_rows(self, latents: Tensor) -> Tensor:
        batches = latents.to(self.codec.device).split(CODEC_ROWS)
        return torch.cat([self.codec.tokens(part, self.config.sampler.w).cpu() for part in batches])

    # ------------------------------------------------------------ parts

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer the model was trained with."""
        tokenizer, ids = self.parts.read_tokenizer(), self.config.data.vocab_size
        if tokenizer.vocab_size < ids:
            raise CheckpointError(f"The tokenizer has {tokenizer.vocab_size} ids, the model {ids}: use the model's own.")
        return tokenizer

    @cached_property
    def layout(self) -> RowLayout:
        """The form of the rows that the model was trained on."""
        return layout_of(self.config.data, self.tokenizer)

    @cached_property
    def encoder(self) -> FrozenEncoder:
        """The frozen text encoder; generating does not need it."""
        return self.parts.read_encoder().to(self.parts.writer.device)

    def complete_method(self) -> Method:
        """The method with its text encoder in place, if it uses one."""
        if self.method.uses_encoder:
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
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], *, device: str = "cpu", **options: Any) -> Model:
        """`ModelHubMixin.from_pretrained` of huggingface_hub: from a repository of the hub or a folder."""
        from jpeg_dlm.hub import HubModel

        return cls(HubModel.from_pretrained(str(name_or_path), **options).parts, device)


def guidance_for(guide: Guide | None, strength: float, source: EditSource | None = None) -> Guidance | None:
    """Return the guidance of samples; None if nothing is asked for."""
    if guide is not None and not callable(guide):
        raise UsageError(f"A guide is a function fn(logits_BLV) -> loss_B, not {describe(guide)}.")
    strength = real_number(strength, "strength", 0)
    return None if guide is None and source is None and strength == 1 else Guidance(guide, strength, source)


def load(
    path: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    backend: Backend | None = None,
    precision: Precision | None = None,
) -> Model:
    """A model from a model folder, an exported folder, a run or a checkpoint; without a path, the bundled one.

    `device` None takes a GPU if there is one, that of the local rank under torchrun. The backend 'onnx' samples jpeg-dlm with
    ONNX Runtime on the CPU, in fp32 or int8 (default: torch, and fp32); guides, prompts and edits still use torch's networks.
    """
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"A model is loaded from a path, not from {describe(path)}.")
    if backend not in (None, "torch", "onnx") or precision not in (None, *PRECISIONS):
        raise UsageError("The backend is torch or onnx, the precision fp32 or int8.")
    folder = BUNDLED_FOLDER if path is None else named_folder(path)
    if is_exported(folder):
        parts = read_exported(folder)
        if backend == "torch" or precision not in (None, parts.precision):
            raise UsageError(f"'{folder}' was exported to ONNX in {parts.precision}: it has no other backend or precision.")
        return Model(parts, "cpu", "onnx")
    if precision == "int8" and backend != "onnx":
        raise UsageError("The torch backend samples in fp32: int8 is a precision of the backend onnx.")
    env = {"LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    chosen = read_ranks(None if device is None else str(device), env).device
    return Model(read_model(folder), chosen, backend or "torch", precision)
