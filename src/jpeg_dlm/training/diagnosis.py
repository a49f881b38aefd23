"""Diagnostic measures of latents and samples, computed at every evaluation of a run.

For methods that denoise latents: the error of one prediction relative to the best linear denoiser, the tokens of the decoded
prediction, and effective ranks; for contextual token decoders, how far they go by the latents. For every method: known words,
trigram perplexity, distinct word pairs and copied text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from jpeg_dlm.flow.latent_sampler import grid_of
from jpeg_dlm.methods.base import Batch, Latents, Method
from jpeg_dlm.methods.common.decoder_gap import decoder_measures
from jpeg_dlm.methods.common.denoising import compare_denoisers, fit_linear_denoiser, ranks
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.known_text import KnownText, spread
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.metrics import DIAGNOSIS

TEXTS = 64  # samples for the measures of text
FIT_ROWS = 2048  # training rows that the linear denoiser is fitted to (assumed: at least twice its coordinates)
FIT_NUMBERS = 1 << 27  # most numbers in the latents of those rows: half a gigabyte
HELDOUT_ROWS = 64  # fixed rows on which predictions are compared (assumed: enough to follow a run; the study takes more)
ROWS_AT_ONCE = 32


class Diagnosis:
    """Computes the diagnostic measures of a run; statistics of its text are computed once, when first needed."""

    def __init__(
        self, stream: BatchStream, heldout: Blocks, tokenizer: TextTokenizer, fit_rows: int = FIT_ROWS,
        heldout_rows: int = HELDOUT_ROWS,
    ) -> None:  # fmt: skip
        self.stream, self.heldout, self.tokenizer = stream, heldout, tokenizer
        self.fit_rows, self.heldout_rows = fit_rows, min(heldout_rows, len(heldout))

    @cached_property
    def known(self) -> KnownText:
        return KnownText(self.stream.blocks, self.heldout, self.tokenizer)

    def __call__(self, method: Method, rows_BL: Tensor) -> dict[str, float]:
        """Return all measures of a method and its samples, by their names in `metrics.jsonl`."""
        was_training = method.training
        method.eval()
        found = self.latents(method) | self.texts(rows_BL.cpu().numpy())
        method.train(was_training)
        return {f"{DIAGNOSIS}{name}": value for name, value in found.items()}

    @torch.no_grad()
    def latents(self, method: Method) -> dict[str, float]:
        """Measure the latents and their denoiser; return an empty dict for methods without one."""
        first = method.latent_space(self.stream.batch([0]))
        if first is None or first.predict is None or not self.heldout_rows:
            return {}
        rows = spread(len(self.stream.blocks), min(self.fit_rows, max(2, FIT_NUMBERS // first.z_BND.numel())))
        parts = (rows[i : i + ROWS_AT_ONCE].tolist() for i in range(0, len(rows), ROWS_AT_ONCE))
        z_SND = torch.cat([self.space(method, self.stream.batch(part)).z_BND for part in parts])
        linear = fit_linear_denoiser(z_SND)
        found = compare_denoisers(self.heldout_parts(method), linear) | ranks(z_SND, linear)
        return found | (self.decoder(method) if first.logits else {})

    def decoder(self, method: Method) -> dict[str, float]:
        """Measure a contextual token decoder on latents of held-out text and on as many generated ones."""
        latent = method.latent_sampler
        assert latent is not None  # what has such a decoder generates latents
        data, sampler = latent.config.data, latent.config.sampler

        def generated(noise: RowNoise, like_BND: Tensor) -> Tensor:
            z_BND = noise.normal("sample", *like_BND.shape[1:])
            return latent.latents(z_BND, grid_of(sampler, noise.shared("grid")).tolist(), sampler, noise=noise)

        def is_text(tokens_BL: Tensor) -> Tensor:
            ends_BL = (tokens_BL == self.tokenizer.eos_id).long() * data.rows_end
            return ends_BL.cumsum(1) <= ends_BL  # up to the first end token

        parts = self.heldout_parts(method)
        return decoder_measures(((space, batch, generated(noise, space.z_BND)) for space, batch, noise in parts), is_text)

    def heldout_parts(self, method: Method) -> Iterator[tuple[Latents, Batch, RowNoise]]:
        """Yield the first held-out rows with fixed noise."""
        device = self.stream.device
        for start in range(0, self.heldout_rows, ROWS_AT_ONCE):
            rows = range(start, min(start + ROWS_AT_ONCE, self.heldout_rows))
            tokens_BL = self.heldout.rows(list(rows)).to(device)
            batch = Batch(tokens_BL, self.heldout.mask(tokens_BL))
            yield self.space(method, batch), batch, RowNoise(0, rows, 0, device)

    @staticmethod
    def space(method: Method, batch: Batch) -> Latents:
        found = method.latent_space(batch)
        assert found is not None
        return found

    def texts(self, rows_BL: np.ndarray) -> dict[str, float]:
        """Measure samples, real rows and shuffled real rows against the training text."""
        known = self.known
        found = vars(known.measure(known.cut(rows_BL)))
        if known.real is None or known.shuffled is None:
            return found
        real = {f"{name}_real": value for name, value in vars(known.real).items()}
        same_number = known.cut(self.heldout.rows(range(min(len(rows_BL), len(self.heldout)))).numpy())
        return found | real | {"distinct_real": known.distinct(same_number), "trigram_shuffled": known.shuffled}
