"""Language models that score text: negative log-likelihoods and features. Shapes: B batch, L tokens, V vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jpeg_dlm.encoders.frozen import load_pretrained, tensors_sha256
from jpeg_dlm.evaluation.metrics import TextScore
from jpeg_dlm.util import files
from jpeg_dlm.util.distributed import shared, world_size
from jpeg_dlm.util.errors import AssetError, CheckpointError, MissingPackageError, UsageError

if TYPE_CHECKING:
    from jpeg_dlm.util.console import Console

SMOLLM2 = "SmolLM2-135M-Instruct-Q4_1"
# The token between documents of its pretraining; the file's own beginning token opens a chat turn instead.
DOCUMENT_START = "<|endoftext|>"
ROWS_PER_CHUNK = 512  # rows of fp32 logits in one cross-entropy call
TOKENS_PER_BATCH = 2048  # logits of a batch over 50 k tokens stay near 400 MB
PAPER_SCORER_TOKENS = 1024  # released: the first 1024 tokens of a text are scored

Progress = Callable[[int, int], None]
Scored = Literal["all", "eos", "non_eos"]


class Scorer:
    """Any causal language model of transformers, by hub name or folder; the paper uses gpt2-large."""

    eos_id: int | None

    def __init__(self, name: str, device: str = "cpu", precision: str = "auto", digest: str = "") -> None:
        import transformers

        def load(options: dict[str, Any]) -> tuple[Any, Any]:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
            return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(name, **options)

        transformers.utils.logging.disable_progress_bar()
        remedy = "give a local folder as hf:FOLDER, or use the pinned package with --scorer smollm2."
        self.tokenizer, model = load_pretrained(load, name, "", "the scorer", remedy)
        self.device = torch.device(device)
        # (measured) bf16 on a CPU without its instructions is nine times slower than fp32, so 'auto' means CUDA only.
        cuda = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.precision = "bf16" if precision == "bf16" or (precision == "auto" and cuda) else "fp32"  # as results record it
        self.model = model.float().eval().requires_grad_(False).to(self.device)
        self.name = Path(name).name if Path(name).is_dir() else name
        self.hash = digest or tensors_sha256(self.model.state_dict())
        self.bos_id, self.eos_id = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        self.context = int(getattr(self.model.config, "max_position_embeddings", PAPER_SCORER_TOKENS))

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Return the first `max_tokens` ids of a text, without special tokens."""
        # Truncating in the tokenizer instead of slicing avoids a warning for every long text.
        return self.tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_tokens).input_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids of this scorer."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def hidden_states(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the last hidden states (B, L, H), after the final norm, without the head, which takes most of the time."""
        inputs = {"input_ids": tokens_BL, "attention_mask": mask_BL.long(), "use_cache": False}
        return self.model.base_model(**inputs).last_hidden_state

    def token_nll(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the NLL (B, L - 1) of each token after the first, given those before it; padding is on the right."""
        logits = self.model(input_ids=tokens_BL, attention_mask=mask_BL.long(), use_cache=False).logits[:, :-1]
        targets_BL = tokens_BL[:, 1:]
        chunks = (x.flatten(0, 1).split(ROWS_PER_CHUNK) for x in (logits, targets_BL[..., None]))
        losses = [F.cross_entropy(h.float(), y[:, 0], reduction="none") for h, y in zip(*chunks, strict=True)]
        return torch.cat(losses).view_as(targets_BL)

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

        With `stride`, texts longer than the scorer's context are scored in overlapping windows, `stride` tokens apart, each
        token in the first window that contains it (bd3lms); otherwise they are cut. `ids`, if given, replace the texts.
        `scored` "eos" counts only the first end token of a row (MDLM, Duo); "non_eos" counts none.
        """
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
        pieces = [rows[i][start:stop] for i, (start, stop, _) in windows]
        totals = [0.0] * len(rows)

        def sums(batch: list[int]) -> list[float]:
            chosen = [windows[k] for k in batch]
            kept = [[j >= new and counted[i][j - 1] for j in range(start + 1, stop)] for i, (start, stop, new) in chosen]
            tokens_BL, mask_BL = self._padded([pieces[k] for k in batch])
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                nll = self.token_nll(tokens_BL, mask_BL)
            length = tokens_BL.shape[1] - 1
            kept_BL = torch.tensor([flags + [False] * (length - len(flags)) for flags in kept], device=self.device)
            # Not a product with the mask, because uncounted values may be infinite.
            return torch.where(kept_BL, nll.double(), 0.0).sum(1).tolist()

        for batch, sums_of_batch in _over_batches(pieces, 2, sums, progress):
            for k, total in zip(batch, sums_of_batch, strict=True):
                totals[windows[k][0]] += total
        return [
            TextScore(total, sum(kept) if len(row) > 1 else 0, tuple(own))
            for total, kept, row, own in zip(totals, counted, rows, ids, strict=True)
        ]

    @torch.no_grad()
    def features(self, texts: Sequence[str], max_tokens: int, progress: Progress | None = None) -> Tensor:
        """Return the last hidden state (n, H) at the final retained token of each text that is not empty, for MAUVE.

        It is computed in fp32 on every device, as in mauve-text, whatever the precision of the likelihoods.
        """
        limit = min(max_tokens, self.context)
        rows = [row for row in (self.encode(text, limit) for text in texts if text.strip()) if row]

        def last(batch: list[int]) -> Tensor:
            tokens_BL, mask_BL = self._padded([rows[i] for i in batch])
            h_BLH = self.hidden_states(tokens_BL, mask_BL)
            return h_BLH[torch.arange(len(batch)), mask_BL.sum(1) - 1].float().cpu()

        if not rows:
            return torch.empty(0, 0)
        batches, states = zip(*_over_batches(rows, 1, last, progress), strict=True)
        return torch.cat(states)[torch.tensor([i for batch in batches for i in batch]).argsort()]

    def _padded(self, rows: Sequence[list[Any]]) -> tuple[Tensor, Tensor]:
        length = max(map(len, rows))
        # Any id can serve as padding: causal attention never sees it, and the mask removes it from the sum.
        tokens_BL = torch.tensor([row + [row[-1]] * (length - len(row)) for row in rows], device=self.device)
        mask_BL = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=self.device).bool()
        return tokens_BL, mask_BL


