"""Save, upload and download models with the Hugging Face hub.

Separate from `api`, because importing huggingface_hub takes as long as writing a few texts and most users do not need it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, snapshot_download

from jpeg_dlm.errors import AssetError, UsageError, reason_of
from jpeg_dlm.folders.model_folder import ENCODER_FILES, MODEL_FILES, ModelParts, read_model, write_model


class HubModel(ModelHubMixin, library_name="jpeg-dlm", license="mit", tags=["text-generation", "diffusion"]):
    """The parts of a model with the methods of the hub's mixin; `scratch` holds the files that are read on first use."""

    def __init__(self, parts: ModelParts, scratch: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.parts, self.scratch = parts, scratch

    def _save_pretrained(self, save_directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_model(self.parts, Path(scratch) / "model")
            for file in folder.iterdir():
                shutil.copyfile(file, save_directory / file.name)

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, revision: str | None, cache_dir: Any, force_download: bool, local_files_only: bool,
        token: Any, **kwargs: Any,
    ) -> HubModel:  # fmt: skip
        if kwargs.keys() - {"config", "proxies", "resume_download"}:
            raise UsageError(f"Unknown argument '{min(kwargs)}' of from_pretrained.")
        folder = Path(model_id)
        if not folder.is_dir():
            try:
                folder = Path(snapshot_download(
                    model_id, revision=revision, cache_dir=cache_dir, force_download=force_download,
                    local_files_only=local_files_only, token=token,
                ))  # fmt: skip
            except (OSError, ValueError) as error:  # no network, no such repository, or an invalid name
                raise AssetError(
                    f"Cannot fetch the model '{model_id}' ({reason_of(error)}): check the network, or name a folder."
                ) from error
        # A repository also holds a model card, and the hub's cache holds links; a model folder must hold neither.
        scratch = tempfile.TemporaryDirectory(prefix="jpeg-dlm-")
        for name in (*MODEL_FILES, *ENCODER_FILES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(scratch.name) / name)
        return cls(read_model(Path(scratch.name)), scratch)
