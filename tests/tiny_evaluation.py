"""A scorer small enough to call thousands of times, a scorer whose every figure is known, and a micro model.

PYTEST_DONT_REWRITE: there is nothing to rewrite, and tests import it before pytest does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import made_up_text
from micro import MicroFolders

from jpeg_dlm.api import Model, load
from jpeg_dlm.config import DataConfig
from jpeg_dlm.evaluation.cache import DiskCache
from jpeg_dlm.evaluation.evaluate import Evaluation, EvaluationRequest
from jpeg_dlm.evaluation.protocols import PROTOCOLS, Protocol
from jpeg_dlm.evaluation.scorer import Scorer
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.text.prepare import prepare
from jpeg_dlm.util.console import Console


@pytest.fixture(scope="session")
def byte_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 over bytes, in the form transformers saves."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=96, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4, bos_token_id=0, eos_token_id=0
    )
    folder = tmp_path_factory.mktemp("scorer") / "byte-gpt2"
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **ends).save_pretrained(folder)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def evaluation(scorer: Scorer, rule: Protocol | str = "default", folder: Path | None = None, **request: Any) -> Evaluation:
    """An evaluation that says nothing, by a protocol or its name."""
    rule = PROTOCOLS[rule] if isinstance(rule, str) else rule
    return Evaluation(scorer, EvaluationRequest(rule, **request), DiskCache(folder), Console(quiet=True))


def untimed(value: Any) -> Any:
    """Return a result without what depends on the clock, and without its command, which names the folder."""
    if isinstance(value, dict):
        times = ("throughput", "texts_per_second", "tables", "command")
        return {name: untimed(part) for name, part in value.items() if name not in times}
    return [untimed(part) for part in value] if isinstance(value, list) else value


class FakeScorer(Scorer):
    """Words are tokens; the word 'w3' has id 3 and costs 3 nats wherever it stands, 'END' has id 0 and costs 10."""

    name, hash, bos_id, eos_id, context = "fake", "f" * 64, 0, 0, 1024

    device, precision = torch.device("cpu"), "fp32"

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, max_tokens: int) -> list[int]:
        return [0 if word == "END" else int(word[1:]) for word in text.split()][:max_tokens]

    def decode(self, ids):
        return " ".join("END" if i == 0 else f"w{i}" for i in ids)

    def token_nll(self, tokens_BL, mask_BL):
        self.calls += 1
        return torch.where(tokens_BL == 0, 10, tokens_BL)[:, 1:].float()

    def hidden_states(self, tokens_BL, mask_BL):
        return torch.stack([tokens_BL.float(), torch.arange(tokens_BL.shape[1]).float().expand(tokens_BL.shape)], -1)


@pytest.fixture
def fake() -> FakeScorer:
    return FakeScorer()


@pytest.fixture(scope="session")
def micro(micro_folders: MicroFolders) -> Model:
    return load(micro_folders(), "cpu")


@pytest.fixture(scope="session", params=["continuous", "padded"])
def heldout(request: Any, micro: Model, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    """Held-out text of the micro model, in rows of both kinds."""
    folder = tmp_path_factory.mktemp("prepared") / request.param
    data = DataConfig(str(corpus_file), vocab_size=300, token_len=12, packing=request.param, holdout=0.3)
    prepare(data, folder, None, micro.tokenizer)
    return Blocks(folder, "heldout")


@pytest.fixture(scope="session")
def document_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty documents of different lengths."""
    path = tmp_path_factory.mktemp("documents") / "text.jsonl"
    texts = made_up_text(documents=60).strip().split("\n\n")
    path.write_text("".join(json.dumps({"text": text[: 40 + 7 * i]}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture(scope="session")
def context_folder(micro_folders: MicroFolders) -> Path:
    """A model with a context of two blocks."""
    return micro_folders(data__packing="padded", data__holdout=0.2, model__context_blocks=2)
