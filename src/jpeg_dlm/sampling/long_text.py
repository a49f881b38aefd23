"""Long texts: block after block, each after the clean latents of the blocks before it, at the same cost for each block.

The context of a block is the text itself, encoded again: a text goes on in the same way wherever it came from.
Shapes: B batch, L tokens, N latents, K blocks of context, C = K N latents of the context, D latent width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jpeg_dlm.flow.guidance import Guidance
from jpeg_dlm.flow.sampler import Watch
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.jpeg_dlm_config import SamplerConfig
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.util.arguments import whole_number
from jpeg_dlm.util.rng import RowNoise


@dataclass(frozen=True)
class NewText:
    """New ids of one sample; `last` if its text ends with them."""

    sample: int
    ids: list[int]
    last: bool


@dataclass(frozen=True)
class BlockwiseSampler:
    """Writes texts of at most `length` ids after prompts, one for each sample or one for all, of a model with a context."""

    writer: JpegDlm
    options: SamplerConfig
    encode: Callable[[Tensor], Tensor]  # full rows (B, L) to their clean standardized latents (B, N, D)
    end_id: int
    prompts: Sequence[Sequence[int]]
    length: int
    scale: float = 1.0  # guidance over the context
    guidance: Guidance = Guidance()  # of every block; given tokens follow its strength

    @property
    def token_len(self) -> int:
        return self.writer.config.data.token_len

    @property
    def notice(self) -> str | None:
        """A sentence if the model does not see the whole prompt."""
        tokens = max(map(len, self.prompts))
        seen = self.writer.config.model.context_blocks * self.token_len + tokens % self.token_len
        return None if tokens <= seen else f"The prompt has {tokens} tokens, of which the model sees the last {seen}."

    def prompt_of(self, place: int) -> Sequence[int]:
        return self.prompts[0] if len(self.prompts) == 1 else self.prompts[place]

    def tokens(self, n: int = 1, *, first: int = 0, **more: Any) -> list[list[int]]:
        """Return the ids of n texts, prompts included."""
        rows = [list(self.prompt_of(i)) for i in range(whole_number(n, "n", 1))]
        for piece in self.stream(n, first=first, **more):
            rows[piece.sample - first] += piece.ids
        return rows

    def stream(
        self, n: int = 1, *, seed: int = 0, first: int = 0, batch: int = 64, watch: Watch | None = None
    ) -> Iterator[NewText]:
        """Yield what follows the prompts of samples `first` to `first + n - 1`, block by block; `watch` sees the first one."""
        n, seed, first = whole_number(n, "n", 1), whole_number(seed, "seed"), whole_number(first, "first", 0)
        for start in range(first, first + n, whole_number(batch, "batch", 1)):
            yield from self._batch(seed, range(start, min(start + batch, first + n)), first, watch)

    @torch.no_grad()
    def _batch(self, seed: int, samples: Sequence[int], first: int, watch: Watch | None) -> Iterator[NewText]:
        """Yield the text of a batch, up to the length or the end of the document.

        Whole blocks of a prompt are the context, and the block in which it ends is completed. Noise depends on the seed, the
        sample and the number of the block alone.
        """
        size, device = self.token_len, self.writer.device
        prompts = [self.prompt_of(sample - first) for sample in samples]
        heads = [list(prompt[len(prompt) - len(prompt) % size :]) for prompt in prompts]  # they begin a block, not filling it
        context = self._context([prompt[: len(prompt) - len(head)] for prompt, head in zip(prompts, heads, strict=True)])
        written = [0] * len(heads)
        block = 0
        while samples:
            rows = [[*head, *[FREE] * (size - len(head))] for head in heads]
            fixed_BL = torch.tensor(rows, device=device) if any(heads) else None
            # Without a guide or given ids, no gradient is needed.
            guided = fixed_BL is not None or self.guidance.guide is not None
            guidance = replace(self.guidance, end_id=self.end_id) if guided else None
            noise, watcher = RowNoise(seed, samples, block, device), watch if samples[0] == first else None
            tokens_BL = self.writer.sample(self.options, noise, watcher, fixed_BL, guidance, context, self.scale)
            going = []
            for i, (sample, row) in enumerate(zip(samples, tokens_BL.tolist(), strict=True)):
                ids = row[len(heads[i]) :]
                ended = self.end_id in ids
                ids = (ids[: ids.index(self.end_id)] if ended else ids)[: self.length - written[i]]
                written[i] += len(ids)
                last = ended or written[i] >= self.length
                yield NewText(sample, ids, last)
                going += [] if last else [i]
            samples, heads, written = [samples[i] for i in going], [[] for _ in going], [written[i] for i in going]
            if samples:
                kept = torch.tensor(going, device=device)
                z_BND = self.encode(tokens_BL[kept])
                z_BCD = torch.cat([context.z_BCD[kept][:, z_BND.shape[1] :], z_BND], dim=1)  # without the oldest block
                context = Context(z_BCD, context.present_BC[kept])
            block += 1

    def _context(self, texts: Sequence[Sequence[int]]) -> Context:
        """Return the latents of the last K blocks of texts that are whole blocks long; before a text they are zero."""
        m, size, device = self.writer.config.model, self.token_len, self.writer.device
        z_BKND = torch.zeros(len(texts), m.context_blocks, m.latent_len, m.latent_dim, device=device)
        written_BK = torch.zeros(z_BKND.shape[:2], dtype=torch.bool, device=device)
        for i, text in enumerate(texts):
            written_BK[i, m.context_blocks - min(m.context_blocks, len(text) // size) :] = True
        if written_BK.any():
            seen = [text[-m.context_blocks * size :] for text in texts]
            rows = torch.tensor([i for text in seen for i in text], device=device).view(-1, size)
            z_BKND[written_BK] = self.encode(rows)
        z_BCD = z_BKND.flatten(1, 2)
        return Context(z_BCD, torch.ones(z_BCD.shape[:2], dtype=torch.bool, device=device))
