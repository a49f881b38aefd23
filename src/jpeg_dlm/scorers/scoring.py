"""Causal language models that score text: negative log-likelihood per text, under one interface.

Two conventions: without a beginning token the first token is context only (LM1B); with it every token is scored (OWT).
Every figure must carry the scorer's name: figures of different scorers are not comparable.
Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.errors import AssetError, JpegDlmError, UsageError, reason_of
from jpeg_dlm.machine.cpu import make_safe, with_limit
from jpeg_dlm.text.text_metrics import (
    TextScore,
    bootstrap_interval,
    distinct_n,
    gen_ppl,
    repetition_rate,
    shuffle_words,
    unigram_entropy,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from jpeg_dlm.config import Config
    from jpeg_dlm.machine.console import Console

__all__ = [
    "ArScorer",
    "GgufScorer",
    "Scorer",
    "TextScore",
    "TransformersScorer",
    "bootstrap_interval",
    "build_scorer",
    "distinct_n",
    "gen_ppl",
    "repetition_rate",
    "shuffle_words",
    "unigram_entropy",
]

TOKENS_PER_BATCH = 2048  # logits of a batch over 50 k tokens stay near 400 MB
ROWS_PER_CHUNK = 512  # rows of fp32 logits in one cross-entropy call
PAPER_SCORER_TOKENS = 1024  # released: the first 1024 tokens of a text are scored

Progress = Callable[[int, int], None]
Scored = Literal["all", "eos", "non_eos"]


class Scorer:
    """Base class that handles batching, skipping and truncation; subclasses tokenize and return per-token NLL."""

    name: str
    hash: str
    bos_id: int | None
    eos_id: int | None = None
    context: int

    def __init__(self, device: str = "cpu", precision: str = "auto") -> None:
        if precision not in ("auto", "fp32", "bf16"):
            raise UsageError(f"The scorer's precision must be auto, fp32 or bf16, not {precision!r}.")
        self.device = torch.device(device)
        if precision == "bf16" and self.device.type == "cpu":
            make_safe()
        # (measured) bf16 on a CPU without its instructions is nine times slower than fp32, so 'auto' means CUDA only.
        cuda = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.bf16 = precision == "bf16" or (precision == "auto" and cuda)

    @property
    def precision(self) -> str:
        """Precision as recorded in results."""
        return "fp32" if not self.bf16 else with_limit("bf16") if self.device.type == "cpu" else "bf16"

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Return the first `max_tokens` ids of a text, without special tokens."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids of this scorer."""
        raise NotImplementedError

    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the last hidden states (B, L, H), after the final norm."""
        raise NotImplementedError

    def token_nll(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the NLL (B, L - 1) of each token after the first, given those before it; padding is on the right."""
        raise NotImplementedError

    @torch.no_grad()
    def nll(
        self,
        texts: Sequence[str],
        max_tokens: int = PAPER_SCORER_TOKENS,
        bos: bool = False,
        progress: Progress | None = None,
        scored: Scored = "all",
        ids: Sequence[Sequence[int]] | None = None,
        stride: int = 0,
    ) -> list[TextScore]:
        """Return one score per text, in order. Blank texts, and one-token texts without `bos`, are marked as skipped.

        With `stride`, texts longer than the scorer's context are scored in overlapping windows, `stride` tokens apart; each
        token counts in the first window that contains it (bd3lms). Otherwise they are cut.

        `ids`, if given, are scored instead of the texts. `scored` "eos" follows the code of MDLM and Duo: rows are padded
        with the end token to the longest one, and only the first end token of a row counts; "non_eos" counts none.
        """
        if max_tokens < 2:
            raise UsageError("Scoring needs max_tokens of at least 2.")
        if bos and self.bos_id is None:
            raise UsageError(f"{self.name} has no beginning token: score without it.")
        if scored != "all" and self.eos_id is None:
            raise UsageError(f"{self.name} has no end token: choose a protocol that scores all tokens.")
        limit = max_tokens if stride else min(max_tokens, self.context)
        if not 0 <= stride < self.context:
            raise UsageError(f"The stride must be below the {self.context} tokens of {self.name}'s window.")
        if ids is None:
            ids = [self.encode(text, limit - bos) if text.strip() else [] for text in texts]
        ids = [list(row[: limit - bos]) for row in ids]
        rows = [[self.bos_id, *row] if bos and row else row for row in ids]
        if scored == "eos":
            # One end token suffices: further padding would be neither scored nor seen.
            longest = max(map(len, rows), default=0)
            rows = [[*row, self.eos_id] if row and len(row) < longest else row for row in rows]
        counted = [_counted(row, scored, self.eos_id) for row in rows]
        windows = [(i, w) for i, row in enumerate(rows) for w in _windows(len(row), self.context, stride or self.context)]
        pieces = [rows[i][w.start : w.stop] for i, w in windows]
        totals, done = [0.0] * len(rows), sum(len(row) < 2 for row in rows)
        for batch in _batches_by_length(pieces):
            chosen = [windows[k] for k in batch]
            sums = self._sums(
                [pieces[k] for k in batch], [[j >= w.new and c for j, c in w.places(counted[i])] for i, w in chosen]
            )
            for (i, _), total in zip(chosen, sums, strict=True):
                totals[i] += total
            done += len(batch)
            if progress is not None:
                progress(min(done, len(rows)), len(rows))
        return [
            TextScore(total, sum(kept) if len(row) > 1 else 0, tuple(own))
            for total, kept, row, own in zip(totals, counted, rows, ids, strict=True)
        ]

    @torch.no_grad()
    def features(self, texts: Sequence[str], max_tokens: int, progress: Progress | None = None) -> Tensor:
        """Return the last hidden state (n, H) at the final retained token of each text that is not empty (for MAUVE)."""
        limit = min(max_tokens, self.context)
        rows = [row for row in (self.encode(text, limit) for text in texts if text.strip()) if row]
        found: dict[int, Tensor] = {}
        for batch in _batches_by_length(rows, shortest=1):
            tokens_BL, mask_BL = self._padded([rows[i] for i in batch])
            with self._autocast():
                h_BLH = self.hidden_states(tokens_BL, mask_BL)
            last = h_BLH[torch.arange(len(batch)), mask_BL.sum(1) - 1].float().cpu()
            found |= dict(zip(batch, last, strict=True))
            if progress is not None:
                progress(len(found), len(rows))
        return torch.stack([found[i] for i in range(len(rows))]) if rows else torch.empty(0, 0)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def _padded(self, rows: Sequence[list[Any]]) -> tuple[Tensor, Tensor]:
        length = max(map(len, rows))
        # Any id can serve as padding: causal attention never sees it, and the mask removes it from the sum.
        tokens_BL = torch.tensor([row + [row[-1]] * (length - len(row)) for row in rows], device=self.device)
        mask_BL = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=self.device).bool()
        return tokens_BL, mask_BL

    def _sums(self, rows: list[list[Any]], counted: list[list[bool]]) -> list[float]:
        tokens_BL, mask_BL = self._padded(rows)
        with self._autocast():
            nll = self.token_nll(tokens_BL, mask_BL)
        length = tokens_BL.shape[1] - 1
        counted_BL = torch.tensor([one + [False] * (length - len(one)) for one in counted], device=self.device)
        # Not a product with the mask, because uncounted values may be infinite.
        return torch.where(counted_BL, nll.double(), 0.0).sum(1).tolist()


