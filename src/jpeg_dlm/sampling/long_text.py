"""Long texts: block after block, each after the clean latents of the blocks before it, at the same cost for each block.

The context of a block is the text itself, encoded again: a text goes on in the same way wherever it came from.
Shapes: B batch, L tokens, N latents, K blocks of context, C = K N latents of the context, D latent width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpeg_dlm.flow.control import Control
from jpeg_dlm.flow.latent_sampler import LatentSampler, Watch, together
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.methods.base import FREE
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.rng import RowNoise


@dataclass(frozen=True)
class NewText:
    """New ids of one sample; `last` if its text ends with them."""

    sample: int
    ids: list[int]
    last: bool


@dataclass(frozen=True)
class BlockWriter:
    """Writes texts of any length with a model that has a context."""

    writer: LatentSampler
    encode: Callable[[Tensor], Tensor]  # full rows (B, L) to their clean standardized latents (B, N, D)
    end_id: int
    scale: float = 1.0  # guidance over the context
    control: Control = Control()  # of every block; given tokens follow its strength

    @torch.no_grad()
    def pieces(
        self, sampler: SamplerConfig, seed: int, samples: Sequence[int], prompts: Sequence[Sequence[int]], length: int,
        watch: Watch | None = None, decoded: Watch | None = None,
    ) -> Iterator[NewText]:  # fmt: skip
        """Yield the text of samples after their prompts, block by block, up to `length` ids or the end of the document.

        Whole blocks of a prompt are the context, and the block in which it ends is completed. Noise depends on the seed, the
        sample and the number of the block alone. `watch` sees the first sample, `decoded` the blocks that prompts begin.
        """
        first, size = samples[0], self.writer.config.data.token_len
        heads = [head_of(prompt, size) for prompt in prompts]
        context = self.context([prompt[: len(prompt) - len(head)] for prompt, head in zip(prompts, heads, strict=True)])
        block = 0
        written = [0] * len(heads)
        while samples:
            noise = RowNoise(seed, samples, block, self.writer.device)
            seen = together(watch if samples[0] == first else None, decoded if any(heads) else None)
            tokens_BL = self.block(sampler, noise, seen, context, given_rows(heads, size, self.writer.device))
            going = []
            for i, (sample, row) in enumerate(zip(samples, tokens_BL.tolist(), strict=True)):
                ids = row[len(heads[i]) :]
                ended = self.end_id in ids
                ids = (ids[: ids.index(self.end_id)] if ended else ids)[: length - written[i]]
                written[i] += len(ids)
                last = ended or written[i] >= length
                yield NewText(sample, ids, last)
                going += [] if last else [i]
            samples, heads, written = [samples[i] for i in going], [[] for _ in going], [written[i] for i in going]
            if samples:
                kept = torch.tensor(going, device=self.writer.device)
                context = moved(context.of(kept), self.encode(tokens_BL[kept]))
            block += 1

    def block(
        self, sampler: SamplerConfig, noise: RowNoise, watch: Watch | None, context: Context, given_BL: Tensor | None
    ) -> Tensor:
        """Return one block (B, L) after a context, which keeps the given ids; without a guide or given ids, no gradient."""
        writer, control = self.writer.after(context, self.scale), replace(self.control, end_id=self.end_id)
        steered = given_BL is not None or control.guide is not None
        return writer.sample(sampler, noise, watch, given_BL, control if steered else None)

    def context(self, texts: Sequence[Sequence[int]]) -> Context:
        """Return the latents of the last K blocks of texts that are whole blocks long; before a text they are zero."""
        data, m, device = self.writer.config.data, self.writer.config.model, self.writer.device
        z_BKND = torch.zeros(len(texts), m.context_blocks, m.latent_len, m.latent_dim, device=device)
        written_BK = torch.zeros(z_BKND.shape[:2], dtype=torch.bool, device=device)
        for i, text in enumerate(texts):
            written_BK[i, m.context_blocks - min(m.context_blocks, len(text) // data.token_len) :] = True
        if written_BK.any():
            seen = [text[-m.context_blocks * data.token_len :] for text in texts]
            rows = torch.tensor([i for text in seen for i in text], device=device).view(-1, data.token_len)
            z_BKND[written_BK] = self.encode(rows)
        z_BCD = z_BKND.flatten(1, 2)
        return Context(z_BCD, torch.ones(z_BCD.shape[:2], dtype=torch.bool, device=device))


def head_of(prompt: Sequence[int], size: int) -> list[int]:
    """Return the ids of a prompt that begin a block and do not fill it."""
    return list(prompt[len(prompt) - len(prompt) % size :])


def given_rows(heads: Sequence[Sequence[int]], size: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return rows (B, L) that begin with these ids; None if there are none."""
    if not any(heads):
        return None
    return torch.tensor([[*head, *[FREE] * (size - len(head))] for head in heads], device=device)


def moved(context: Context, z_BND: Tensor) -> Context:
    """Return the context one block later: without its oldest block, and with this one."""
    return Context(torch.cat([context.z_BCD[:, z_BND.shape[1] :], z_BND], dim=1), context.present_BC)
