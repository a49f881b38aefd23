"""The folder for what is fetched or measured once per machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: $JPEG_DLM_CACHE, else ~/.cache/jpeg-dlm."""
    named = os.environ.get("JPEG_DLM_CACHE")
    return Path(os.path.expanduser(named or "~/.cache/jpeg-dlm"))  # Path.expanduser fails for a user without a home
