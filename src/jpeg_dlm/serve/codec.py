"""Answers that need the codec: embeddings, reconstructions, interpolations and edits. All run in the service's thread."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from typing import Any

from jpeg_dlm.api import Model
from jpeg_dlm.serve.http import ApiError
from jpeg_dlm.serve.models import Served
from jpeg_dlm.serve.schemas import MOST_TEXTS, Edit, EmbeddingRequest, Interpolation, Reconstruction, as_list
from jpeg_dlm.text.tokenizer import TextTokenizer

UNFINISHED = "\ufffd"  # a character of which a byte-level token holds only a part


def embed(served: Served, request: EmbeddingRequest) -> dict[str, Any]:
    """Encode texts: the mean of their latents, or all latents in a row."""
    latents_BND = served.model.encode(as_list(request.input)).float().cpu()
    vectors = latents_BND.mean(1) if request.pooling == "mean" else latents_BND.flatten(1)
    if request.dimensions not in (None, vectors.shape[1]):
        raise ApiError(422, f"`dimensions` must be {vectors.shape[1]} for this model and pooling: leave it out.", "dimensions")
    coded: Sequence[Any] = vectors.tolist()
    if request.encoding_format == "base64":
        coded = [base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode() for vector in vectors]
    tokens = sum(len(served.model.tokenizer.encode(text)) for text in as_list(request.input))
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(coded)]
    return {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def reconstruct(served: Served, request: Reconstruction) -> dict[str, Any]:
    """Encode and decode texts; tell for each token whether it came back at its place."""
    config = served.model.config
    sizes = [len(served.model.tokenizer.encode(text)) for text in as_list(request.input)]
    if sum(sizes) > MOST_TEXTS * config.data.token_len:
        raise ApiError(422, f"The texts have {sum(sizes)} tokens: send at most {MOST_TEXTS * config.data.token_len}.", "input")
    data = [{"index": i, **_reconstructed(served.model, text)} for i, text in enumerate(as_list(request.input))]
    return {"latents": config.model.latent_len, "tokens": config.data.token_len, "data": data}


def _reconstructed(model: Model, text: str) -> dict[str, Any]:
    before, after = model.round_trip(text)
    kept = [a == b for a, b in zip(before, after, strict=True)]

    def marked(ids: Sequence[int]) -> list[dict[str, Any]]:
        return [{"text": piece, "kept": same} for piece, same in zip(pieces(model.tokenizer, ids), kept, strict=True)]

    text = model.tokenizer.decode(after)
    return {"text": text, "kept": sum(kept), "of": len(kept), "before": marked(before), "after": marked(after)}


def pieces(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the part of the text that each token adds; a character made of several tokens is added by the last of them."""
    parts, before = [], ""
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:end])
        if now.endswith(UNFINISHED) and end < len(ids):
            parts.append("")
            continue
        parts.append(now[len(os.path.commonprefix([before, now])) :])
        before = now
    return parts


def interpolate(served: Served, request: Interpolation) -> dict[str, Any]:
    """Decode points on the line between two texts."""
    texts = served.model.interpolate(request.first, request.second, points=request.points)
    last = len(texts) - 1
    return {"data": [{"index": i, "position": round(i / last, 4), "text": text} for i, text in enumerate(texts)]}


def edit(served: Served, request: Edit) -> dict[str, Any]:
    """Write variations of a text from its latents with noise."""
    texts = served.model.edit(request.input, noise=request.noise, n=request.n, seed=request.seed)
    return {"seed": request.seed, "data": [{"index": i, "text": text} for i, text in enumerate(texts)]}