@dataclass(frozen=True)
class _Window:
    """Tokens `start` to `stop` of a row; earlier windows contain those before `new`."""

    start: int
    stop: int
    new: int

    def places(self, counted: list[bool]) -> Iterator[tuple[int, bool]]:
        """Yield (position in the row, True if scored) of every token after the window's first."""
        return ((j, counted[j - 1]) for j in range(self.start + 1, self.stop))


def _windows(length: int, context: int, stride: int) -> Iterator[_Window]:
    """Yield windows of at most `context` tokens, `stride` apart, that cover a row."""
    new = 0
    for start in range(0, max(1, length), stride):
        stop = min(start + context, length)
        yield _Window(start, stop, new)
        new = stop
        if stop == length:
            return


def _counted(row: Sequence[Any], scored: Scored, eos_id: int | None) -> list[bool]:
    """Return a flag for each token after the first: True if it is scored."""
    if scored == "all":
        return [True] * (len(row) - 1)
    ends, counted = 0, []
    for i in row:
        ends += i == eos_id
        counted.append(i != eos_id or (scored == "eos" and ends == 1))
    return counted[1:]


def _batches_by_length(rows: Sequence[Sequence[Any]], shortest: int = 2) -> Iterator[list[int]]:
    """Yield indices of rows of similar length to limit padding, longest first so that memory errors come early."""
    order = sorted((i for i, row in enumerate(rows) if len(row) >= shortest), key=lambda i: (-len(rows[i]), i))
    while order:
        size = max(1, TOKENS_PER_BATCH // len(rows[order[0]]))
        yield order[:size]
        order = order[size:]


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

    def __init__(self, device: str = "cpu", precision: str = "auto", console: Console | None = None) -> None:
        from jpeg_dlm.fetch.assets import ASSETS, fetch
        from jpeg_dlm.text.stories15m import BOS, NAME, load_stories15m

        super().__init__(device, precision)
        model, self.tokenizer, self.context = load_stories15m(fetch("stories15m", console=console))
        self.model = model.to(self.device)  # pyright: ignore[reportArgumentType] - transformers wraps it
        self.name, self.hash, self.bos_id, self.eos_id = NAME, ASSETS["stories15m"].member_sha256, BOS, BOS


class GgufScorer(LlamaScorer):
    """A llama-style model from a GGUF file; by default the pinned SmolLM2-135M-Instruct."""

    def __init__(
        self, path: Path | None = None, device: str = "cpu", precision: str = "auto", console: Console | None = None
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

    def __init__(self, name: str, revision: str = "", device: str = "cpu", precision: str = "auto") -> None:
        super().__init__(device, precision)
        import transformers

        from jpeg_dlm.encoders.frozen import tensors_sha256
        from jpeg_dlm.encoders.pretrained import load_pretrained

        def load(options: dict[str, Any]) -> tuple[Any, Any]:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
            return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(name, **options)

        remedy = "give a local folder as hf:FOLDER, or use the pinned package with --scorer smollm2."
        self.tokenizer, model = load_pretrained(load, name, revision, "the scorer", remedy)
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


def build_scorer(spec: str, device: str = "cpu", precision: str = "auto", console: Console | None = None) -> Scorer:
    """Build a scorer: 'smollm2' or 'stories15m' (pinned), 'gguf:FILE', 'hf:NAME' (hub name or folder) or 'ar:CHECKPOINT'."""
    kind, _, rest = spec.partition(":")
    if kind == "hf" and rest:
        return TransformersScorer(rest, device=device, precision=precision)
    if kind == "gguf" and rest:
        return GgufScorer(Path(rest), device, precision)
    if kind == "ar" and rest:
        return ArScorer(Path(rest), device, precision)
    if spec in ("smollm2", "smollm2-135m"):
        return GgufScorer(None, device, precision, console)
    if spec == "stories15m":
        return StoriesScorer(device, precision, console)
    raise UsageError(
        f"Unknown scorer '{spec}': choose smollm2, stories15m, gguf:FILE, ar:CHECKPOINT or hf:NAME "
        "(hf:gpt2-large is the paper's)."
    )
