"""SmolLM2-135M-Instruct in 4 bits: the causal language model that scores text without a model hub.

Its GGUF file is read directly. Loading takes a few seconds, so the 538 MB of converted floats are not kept on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jpeg_dlm.errors import AssetError
from jpeg_dlm.evaluation.gguf import read_gguf
from jpeg_dlm.nn.llama import Llama, LlamaSizes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "SmolLM2-135M-Instruct-Q4_1"
# The token between documents of its pretraining; the file's own beginning token opens a chat turn instead.
DOCUMENT_START = "<|endoftext|>"


def llama_sizes(metadata: dict[str, Any]) -> LlamaSizes:
    """Sizes from GGUF metadata; another architecture is refused."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise AssetError(f"A GGUF scorer must be of architecture llama, not {architecture!r}: choose another file.")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise AssetError(f"Rotary scaling {scaling!r} is not supported: choose a scorer without it.")
    try:
        heads = int(metadata["llama.attention.head_count"])
        return LlamaSizes(
            layers=int(metadata["llama.block_count"]),
            heads=heads,
            kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
            rope_base=float(metadata.get("llama.rope.freq_base", 10_000.0)),
            norm_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        )
    except KeyError as error:
        raise AssetError(f"The GGUF file lacks the key {error}: fetch it again.") from error


def gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE that the metadata describes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kind, before = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    known = {"gpt-2": byte_level, "smollm": pre_tokenizers.Sequence([digits, byte_level])}
    if kind != "gpt2" or before not in known:
        raise AssetError(f"The GGUF tokenizer {kind!r} with pre-tokenizer {before!r} is not supported: use smollm2 or hf:NAME.")
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = known[before]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_gguf_llama(path: Path) -> tuple[Llama, Tokenizer, dict[str, Any]]:
    """Model, tokenizer and metadata of a GGUF file."""
    file = read_gguf(path)
    model = Llama(llama_sizes(file.metadata), {name: torch.from_numpy(array) for name, array in file.tensors.items()})
    return model.eval(), gguf_tokenizer(file.metadata), file.metadata
