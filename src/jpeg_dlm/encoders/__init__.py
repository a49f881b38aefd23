"""Frozen text encoders behind one interface: `build_encoder(config, vocab_size)` returns a map from token ids to features."""

from jpeg_dlm.encoders.build import FrozenSmallEncoder, build_encoder
from jpeg_dlm.encoders.frozen import FrozenEncoder, load_statistics, measure_statistics, save_statistics
from jpeg_dlm.encoders.small import SmallEncoder, load_small_encoder, save_small_encoder

__all__ = [
    "FrozenEncoder",
    "FrozenSmallEncoder",
    "SmallEncoder",
    "build_encoder",
    "load_small_encoder",
    "load_statistics",
    "measure_statistics",
    "save_small_encoder",
    "save_statistics",
]
