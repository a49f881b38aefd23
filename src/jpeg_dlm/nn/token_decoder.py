"""Contextual token decoders: a small Transformer corrects the decompressed features by the tokens around each position.

`AutoregressiveDecoder` reads all features and the tokens before a position (CoDAR, 2603.02547). `TwoPassDecoder` reads the
tokens that the position-wise projection W finds in a first pass, on both sides. Both return features for W, whose rows also
embed the tokens. Their last layer starts at zero, so that an untrained decoder is W alone.
Shapes: B batch, L tokens, F feature width, P inner width of W, H hidden width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import logit_rows
from jpeg_dlm.nn.ddit import DditBlock, KvCache, Norm, rotary_table, zero_linear
from jpeg_dlm.rng import RowNoise

MLP_RATIO = 4.0  # as in the DiT and the codec (assumed)


@dataclass(frozen=True)
class TokenProjection:
    """W: features to logits through two linears and a GELU; the rows of the last one embed tokens."""

    inner: nn.Linear
    head: nn.Linear

    def __call__(self, h: Tensor) -> Tensor:
        return self.head(F.gelu(self.inner(h)))

    @torch.no_grad()
    def most_probable(self, h_BLF: Tensor) -> Tensor:
        """Return the most probable ids (B, L), with the logits of a few positions at a time."""
        parts = h_BLF.flatten(0, 1).split(logit_rows(0, self.head.out_features))
        return torch.cat([self(part).argmax(-1) for part in parts]).view(h_BLF.shape[:2])

    def embedded(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.head.weight)


def corrupted_ids(tokens_BL: Tensor, share: float, vocab: int, noise: RowNoise) -> Tensor:
    """Return tokens of which each is replaced with this probability by an id that is uniform over the vocabulary."""
    u_BL = noise.uniform("decoder_corrupt", tokens_BL.shape[1])
    random_BL = (u_BL / share * vocab).long().clamp_max(vocab - 1)  # below `share`, the quotient is uniform on [0, 1)
    return torch.where(u_BL < share, random_BL, tokens_BL)


def with_given(tokens_BL: Tensor, given_BL: Tensor | None) -> Tensor:
    """Return tokens with the given ids in place (negative ones are free)."""
    return tokens_BL if given_BL is None else torch.where(given_BL < 0, tokens_BL, given_BL)


class TokenDecoder(nn.Module, ABC):
    """Features hhat plus a correction that depends on tokens; `corrupt` is the share of random tokens in training."""

    causal: bool

    def __init__(
        self, feature_dim: int, token_dim: int, hidden: int, layers: int, heads: int, dropout: float, corrupt: float
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.head_dim, self.corrupt = heads, hidden // heads, corrupt
        self.from_features = nn.Linear(feature_dim, hidden)
        self.from_token = nn.Linear(token_dim, hidden)
        nn.init.normal_(self.from_token.weight)  # assumed: W's rows have length 1/sqrt(3) at first, so both inputs weigh alike
        self.layers = nn.ModuleList(DditBlock(hidden, heads, MLP_RATIO, dropout, None, self.causal) for _ in range(layers))
        self.norm_final = Norm(hidden)
        self.out = zero_linear(hidden, feature_dim)

    def forward(self, hhat_BLF: Tensor, tokens_BL: Tensor, W: TokenProjection, noise: RowNoise | None = None) -> Tensor:
        """Return features whose logits predict `tokens_BL`; in training, a share of what the decoder reads is random."""
        read_BL = self.trained_on(hhat_BLF, tokens_BL, W)
        if self.training and noise is not None and self.corrupt:
            read_BL = corrupted_ids(read_BL, self.corrupt, W.head.out_features, noise)
        return self.corrected(hhat_BLF, read_BL, W)

    def logits(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None = None) -> Tensor:
        """Return logits (B, L, V) that are differentiable in the features.

        They depend on tokens without a gradient: those that the decoder finds itself, or the given ids (negative: free).
        """
        return W(self.corrected(hhat_BLF, self.own_reading(hhat_BLF, W, given_BL), W))

    @abstractmethod
    def trained_on(self, hhat_BLF: Tensor, tokens_BL: Tensor, W: TokenProjection) -> Tensor:
        """Return the ids that the decoder reads in training on text `tokens_BL`."""

    @abstractmethod
    def own_reading(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None) -> Tensor:
        """Return the ids that the decoder reads when it decodes."""

    @abstractmethod
    def written(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None = None) -> Tensor:
        """Return the most probable ids (B, L); given ids are read in place of the decoder's own, but not returned."""

    @abstractmethod
    def corrected(self, hhat_BLF: Tensor, read_BL: Tensor, W: TokenProjection) -> Tensor:
        """Return the features for W, given the ids that the decoder reads."""

    def through_layers(self, x: Tensor, cos: Tensor, sin: Tensor, cache: list[KvCache] | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, None, cos, sin, cache[i] if cache else None)
        return x

    def correction(self, x: Tensor) -> Tensor:
        return self.out(self.norm_final(x))


class AutoregressiveDecoder(TokenDecoder):
    """Causal over tokens: position i reads all features, its own once more, and the tokens before i.

    The features are a prefix. It is causal too, which costs them nothing: the decompressor has mixed them already.
    """

    causal = True

    def __init__(self, feature_dim: int, token_dim: int, *sizes: Any) -> None:
        super().__init__(feature_dim, token_dim, *sizes)
        self.start = nn.Parameter(torch.zeros(token_dim))

    def trained_on(self, hhat_BLF: Tensor, tokens_BL: Tensor, W: TokenProjection) -> Tensor:
        return tokens_BL

    def own_reading(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None) -> Tensor:
        return with_given(self.written(hhat_BLF, W, given_BL), given_BL)

    def corrected(self, hhat_BLF: Tensor, read_BL: Tensor, W: TokenProjection) -> Tensor:
        batch, length = read_BL.shape
        before_BLP = torch.cat([self.start.expand(batch, 1, -1), W.embedded(read_BL[:, :-1])], dim=1)
        f_BLH = self.from_features(hhat_BLF).float()
        cos, sin = (table.repeat(2, 1) for table in rotary_table(length, self.head_dim, hhat_BLF.device))
        x = self.through_layers(torch.cat([f_BLH, f_BLH + self.from_token(before_BLP)], dim=1), cos, sin)
        return hhat_BLF + self.correction(x[:, length:])

    @torch.no_grad()
    def written(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None = None) -> Tensor:
        batch, length, _ = hhat_BLF.shape
        f_BLH = self.from_features(hhat_BLF).float()
        shape = (batch, self.heads, 2 * length, self.head_dim)
        cache = [KvCache(f_BLH.new_zeros(shape), f_BLH.new_zeros(shape)) for _ in self.layers]
        self.through_layers(f_BLH, *rotary_table(length, self.head_dim, f_BLH.device), cache)
        before_BP, tokens = self.start.expand(batch, -1), []
        for i in range(length):
            x = f_BLH[:, i : i + 1] + self.from_token(before_BP)[:, None]
            x = self.through_layers(x, *rotary_table(1, self.head_dim, x.device, start=i), cache)
            own_B = W(hhat_BLF[:, i] + self.correction(x[:, 0])).argmax(-1)
            tokens.append(own_B)
            before_BP = W.embedded(with_given(own_B, None if given_BL is None else given_BL[:, i]))
        return torch.stack(tokens, dim=1)


class TwoPassDecoder(TokenDecoder):
    """Bidirectional: W finds tokens from the features alone, then every position reads all features and all these tokens."""

    causal = False

    def trained_on(self, hhat_BLF: Tensor, tokens_BL: Tensor, W: TokenProjection) -> Tensor:
        return W.most_probable(hhat_BLF)

    def own_reading(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None) -> Tensor:
        return with_given(W.most_probable(hhat_BLF), given_BL)

    def corrected(self, hhat_BLF: Tensor, read_BL: Tensor, W: TokenProjection) -> Tensor:
        x = self.from_features(hhat_BLF).float() + self.from_token(W.embedded(read_BL))
        x = self.through_layers(x, *rotary_table(read_BL.shape[1], self.head_dim, x.device))
        return hhat_BLF + self.correction(x)

    @torch.no_grad()
    def written(self, hhat_BLF: Tensor, W: TokenProjection, given_BL: Tensor | None = None) -> Tensor:
        return W.most_probable(self.corrected(hhat_BLF, self.own_reading(hhat_BLF, W, given_BL), W))
