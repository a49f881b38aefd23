"""What the models of jpeg-dlm share in `transformers`: random numbers by row, and `generate`.

Shapes: B batch, L tokens of a text, S tokens of a source.
"""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

FREE = -1  # in prompts: a token to fill


class Noise:
    """Random numbers that depend on seed, purpose and row alone, so that text i of a seed is the same in any batch.

    They come from Philox, a generator whose state is a counter, on the host: every device gets the same.
    """

    def __init__(self, seed: int, rows: range, device: torch.device) -> None:
        self.seed, self.rows, self.device = seed, rows, device

    def key(self, purpose: str) -> int:
        """Return a seed of 63 bits for a purpose."""
        digest = hashlib.blake2b(f"{self.seed}/{purpose}/0".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def words(self, purpose: str, count: int) -> Tensor:
        """Return at least `count` words of 32 bits for each row, as two halves (B, 2, *)."""
        blocks = -(-count // 8)
        philox = np.random.Philox(key=self.key(purpose), counter=self.rows.start * blocks)
        words = philox.random_raw(len(self.rows) * blocks * 4)
        return torch.from_numpy(words.view(np.int32)).view(len(self.rows), 2, -1)

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Draw standard normal numbers (B, *shape), by the transform of Box and Muller."""
        first, second = self.words(purpose, math.prod(shape)).unbind(1)
        radius = ((first & 0x7FFFFFFF).float() + 1).mul(2.0**-31).log().mul(-2).sqrt()
        angle = second.float() * (math.pi * 2.0**-31)
        numbers = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
        return numbers[:, : math.prod(shape)].view(-1, *shape).to(self.device)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Draw uniform numbers on [0, 1) of shape (B, *shape), of 53 bits."""
        first, second = self.words(purpose, 2 * math.prod(shape)).unbind(1)
        numbers = ((first & 0x7FFFFFFF).double() * 2.0**22 + ((second >> 10) & 0x3FFFFF)) * 2.0**-53
        return numbers[:, : math.prod(shape)].view(-1, *shape).to(self.device)


class TextDiffusionConfig(PretrainedConfig):
    """Sizes, special tokens, and the options of the sampler, as config.json has them."""


class TextDiffusion(PreTrainedModel):
    """A model that writes rows of tokens; a subclass has `sample`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.c: Any = config

    def sample(self, o: SimpleNamespace, noise: Noise, given: Tensor | None) -> Tensor:
        """Return token ids (B, L) for the rows of the noise, with options `o` of the sampler; see `given_rows`."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_return_sequences: int = 1,
        *,
        seed: int = 0,
        first: int = 0,
        batch_size: int = 64,
        **options: Any,
    ) -> Tensor:
        """Return token ids (rows, L): the texts `first`, `first` + 1, ... of a seed.

        `input_ids` are sources for a model of pairs, otherwise prompts, in which -1 is a token to fill; each row of them gets
        `num_return_sequences` texts. Further options are those of `config.sampler`.
        """
        c, given, count = self.c, None, num_return_sequences
        if unknown := options.keys() - c.sampler.keys():
            raise TypeError(f"There is no option '{min(unknown)}': choose from {', '.join(c.sampler)}.")
        if c.source_len and input_ids is None:
            raise ValueError("This model writes targets of sources: give their tokens as input_ids.")
        if input_ids is not None:
            given = self.given_rows(input_ids, attention_mask).repeat_interleave(num_return_sequences, 0).to(self.device)
            count = len(given)
        texts = []
        for start in range(0, count, batch_size):
            end = min(start + batch_size, count)
            noise = Noise(seed, range(first + start, first + end), self.device)
            texts.append(
                self.sample(SimpleNamespace(**(c.sampler | options)), noise, None if given is None else given[start:end])
            )
        return self.ended(torch.cat(texts), None if c.source_len else given)

    def given_rows(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return sources (B, S) that end and are padded, or prompts (B, L) with -1 behind what is given."""
        c, mask = self.c, torch.ones_like(ids) if mask is None else mask
        if c.begin_token_id is not None:  # the first token of every row
            ids, mask = F.pad(ids, (1, 0), value=c.begin_token_id), F.pad(mask, (1, 0), value=1)
        size, length_B1 = c.source_len or c.token_len, mask.sum(1, keepdim=True)
        if int(length_B1.max()) >= size:
            raise ValueError(f"A row has {int(length_B1.max())} tokens, and the model takes {size - 1}: shorten it.")
        ids, place = F.pad(ids, (0, size))[:, :size], torch.arange(size, device=ids.device)
        if not c.source_len:
            return ids.masked_fill(place >= length_B1, FREE)
        return ids.masked_fill(place == length_B1, c.eos_token_id).masked_fill(place > length_B1, c.pad_token_id)

    def ended(self, tokens: Tensor, fixed: Tensor | None) -> Tensor:
        """Return rows with padding behind the first end token after, or at the end of, what was given, if rows end."""
        if not self.c.rows_end:
            return tokens
        ends = tokens == self.c.eos_token_id
        if fixed is not None:
            kept = (fixed >= 0) & (fixed != self.c.eos_token_id)
            ends &= kept.flip(1).cumsum(1).flip(1) == 0
        return tokens.masked_fill(ends.cumsum(1) > ends.long(), self.c.pad_token_id)
