"""Spans of tokens that latents stand for in the causal codec, and the attention masks that follow from them.

Every position has the number of a span: latent n has n, a token that of its span, a prefix NO_SPAN. A position attends to all
positions whose number is not larger than its own. So latent n depends on the tokens up to the end of its span, and a token
depends on the latents up to the one of its span.
Shapes: B batch, L tokens, N latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_SPAN = -1  # of positions that all others attend to, and that attend to themselves alone


def span_ends(token_len: int, latent_len: int) -> list[int]:
    """Return where the span of each latent ends, exclusive: (n + 1) L / N, rounded down."""
    return [(n + 1) * token_len // latent_len for n in range(latent_len)]


def token_spans(token_len: int, latent_len: int) -> Tensor:
    """Return the number of the span (L) of each token."""
    return torch.searchsorted(torch.tensor(span_ends(token_len, latent_len)), torch.arange(token_len), right=True)


def visible(queries_Q: Tensor, keys_K: Tensor) -> Tensor:
    """Return the attention mask (Q, K), True where the span of a key is not after that of a query."""
    return keys_K <= queries_Q[:, None]


def compressor_mask(token_len: int, latent_len: int) -> Tensor:
    """Return the mask (N, N + L) of latents that attend to latents and to tokens."""
    latents_N = torch.arange(latent_len)
    return visible(latents_N, torch.cat([latents_N, token_spans(token_len, latent_len)]))


def decompressor_mask(token_len: int, latent_len: int) -> Tensor:
    """Return the mask (L, N + L) of tokens that attend to latents and to tokens."""
    spans_L = token_spans(token_len, latent_len)
    return visible(spans_L, torch.cat([torch.arange(latent_len), spans_L]))


def sequence_mask(prefix: int, latent_len: int) -> Tensor:
    """Return the mask (S, S) of latents behind a prefix."""
    spans_S = torch.cat([torch.full((prefix,), NO_SPAN), torch.arange(latent_len)])
    return visible(spans_S, spans_S)


def complete_spans(given_BL: Tensor, latent_len: int) -> tuple[Tensor, Tensor]:
    """Return masks of the latents (B, N) whose span and all before it are given, and of the tokens (B, L) of these spans."""
    ends = torch.tensor(span_ends(given_BL.shape[1], latent_len), device=given_BL.device)
    there_BN = given_BL.long().cumprod(1).bool()[:, ends - 1]
    return there_BN, there_BN[:, token_spans(given_BL.shape[1], latent_len).to(given_BL.device)]
