"""Save, upload and download models with the Hugging Face hub.

Separate from `api`, because importing huggingface_hub takes as long as writing a few texts and most users do not need it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download

from jpeg_dlm.errors import AssetError, UsageError, reason_of
from jpeg_dlm.fetch.assets import ASSETS
from jpeg_dlm.folders.model_folder import (
    ENCODER_FILES,
    MODEL_FILES,
    ModelParts,
    is_bundled,
    read_model,
    without_paths,
    write_model,
)
from jpeg_dlm.text.corpora import CARRIED, HUB_SETS

CARD = """---
{metadata}
---

# {title} on {source}

{title} trained on `{source}` with jpeg-dlm: rows of {token_len} tokens, sampled with {sampler}.

```python
from jpeg_dlm import Model

Model.from_pretrained("REPOSITORY").generate(4, seed=0)
```

## Intended use and limits
Research on diffusion language models. The model knows its training text only. It is neither aligned nor filtered, and may write
false or offensive text or repeat its training text.

## Training data
{data}

## Evaluation
`jpeg-dlm evaluate MODEL -n 1000` prints Gen-PPL, entropy and MAUVE beside real and shuffled text. Add its table here.
"""


class HubModel(ModelHubMixin):
    """The parts of a model with the methods of the hub's mixin; `scratch` holds the files that are read on first use."""

    def __init__(self, parts: ModelParts, scratch: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.parts, self.scratch = parts, scratch

    def _save_pretrained(self, save_directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_model(self.parts, Path(scratch) / "model")
            for file in folder.iterdir():
                shutil.copyfile(file, save_directory / file.name)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return a card with the hub's metadata, extended or replaced by `kwargs` (`model_card_kwargs`)."""
        config = without_paths(self.parts)
        metadata: dict[str, Any] = {"library_name": "jpeg-dlm", "pipeline_tag": "text-generation"}
        metadata["tags"] = [config.method, "diffusion", "language-model"]
        source = config.data.source
        name = source.split(":")[0]
        data = f"`{source}`: describe this text here, with its license and credit."
        if asset := ASSETS.get("stories15m" if name == "stories" else CARRIED.get(name, "")):
            metadata["language"] = "en"
            data = f"`{source}`: {asset.credit} ({asset.license})."
        if name == "captions":
            metadata["datasets"] = ["stanfordnlp/snli"]
        elif name == "hf" or name in HUB_SETS:
            metadata["datasets"] = [HUB_SETS.get(name, source.removeprefix("hf:")).split(":")[0]]
        if is_bundled(self.parts.origin):
            metadata["license"] = "mit"
        text = CARD.format(
            metadata=ModelCardData(**(metadata | kwargs)).to_yaml(), title=self.parts.method.title, source=source,
            token_len=config.data.token_len, sampler=config.sampler.label(), data=data,
        )  # fmt: skip
        return ModelCard(text)

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
