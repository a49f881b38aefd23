"""Load a transformers model by hub name or folder, and report a missing one in seconds instead of after many retries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jpeg_dlm.errors import AssetError, reason_of

T = TypeVar("T")
HUB_SECONDS = 10.0


def load_pretrained(load: Callable[[dict[str, Any]], T], name: str, revision: str, what: str, remedy: str) -> T:
    """Call `load(options for from_pretrained)` for a folder or the local cache, else for the hub, whose code is never run."""
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    folder = Path(name).is_dir()
    if revision and not folder:
        options["revision"] = revision
    try:
        try:
            return load(options)
        except Exception:  # not cached or damaged: try the hub
            if folder:
                raise
        _ask_hub(name, revision)
        return load({**options, "local_files_only": False})
    except Exception as error:  # the many backends of the loader raise any kind of error
        raise AssetError(f"Cannot load {what} '{name}' ({reason_of(error)}): {remedy}") from error


def _ask_hub(name: str, revision: str) -> None:
    """Send one request with a deadline, because the download functions retry for half a minute without a network."""
    from huggingface_hub import HfApi

    HfApi().model_info(name, revision=revision or None, timeout=HUB_SECONDS)
