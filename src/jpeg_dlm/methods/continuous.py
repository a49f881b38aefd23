"""What the systems share that run the transformer of `nn.ddit` on vectors instead of masked tokens: LangFlow and FLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.methods.discrete import PAPER_TOKENIZERS, NetworkConfig, ddit_model, ddit_sizes, ddit_training, paper_data


def adapted(base: Config, name: str, objective: Any, sampler: Any) -> Config:
    """A system of this kind under a preset of JPEG-DLM: the comparison's recipe, or the small preset's own budget."""
    return replace(
        base, method=name, data=paper_data(base)[0], model=NetworkConfig(**ddit_model(base)), objective=objective,
        train=ddit_training(base), sampler=sampler,
    )  # fmt: skip


def published_config(tensors: Mapping[str, Tensor], base: Config) -> Config:
    """`base` with the sizes of a published checkpoint; its number of ids tells its tokenizer and so its length."""
    vocab, sizes = ddit_sizes(tensors)
    data = replace(base.data, vocab_size=vocab)
    for preset, (tokenizer, ids, _) in PAPER_TOKENIZERS.items():
        if ids == vocab:
            data = replace(data, tokenizer=tokenizer, token_len=128 if preset == "lm1b" else 1024)
    return replace(base, data=data, model=replace(base.model, **sizes))
