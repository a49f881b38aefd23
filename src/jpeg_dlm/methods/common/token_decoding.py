"""From decompressed features to tokens: W at each position (paper), or W behind a contextual decoder, and their losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.machine.collectives import all_mean
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel, JpegDlmObjective
from jpeg_dlm.nn.token_decoder import AutoregressiveDecoder, TokenDecoder, TokenProjection, TwoPassDecoder
from jpeg_dlm.nn.token_loss import linear_cross_entropy
from jpeg_dlm.rng import RowNoise


def build_token_decoder(config: Config) -> TokenDecoder | None:
    """Return the contextual decoder between D and W; None for the paper's position-wise projection."""
    m: JpegDlmModel = config.model
    if m.decoder == "projection":
        return None
    kind = AutoregressiveDecoder if m.decoder == "autoregressive" else TwoPassDecoder
    return kind(
        config.encoder.feature_dim, m.proj_dim, m.decoder_width, m.decoder_layers, m.codec_heads, m.dropout, m.decoder_corrupt
    )  # fmt: skip


@dataclass(frozen=True)
class TokenReader:
    """W, and the contextual decoder before it, if there is one."""

    W: TokenProjection
    decoder: TokenDecoder | None
    objective: JpegDlmObjective

    def logits(self, hhat: Tensor, given_BL: Tensor | None = None) -> Tensor:
        """Return logits that are differentiable in the features; a contextual decoder reads given ids in place of its own."""
        return self.W(hhat) if self.decoder is None else self.decoder.logits(hhat, self.W, given_BL)

    def tokens(self, hhat: Tensor, given_BL: Tensor | None = None) -> Tensor:
        """Return the most probable tokens."""
        return self.W(hhat).argmax(-1) if self.decoder is None else self.decoder.written(hhat, self.W, given_BL)

    def corrected(self, hhat: Tensor, tokens_BL: Tensor, noise: RowNoise | None = None) -> Tensor:
        """Return the features for W under teacher forcing; the two-pass decoder reads its own tokens."""
        return hhat if self.decoder is None else self.decoder(hhat, tokens_BL, self.W, noise)

    # ------------------------------------------------------------ losses

    def losses(self, hhat: Tensor, batch: Batch, noise: RowNoise | None = None) -> dict[str, Tensor]:
        """Return the token loss `ce`, and that of W alone, `ce_first`, if there is a contextual decoder."""
        terms = {"ce": self.loss(hhat, batch, noise)}
        return terms if self.decoder is None else terms | {"ce_first": self._mean_nll(self._read(hhat), batch)}

    def loss(self, hhat: Tensor, batch: Batch, noise: RowNoise | None = None, rows_B: Tensor | None = None) -> Tensor:
        """Return the mean of -log p(token) over real tokens; rows outside `rows_B` count as zeros in the mean."""
        return self._mean_nll(self.corrected(self._read(hhat), batch.tokens_BL, noise), batch, rows_B)

    def late_loss(self, hhat: Tensor, t: Tensor, batch: Batch, noise: RowNoise | None = None) -> Tensor:
        """Return the token loss of rows with t in [ce_time_min, 1], as a share of the mean over all rows or as their mean."""
        late = t >= self.objective.ce_time_min
        loss = self.loss(hhat, batch, noise, late)
        if self.objective.ce_time_mean == "all":
            return loss
        share = (batch.token_shares * late[:, None]).sum()
        return loss / all_mean(share).clamp_min(torch.finfo(share.dtype).tiny)

    def _read(self, hhat: Tensor) -> Tensor:
        """Return the features without a gradient if the token loss must not train the codec."""
        return hhat if self.objective.ce_to_codec else hhat.detach()

    def _mean_nll(self, hhat: Tensor, batch: Batch, rows_B: Tensor | None = None) -> Tensor:
        share_BL = batch.token_shares if rows_B is None else batch.token_shares * rows_B[:, None]
        x, head = F.gelu(self.W.inner(hhat)).flatten(0, 1), self.W.head
        tokens, chunk = batch.tokens_BL.flatten(), self.objective.ce_chunk
        return linear_cross_entropy(x, head.weight, head.bias, tokens, share_BL.flatten(), chunk)
