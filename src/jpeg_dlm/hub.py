"""Save, upload and download models with the Hugging Face hub; importing huggingface_hub takes long, so `api` does it late."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download

from jpeg_dlm.checkpoints import model_folder
from jpeg_dlm.checkpoints.model_folder import BUNDLED_FOLDER, ModelParts, portable_config, read_model, write_model
from jpeg_dlm.text.download import ASSETS
from jpeg_dlm.text.sources import HUB_SETS
from jpeg_dlm.util.errors import AssetError, UsageError, reason_of

CARD = """---
{metadata}
---

# {title} on {source}

{title} trained on `{source}` with jpeg-dlm: rows of {token_len} tokens, sampled with {sampler}.

```python
{usage}
```

## Intended use and limits
Research on diffusion language models. The model knows its training text only. It is neither aligned nor filtered, and may write
false or offensive text or repeat its training text.

## Training data
{data}

## Evaluation
`jpeg-dlm evaluate MODEL -n 1000` prints Gen-PPL, entropy and MAUVE beside real and shuffled text. Add its table here.
"""
USAGE = """from jpeg_dlm import Model

Model.from_pretrained("REPOSITORY").generate(4, seed=0)"""
DOWNLOAD = {"revision", "cache_dir", "force_download", "local_files_only", "token"}
IGNORED = {"config", "proxies", "resume_download"}  # arguments of the mixin that have no meaning here


class HubModel(ModelHubMixin):
    """The parts of a model with the methods of the hub's mixin."""

    def __init__(self, parts: ModelParts) -> None:
        self.parts = parts

    def _save_pretrained(self, save_directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copytree(write_model(self.parts, Path(scratch) / "model"), save_directory, dirs_exist_ok=True)

    def generate_model_card(self, *args: Any, usage: str = USAGE, **kwargs: Any) -> ModelCard:
        """Return a card with code to use and the hub's metadata, extended or replaced by `kwargs` (`model_card_kwargs`)."""
        config = portable_config(self.parts)
        source = config.data.source
        name, data = source.split(":")[0], f"`{source}`: describe this text here, with its license and credit."
        tags = [config.method, "diffusion", "language-model"]
        metadata: dict[str, Any] = {"library_name": "jpeg-dlm", "pipeline_tag": "text-generation", "tags": tags}
        if asset := ASSETS.get(name):
            metadata["language"] = "en"
            data = f"`{source}`: {asset.credit} ({asset.license})."
        if hub_set := (HUB_SETS | {"captions": "stanfordnlp/snli", "hf": source.removeprefix("hf:")}).get(name):
            metadata["datasets"] = [hub_set.split(":")[0]]
        if self.parts.origin == BUNDLED_FOLDER:
            metadata["license"] = "mit"
        text = CARD.format(
            metadata=ModelCardData(**(metadata | kwargs)).to_yaml(),
            title=self.parts.method.title,
            usage=usage,
            source=source,
            token_len=config.data.token_len,
            sampler=config.sampler.label(),
            data=data,
        )
        return ModelCard(text)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> HubModel:
        options = {name: value for name, value in options.items() if name not in IGNORED}
        if unknown := options.keys() - DOWNLOAD:
            raise UsageError(f"Unknown argument '{min(unknown)}' of from_pretrained.")
        folder = Path(model_id)
        if not folder.is_dir():
            try:
                folder = Path(snapshot_download(model_id, **options))
            except (OSError, ValueError) as error:  # no network, no such repository, or an invalid name
                sentence = f"Cannot fetch the model '{model_id}' ({reason_of(error)}): check the network, or name a folder."
                raise AssetError(sentence) from error
        # A repository also holds a model card, and the hub's cache holds links; a model folder must hold neither.
        scratch = tempfile.TemporaryDirectory(prefix="jpeg-dlm-")
        for name in (*model_folder.MODEL_FILES, *model_folder.ENCODER_FILES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(scratch.name) / name)
        return cls(replace(read_model(Path(scratch.name)), scratch=scratch))  # some files are read on first use
