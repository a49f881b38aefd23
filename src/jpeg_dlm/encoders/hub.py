"""Loading a transformers model by hub name or folder so that its absence is told in seconds, not after many retries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jpeg_dlm.errors import AssetError, reason_of

T = TypeVar("T")
HUB_SECONDS = 10.0


def load_pretrained(load: Callable[[dict[str, Any]], T], name: str, revision: str, what: str, remedy: str) -> T:
    """`load(options for from_pretrained)`: from a folder or the local cache when there, else from the hub.

    `what` ("the encoder") and `remedy` complete the sentence of the AssetError. No code of the repository is ever run.
    """
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    folder = Path(name).is_dir()
    if revision and not folder:
        options["revision"] = revision
    try:
        try:
            return load(options)
        except Exception:  # not cached, or damaged: the hub may have it
            if folder:
                raise
        _ask_hub(name, revision)
        return load({**options, "local_files_only": False})
    except Exception as error:  # the loader raises whatever its many backends raise
        raise AssetError(f"Cannot load {what} '{name}' ({reason_of(error)}): {remedy}") from error


def _ask_hub(name: str, revision: str) -> None:
    """One request with a deadline: the download functions would retry for half a minute on a machine without network."""
    from huggingface_hub import HfApi

    HfApi().model_info(name, revision=revision or None, timeout=HUB_SECONDS)
