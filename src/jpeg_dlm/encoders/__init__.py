"""Frozen text encoders behind one interface: `build_encoder(config, vocab_size)` returns a map from token ids to features."""

from jpeg_dlm.encoders.frozen import FrozenEncoder, build_encoder
from jpeg_dlm.encoders.small import SmallEncoder

__all__ = ["FrozenEncoder", "SmallEncoder", "build_encoder"]
