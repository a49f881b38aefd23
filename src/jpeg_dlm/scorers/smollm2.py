"""SmolLM2-135M-Instruct in 4 bits: the causal language model that scores text without a model hub.

The converted model (538 MB) is kept in the cache; a copy that is missing or damaged is converted again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jpeg_dlm.errors import AssetError, CheckpointError
from jpeg_dlm.fetch.assets import fetch
from jpeg_dlm.files import (
    atomic_directory,
    dump_json,
    load_json,
    load_tensors,
    make_directory,
    remove_directory,
    save_tensors,
    verify_manifest,
    write_atomic,
    write_manifest,
)
from jpeg_dlm.machine.cache import cache_dir
from jpeg_dlm.nn.llama import llama_sizes, llama_state
from jpeg_dlm.scorers.gguf_files import read_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jpeg_dlm.machine.console import Console

NAME = "SmolLM2-135M-Instruct-Q4_1"
# The token between documents of its pretraining; the file's own beginning token opens a chat turn instead.
DOCUMENT_START = "<|endoftext|>"
CONTEXT = 1024  # where a file does not name one
VERSION = 1  # of the conversion: another one needs another folder


@dataclass(frozen=True)
class LlamaParts:
    """Arguments of `LlamaConfig`, a state dict of `LlamaForCausalLM`, and the tokenizer."""

    sizes: dict[str, Any]
    state: dict[str, Tensor]
    tokenizer: Tokenizer


def load_smollm2(console: Console | None = None) -> LlamaParts:
    """Return the pinned model from the cache, after fetching and converting it where it is not there."""
    folder = cache_dir() / f"smollm2-{VERSION}"
    try:
        return _read(folder)
    except CheckpointError:
        parts = convert_gguf(fetch("smollm2", console=console))
    with contextlib.suppress(OSError, CheckpointError):  # no room for it, or another process was faster
        _write(folder, parts)
    return parts


def _read(folder: Path) -> LlamaParts:
    from tokenizers import Tokenizer

    verify_manifest(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return LlamaParts(load_json(folder / "config.json", 1 << 16), load_tensors(folder / "model.safetensors"), tokenizer)


def _write(folder: Path, parts: LlamaParts) -> None:
    make_directory(folder.parent)
    remove_directory(folder)
    with atomic_directory(folder, new=True) as staged:
        write_atomic(staged / "config.json", dump_json(parts.sizes))
        write_atomic(staged / "tokenizer.json", parts.tokenizer.to_str())
        save_tensors(staged / "model.safetensors", parts.state, {})
        write_manifest(staged, {})


def convert_gguf(path: Path) -> LlamaParts:
    """Return the model of a GGUF file; another architecture is refused."""
    file = read_gguf(path)
    metadata = file.metadata
    architecture, scaling = metadata.get("general.architecture"), metadata.get("llama.rope.scaling.type", "none")
    if architecture != "llama":
        raise AssetError(f"A GGUF scorer must be of architecture llama, not {architecture!r}: choose another file.")
    if scaling != "none":
        raise AssetError(f"Rotary scaling {scaling!r} is not supported: choose a scorer without it.")
    tokenizer = gguf_tokenizer(metadata)
    start = tokenizer.token_to_id(DOCUMENT_START)
    try:
        heads, layers = int(metadata["llama.attention.head_count"]), int(metadata["llama.block_count"])
        norm_eps = float(metadata["llama.attention.layer_norm_rms_epsilon"])
    except KeyError as error:
        raise AssetError(f"The GGUF file lacks the key {error}: fetch it again.") from error
    kv_heads = int(metadata.get("llama.attention.head_count_kv", heads))
    state = llama_state({name: torch.from_numpy(array) for name, array in file.tensors.items()}, heads, kv_heads)
    sizes = llama_sizes(state, heads, kv_heads) | {
        "rms_norm_eps": norm_eps,
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10_000.0)),
        "max_position_embeddings": int(metadata.get("llama.context_length", CONTEXT)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id") if start is None else start,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id") if start is None else start,
    }
    if sizes["num_hidden_layers"] != layers:
        raise AssetError(f"The GGUF file holds {sizes['num_hidden_layers']} layers and names {layers}: fetch it again.")
    return LlamaParts(sizes, state, tokenizer)


def gguf_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the byte-level BPE that the metadata describes."""
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
