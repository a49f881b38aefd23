"""GGUF model files: metadata, and tensors dequantized to fp32, by the package `gguf`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpeg_dlm.errors import AssetError, reason_of

MAX_READS = 2_000_000  # the package keeps an object per value; SmolLM2 with its 49 k tokens takes 0.25 million


@dataclass(frozen=True)
class GgufFile:
    """Metadata by key, and every tensor as fp32 with torch's axis order."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


def read_gguf(path: Path) -> GgufFile:
    """Return the whole file; damage and unknown tensor types are an AssetError."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    class Reader(GGUFReader):
        """Refuses what the package accepts: values beyond the end of the file, and any number of them."""

        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **named: Any) -> np.ndarray:
            self.reads += 1
            if offset + int(count) * np.dtype(dtype).itemsize > self.data.size or self.reads > MAX_READS:
                raise ValueError("it is cut short or has too many values")
            return super()._get(offset, dtype, count, *more, **named)

    try:
        file = Reader(path)
        # Tensors that shared bytes would let a small file ask for any amount of memory.
        if sum(tensor.n_bytes for tensor in file.tensors) > file.data.size:
            raise ValueError("its tensors are larger than the file")
        metadata = {key: field.contents() for key, field in file.fields.items() if not key.startswith("GGUF.")}
        return GgufFile(metadata, {t.name: np.array(dequantize(t.data, t.tensor_type), np.float32) for t in file.tensors})
    except Exception as error:  # whatever damage leads the package to
        raise AssetError(
            f"'{path}' is not a GGUF file this reader understands ({reason_of(error)}): fetch it again."
        ) from error
