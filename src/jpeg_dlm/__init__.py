"""JPEG-DLM: text through a short, jointly learned latent sequence.

`load` and `Model` come from `jpeg_dlm.api`, imported on first use so that `import jpeg_dlm` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpeg_dlm.api import Model, load

__all__ = ["Model", "__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Model", "load"):
        from jpeg_dlm import api

        return getattr(api, name)
    raise AttributeError(f"module 'jpeg_dlm' has no attribute '{name}'")
