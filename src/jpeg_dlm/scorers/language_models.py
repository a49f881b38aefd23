"""Language models that score text, and the names by which users choose them. Shapes: B batch, L tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.errors import AssetError, JpegDlmError, UsageError, reason_of
from jpeg_dlm.scorers.scoring import PAPER_SCORER_TOKENS, Scorer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from jpeg_dlm.config import Config
    from jpeg_dlm.machine.console import Console

ROWS_PER_CHUNK = 512  # rows of fp32 logits in one cross-entropy call


def _chunked_cross_entropy(states: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the NLL of `targets` (n) under `logits(states)` (n, V), computed in fp32 in chunks of rows."""
    pairs = zip(states.split(ROWS_PER_CHUNK), targets.split(ROWS_PER_CHUNK), strict=True)
    return torch.cat([F.cross_entropy(logits(h).float(), y, reduction="none") for h, y in pairs])


class LlamaScorer(Scorer):
    """A llama-style model loaded from a file."""

    model: LlamaForCausalLM
    tokenizer: Tokenizer

    def encode(self, text: str, max_tokens: int) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids[:max_tokens]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        # Attention is causal, so padding on the right needs no mask.
        return self.model.model(input_ids=tokens_BL, use_cache=False).last_hidden_state

    def token_nll(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        h_BLH, targets_BL = self.hidden_states(tokens_BL, mask_BL)[:, :-1], tokens_BL[:, 1:]
        return _chunked_cross_entropy(h_BLH.flatten(0, 1), targets_BL.flatten(), self.model.lm_head).view_as(targets_BL)


class StoriesScorer(LlamaScorer):
    """stories15M, trained on children's stories only: it suits no other text, and it wrote the corpus `stories` itself."""

    def __init__(self, device: str = "cpu", console: Console | None = None, precision: str = "auto") -> None:
        from jpeg_dlm.fetch.assets import ASSETS, fetch
        from jpeg_dlm.text.stories15m import BOS, NAME, load_stories15m

        super().__init__(device, precision)
        model, self.tokenizer, self.context = load_stories15m(fetch("stories15m", console=console))
        self.model = model.to(self.device)  # pyright: ignore[reportArgumentType] - transformers wraps it
        self.name, self.hash, self.bos_id, self.eos_id = NAME, ASSETS["stories15m"].member_sha256, BOS, BOS


class GgufScorer(LlamaScorer):
    """A llama-style model from a GGUF file; by default the pinned SmolLM2-135M-Instruct."""

    def __init__(
        self, path: Path | None = None, device: str = "cpu", console: Console | None = None, precision: str = "auto"
    ) -> None:
        from jpeg_dlm.fetch.assets import ASSETS
        from jpeg_dlm.files import sha256_file
        from jpeg_dlm.nn.llama import build_llama
        from jpeg_dlm.scorers.smollm2 import NAME, convert_gguf, load_smollm2

        super().__init__(device, precision)
        self.name = NAME if path is None else path.stem
        try:
            parts = load_smollm2(console) if path is None else convert_gguf(path)
            model, self.tokenizer = build_llama(parts.sizes, parts.state), parts.tokenizer
            self.model = model.to(self.device)  # pyright: ignore[reportArgumentType] - transformers wraps it
            self.context = parts.sizes["max_position_embeddings"]
            self.bos_id, self.eos_id = parts.sizes["bos_token_id"], parts.sizes["eos_token_id"]
            self._try()
        except JpegDlmError:
            raise
        except Exception as error:  # inconsistent metadata and tensors can raise any error
            raise AssetError(
                f"'{path or self.name}' cannot be used as a scorer ({reason_of(error)}): name another GGUF file."
            ) from error
        self.hash = ASSETS["smollm2"].member_sha256 if path is None else sha256_file(path)

    def _try(self) -> None:
        """Score two tokens, one of them the largest id, to check that the metadata fits the tensors."""
        last = self.tokenizer.get_vocab_size() - 1
        if self.context < 2 or not all(i is None or 0 <= i <= last for i in (self.bos_id, self.eos_id)):
            raise ValueError("invalid context length or special token")
        tokens_BL = torch.tensor([[0, last]], device=self.device)
        self.token_nll(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))


