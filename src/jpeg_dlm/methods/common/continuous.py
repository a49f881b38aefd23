"""Shared configuration of LangFlow and FLM, which run the transformer of `nn.ddit` on vectors instead of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from jpeg_dlm.config import Config
from jpeg_dlm.methods.common.discrete import PAPER_TOKENIZERS, NetworkConfig, ddit_model, ddit_sizes, ddit_training, paper_data


def adapted(base: Config, name: str, objective: Any, sampler: Any) -> Config:
    """Adapt such a system to a preset of JPEG-DLM: the recipe of the comparison, or the budget of a small preset."""
    return replace(
        base, method=name, data=paper_data(base)[0], model=NetworkConfig(**ddit_model(base)), objective=objective,
        train=ddit_training(base), sampler=sampler,
    )  # fmt: skip


def published_config(tensors: Mapping[str, Tensor], base: Config) -> Config:
    """Return `base` with the sizes of a published checkpoint; its vocabulary size identifies tokenizer and row length."""
    vocab, sizes = ddit_sizes(tensors)
    data = replace(base.data, vocab_size=vocab)
    for preset, (tokenizer, ids, _) in PAPER_TOKENIZERS.items():
        if ids == vocab:
            data = replace(data, tokenizer=tokenizer, token_len=128 if preset == "lm1b" else 1024)
    return replace(base, data=data, model=replace(base.model, **sizes))