def _windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield start and stop of windows of at most `context` tokens, `stride` apart, and where the new tokens of each begin."""
    new = 0
    for start in range(0, max(1, length), stride):
        stop = min(start + context, length)
        yield start, stop, new
        new = stop
        if stop == length:
            return


def _counted(row: Sequence[Any], scored: Scored, eos_id: int | None) -> list[bool]:
    """Return a flag for each token after the first: True if it is scored."""
    if scored == "all":
        return [True] * (len(row) - 1)
    first = row.index(eos_id) if scored == "eos" and eos_id in row else -1
    return [token != eos_id or place == first for place, token in enumerate(row)][1:]


def _over_batches(
    rows: Sequence[Sequence[Any]], shortest: int, work: Callable[[list[int]], Any], progress: Progress | None
) -> Iterator[tuple[list[int], Any]]:
    """Yield batches of the indices of rows, and what `work` gives for each; processes share the batches.

    Rows of a batch are of similar length to limit padding; the longest come first, so that memory errors come early.
    """
    order = sorted((i for i, row in enumerate(rows) if len(row) >= shortest), key=lambda i: (-len(rows[i]), i))
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : start + max(1, TOKENS_PER_BATCH // len(rows[order[start]]))])
        start += len(batches[-1])
    done = len(rows) - len(order)

    def work_and_tell(batch: list[int]) -> Any:
        nonlocal done
        done += len(batch) * world_size()  # the other processes do as many
        if progress is not None:
            progress(min(done, len(rows)), len(rows))
        return work(batch)

    return zip(batches, shared(batches, work_and_tell), strict=True)


def gguf_scorer(path: Path | None, device: str, console: Console | None, precision: str) -> Scorer:
    """Build the scorer of a GGUF file, by default SmolLM2-135M-Instruct in 4 bits, which needs no model hub.

    transformers takes half a minute to read one (measured), so the cache keeps its fp32 weights (538 MB of SmolLM2).
    """
    from jpeg_dlm.text.download import ASSETS, fetch

    if path and not path.is_file():
        raise AssetError(f"There is no file '{path}': name a GGUF file.")
    digest = files.sha256_file(path) if path else ASSETS["smollm2"].member_sha256
    folder = files.cache_dir() / f"gguf-{digest[:16]}"
    try:
        files.verify_manifest(folder)
    except CheckpointError:  # missing or damaged
        _convert_gguf(path or fetch("smollm2", console=console), folder)
    scorer = Scorer(str(folder), device, precision, digest)
    scorer.name = path.stem if path else SMOLLM2
    start = scorer.tokenizer.get_vocab().get(DOCUMENT_START)
    if start is not None:
        scorer.bos_id = scorer.eos_id = start
    return scorer


def _convert_gguf(path: Path, folder: Path) -> None:
    """Write a GGUF file as a folder of transformers; no code of it is run."""
    try:
        import accelerate  # noqa: F401 - transformers needs it to read GGUF files
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("gguf accelerate", "eval", "A GGUF scorer") from error
    import transformers

    def load(options: dict[str, Any]) -> tuple[Any, Any]:
        options = options | {"gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)

    transformers.utils.logging.disable_progress_bar()
    tokenizer, model = load_pretrained(load, str(path), "", "the scorer", "name another GGUF file.")
    model.hf_quantizer = None  # the weights are no longer quantized, which transformers does not notice
    vars(model.config).pop("quantization_config", None)
    files.make_directory(folder.parent)
    files.remove_directory(folder)
    with contextlib.suppress(CheckpointError), files.atomic_directory(folder, new=True) as staged:  # another process was faster
        tokenizer.save_pretrained(staged)
        model.save_pretrained(staged)
        files.write_manifest(staged, {})


def build_scorer(spec: str, device: str = "cpu", console: Console | None = None, precision: str = "auto") -> Scorer:
    """Build a scorer: 'smollm2' (pinned), 'gguf:FILE' or 'hf:NAME' (hub name or folder)."""
    kind, _, rest = spec.partition(":")
    if kind == "hf" and rest:
        return Scorer(rest, device, precision)
    if (kind == "gguf" and rest) or spec == "smollm2":
        return gguf_scorer(Path(rest) if rest else None, device, console, precision)
    raise UsageError(f"Unknown scorer '{spec}': choose smollm2, gguf:FILE or hf:NAME (hf:gpt2-large is the paper's).")