class TransformersScorer(Scorer):
    """Any causal language model of transformers, by hub name or folder; the paper uses gpt2-large."""

    def __init__(self, name: str, device: str = "cpu", precision: str = "auto") -> None:
        super().__init__(device, precision)
        import transformers

        from jpeg_dlm.encoders.frozen import tensors_sha256
        from jpeg_dlm.encoders.pretrained import load_pretrained

        def load(options: dict[str, Any]) -> tuple[Any, Any]:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
            return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(name, **options)

        remedy = "give a local folder as hf:FOLDER, or use the pinned package with --scorer smollm2."
        self.tokenizer, model = load_pretrained(load, name, "", "the scorer", remedy)
        self.model = model.float().eval().requires_grad_(False).to(self.device)
        self.name = Path(name).name if Path(name).is_dir() else name
        self.hash = tensors_sha256(self.model.state_dict())
        self.bos_id, self.eos_id = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        self.context = int(getattr(self.model.config, "max_position_embeddings", PAPER_SCORER_TOKENS))

    def encode(self, text: str, max_tokens: int) -> list[int]:
        # Truncating in the tokenizer instead of slicing avoids a warning for every long text.
        return self.tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_tokens).input_ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        # Skips the vocabulary head, which would take most of the time.
        inputs = {"input_ids": tokens_BL, "attention_mask": mask_BL.long(), "use_cache": False}
        return self.model.base_model(**inputs).last_hidden_state

    def token_nll(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens_BL, attention_mask=mask_BL.long(), use_cache=False).logits[:, :-1]
        targets_BL = tokens_BL[:, 1:]
        flat = logits.flatten(0, 1)
        return _chunked_cross_entropy(flat, targets_BL.flatten(), lambda chunk: chunk).view_as(targets_BL)


class ArScorer(Scorer):
    """A model of our own AR method; texts longer than its training rows are cut."""

    NO_TOKEN = -1  # stands for a start that is not in the vocabulary, which the model itself prepends to every row

    def __init__(self, path: Path, device: str = "cpu", precision: str = "auto") -> None:
        from jpeg_dlm.api import load
        from jpeg_dlm.encoders.frozen import tensors_sha256

        super().__init__(device, precision)
        model = load(path, self.device)
        if model.config.method != "ar":
            raise UsageError(f"'{path}' holds a {model.method.title} model, which cannot score: name an ar model.")
        self.model: Any = model.method
        self.tokenizer = model.tokenizer
        self.name = f"ar:{Path(path).resolve().name}"
        self.hash = tensors_sha256(model.method.export_state())
        self.context = model.config.data.token_len
        self.bos_id = self._start(model.config)
        self.eos_id = self.tokenizer.eos_id

    def _start(self, config: Config) -> int:
        """Return the token that the model's rows begin with, or `NO_TOKEN`."""
        if config.model.start_id != -1:
            return config.model.start_id
        if config.data.frame and self.tokenizer.bos_id is not None:
            return self.tokenizer.bos_id
        return self.NO_TOKEN

    def encode(self, text: str, max_tokens: int) -> list[int]:
        return self.tokenizer.encode(text)[:max_tokens]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer._backend.decode(list(ids), skip_special_tokens=False)

    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        return self.model.hidden_states(tokens_BL)

    def token_nll(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        if bool((tokens_BL[:, 0] == self.NO_TOKEN).all()):
            return self.model.token_nll(tokens_BL[:, 1:])
        return self.model.token_nll(tokens_BL)[:, 1:]


def build_scorer(spec: str, device: str = "cpu", console: Console | None = None, precision: str = "auto") -> Scorer:
    """Build a scorer: 'smollm2' or 'stories15m' (pinned), 'gguf:FILE', 'hf:NAME' (hub name or folder) or 'ar:CHECKPOINT'."""
    kind, _, rest = spec.partition(":")
    if kind == "hf" and rest:
        return TransformersScorer(rest, device, precision)
    if kind == "gguf" and rest:
        return GgufScorer(Path(rest), device, None, precision)
    if kind == "ar" and rest:
        return ArScorer(Path(rest), device, precision)
    if spec in ("smollm2", "smollm2-135m"):
        return GgufScorer(None, device, console, precision)
    if spec == "stories15m":
        return StoriesScorer(device, console, precision)
    raise UsageError(
        f"Unknown scorer '{spec}': choose smollm2, stories15m, gguf:FILE, ar:CHECKPOINT or hf:NAME "
        "(hf:gpt2-large is the paper's)."
    )
