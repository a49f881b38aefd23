"""Load stories15M, a language model with 15 M parameters, and its tokenizer from one file in the format of llama2.c."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers

from jpeg_dlm.errors import AssetError, reason_of
from jpeg_dlm.nn.llama import build_llama, llama_sizes, llama_state

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NAME = "stories15M"
BOS = 1  # starts a story and, in the training data of stories15M, follows its end
SPECIALS = ("<unk>", "<s>", "</s>")  # ids 0 to 2; the 256 bytes follow
# Constants of llama2.c that are not in the header.
ROPE_BASE, NORM_EPS = 10_000.0, 1e-5
HEADER = struct.Struct("<7i")


def load_stories15m(path: Path) -> tuple[LlamaForCausalLM, Tokenizer, int]:
    """Load the model, its tokenizer and its context length from one file."""
    try:
        with open(path, "rb") as file:
            dim, inner, layers, heads, kv_heads, vocabulary, context = HEADER.unpack(file.read(HEADER.size))
            shared, vocabulary = vocabulary > 0, abs(vocabulary)  # llama2.c: negative means that the head is not shared
            narrow = dim * kv_heads // heads

            def take(*shape: int) -> torch.Tensor:
                raw = file.read(4 * int(np.prod(shape)))
                return torch.from_numpy(np.frombuffer(raw, "<f4").astype(np.float32).reshape(shape))

            shapes = {
                "attn_norm": (dim,), "attn_q": (dim, dim), "attn_k": (narrow, dim), "attn_v": (narrow, dim),
                "attn_output": (dim, dim), "ffn_norm": (dim,), "ffn_gate": (inner, dim), "ffn_down": (dim, inner),
                "ffn_up": (inner, dim),
            }  # fmt: skip
            tensors = {"token_embd.weight": take(vocabulary, dim)}
            for name, shape in shapes.items():
                tensors |= {f"blk.{i}.{name}.weight": w for i, w in enumerate(take(layers, *shape))}
            tensors["output_norm.weight"] = take(dim)
            take(2, context, dim // heads // 2)  # skip the rotary cosines and sines, which the model computes itself
            if not shared:
                tensors["output.weight"] = take(vocabulary, dim)
            state = llama_state(tensors, heads, kv_heads)
            sizes = llama_sizes(state, heads, kv_heads) | {
                "rope_theta": ROPE_BASE, "rms_norm_eps": NORM_EPS, "max_position_embeddings": context,
            }  # fmt: skip
            return build_llama(sizes, state), _tokenizer(file.read(), vocabulary), context
    except Exception as error:  # whatever sizes and numbers that do not belong together lead to
        raise AssetError(
            f"'{path}' is not a llama2.c model with its tokenizer ({reason_of(error)}): delete it and fetch it again."
        ) from error


def _tokenizer(raw: bytes, vocabulary: int) -> Tokenizer:
    """Parse the tokenizer in llama2.c's older layout: the longest piece, then score, length and bytes of each piece."""
    pieces, scores, at = [], [], 4
    for _ in range(vocabulary):
        score, length = struct.unpack_from("<fi", raw, at)
        pieces.append(raw[at + 8 : at + 8 + length].decode("utf-8"))
        scores.append(score)
        at += 8 + length
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {piece: i for i, piece in enumerate(names + pieces[len(names) :])}
    # Like SentencePiece, merge two pieces when their concatenation is a piece, highest score first.
    order = sorted(range(len(names), vocabulary), key=lambda i: (-scores[i], i))
    halves = ((pieces[i][:cut], pieces[i][cut:]) for i in order for cut in range(1, len(pieces[i])))
    merges = [(a, b) for a, b in halves if a in ids and b in ids]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=SPECIALS[0], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer
