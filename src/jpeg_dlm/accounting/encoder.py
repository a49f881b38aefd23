"""Parameters and operations of frozen text encoders by their published sizes: a plan needs no file of theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jpeg_dlm.config import Config


@dataclass(frozen=True)
class EncoderSize:
    """A transformer encoder; `inner` is the width inside its feed-forward network, which has so many `matrices`."""

    layers: int
    width: int
    attention: int
    inner: int
    matrices: int
    vocabulary: int

    def parameters(self) -> int:
        """Return the numbers in matrices and embedding; norms and position biases are next to nothing."""
        return self.layers * self._layer() + self.vocabulary * self.width

    def macs(self, tokens: int) -> int:
        """Return the operations of one text."""
        return self.layers * (tokens * self._layer() + 2 * tokens**2 * self.attention)

    def _layer(self) -> int:
        return 4 * self.width * self.attention + self.matrices * self.width * self.inner


T5_SIZES = {  # their published configurations
    "t5-small": EncoderSize(6, 512, 512, 2048, 2, 32_128),
    "flan-t5-small": EncoderSize(8, 512, 384, 1024, 3, 32_128),
}


def encoder_size(config: Config) -> EncoderSize | None:
    """Return the size of a config's encoder; None for one of another name, whose size is known only to its files."""
    encoder = config.encoder
    if encoder.kind in ("small", "random"):
        inner = 8 * math.ceil(encoder.feature_dim / 3)
        ids = config.data.vocab_size + 1
        return EncoderSize(encoder.depth, encoder.feature_dim, encoder.feature_dim, inner, 3, ids)
    return T5_SIZES.get(encoder.name.rsplit("/", 1)[-1] if encoder.kind == "hf" else encoder.kind)
