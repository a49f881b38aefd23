"""Long texts of a `Model` after prompts, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jpeg_dlm.arguments import as_texts, counts, real_number, whole_number
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.control import Control
from jpeg_dlm.flow.guides import Guide
from jpeg_dlm.flow.latent_sampler import Watch
from jpeg_dlm.methods.base import Batch, require
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.sampling.given import Decoded
from jpeg_dlm.sampling.long_text import BlockWriter, NewText, given_rows, head_of
from jpeg_dlm.texts import Texts

if TYPE_CHECKING:
    from jpeg_dlm import Model


@dataclass(frozen=True)
class LongTexts:
    """Texts after prompts, one for each sample or one for all, of at most `length` more ids."""

    model: Model
    prompts: Sequence[Sequence[int]]
    length: int
    scale: float = 1.0
    control: Control = Control()

    @classmethod
    def of(
        cls, model: Model, prompt: str | None = None, length: int | None = None, context_scale: float = 1.0,
        guide: Guide | None = None, strength: float = 1.0,
    ) -> LongTexts:  # fmt: skip
        """Return what was asked for; by default, a text goes on to the end of the block in which the prompt ends."""
        if not context_blocks(model):
            require("long text", model.writer, "trained with --model.context-blocks 1 or more")
        strength = real_number(strength, "strength", 0)
        scale = real_number(context_scale, "context_scale", 0)
        ids = [] if prompt is None else prompt_ids(model, *as_texts([prompt]))
        size = model.config.data.token_len
        length = size - len(ids) % size if length is None else whole_number(length, "length")
        if length < 1:
            raise UsageError(f"The length of a text must be at least 1 token, not {length}.")
        return cls(model, [ids], length, scale, Control(guide, strength))

    @property
    def notice(self) -> str | None:
        """A sentence if the model does not see the whole prompt."""
        size = self.model.config.data.token_len
        tokens = max(map(len, self.prompts))
        seen = context_blocks(self.model) * size + tokens % size
        if tokens <= seen:
            return None
        return f"The prompt has {tokens} tokens, of which the model sees the last {seen}."

    def counter(self) -> Decoded | None:
        """Return a counter, for `pieces`, of the prompt's tokens that latents decode to; None if no block is completed."""
        size = self.model.config.data.token_len
        given = given_rows([head_of(prompt, size) for prompt in self.prompts], size)
        return None if given is None else Decoded(given[0] if len(given) == 1 else given)

    def pieces(
        self, n: int = 1, *, seed: int = 0, first: int = 0, batch: int = 64, watch: Watch | None = None,
        decoded: Decoded | None = None, **sampler: Any,
    ) -> Iterator[NewText]:  # fmt: skip
        """Yield what follows the prompts of samples `first` to `first + n - 1` of `seed`, block by block."""
        n, seed, first, batch = counts(n, seed, first, batch)
        options, model = self.model.sampler_options(**sampler), self.model
        if options.protocol == "released":
            raise UsageError("The released protocol writes single blocks: use the default one for long texts.")
        if "long text" not in model.writer.supports:
            model.accelerate()  # exported networks have no context
        writer, method, pad_id = model.writer.latent_sampler, model.complete_method(), model.tokenizer.pad_id
        assert writer is not None and isinstance(method, JpegDlm)  # what has a context is such a model

        def encode(rows_BL: Tensor) -> Tensor:
            return method.encode(Batch(rows_BL, rows_BL != pad_id))

        blocks = BlockWriter(writer, encode, model.tokenizer.eos_id, self.scale, self.control)
        for start in range(first, first + n, batch):
            samples = range(start, min(start + batch, first + n))
            prompts = [self.prompt_of(sample - first) for sample in samples]
            seen = watch if start == first else None
            yield from blocks.pieces(options, seed, samples, prompts, self.length, seen, decoded)

    def prompt_of(self, place: int) -> Sequence[int]:
        return self.prompts[0] if len(self.prompts) == 1 else self.prompts[place]

    def tokens(self, n: int = 1, *, first: int = 0, **options: Any) -> list[list[int]]:
        """Return the ids of n texts, prompts included."""
        rows = [list(self.prompt_of(i)) for i in range(max(0, n))]
        for piece in self.pieces(n, first=first, **options):
            rows[piece.sample - first] += piece.ids
        return rows

    def texts(self, n: int = 1, **options: Any) -> Texts:
        """Return n texts, prompts included."""
        return Texts(map(self.model.tokenizer.decode, self.tokens(n, **options)))


def context_blocks(model: Model) -> int:
    """Return how many blocks before a block a model sees; 0 if it writes single blocks."""
    return getattr(model.config.model, "context_blocks", 0) if model.parts.trained is not None else 0


def prompt_ids(model: Model, text: str) -> list[int]:
    """Return the ids of a prompt of any length."""
    ids = model.tokenizer.known_ids(text, "prompt")
    model.refuse_large_ids(ids)
    return ids
