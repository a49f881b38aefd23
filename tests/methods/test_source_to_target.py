"""Systems that read sources: the network sees them without noise, no loss is on them, and samples are targets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from micro import micro_flags, micro_model
from torch import Tensor

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods import elf
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.registry import method_class, names
from jpeg_dlm.methods.sources import sample
from jpeg_dlm.nn.dit import Context
from jpeg_dlm.util.rng import RowNoise

B, S, L, VOCAB = 4, 5, 12, 300
WAYS = {name: method_class(name).sources for name in names("system")}
NOISED = [name for name, way in WAYS.items() if way == "before" and name != "ar"]
BOUNDED = ["ar", "mdlm", "sedd", "duo"]

each_reader = pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way != "none"])
each_noised = pytest.mark.parametrize("name", NOISED)


def tokens(length: int, seed: int) -> Tensor:
    return torch.randint(2, VOCAB, (B, length), generator=torch.Generator().manual_seed(seed))


SOURCE, OTHER, TARGET = tokens(S, 1), tokens(S, 2), tokens(L, 3)
PADDING = torch.arange(L) < torch.tensor([12, 3, 5, 1])[:, None]


def reader(name: str, **changes: Any) -> Any:
    if name == "langflow":
        changes["objective__sc_prob"] = 1.0  # the second evaluation of every row
    return micro_model(name, data__packing="padded", data__source_len=S, **changes)


def batch(method: Any, source: Tensor = SOURCE, mask: Tensor | None = None) -> Batch:
    pairs = Batch(TARGET, mask, source=Batch(source))
    return pairs.joined() if method.sources == "before" else pairs


def losses(method: Any, source: Tensor = SOURCE, step: int = 0) -> dict[str, float]:
    with torch.no_grad():
        terms = method.losses(batch(method, source, PADDING), RowNoise(0, range(B), step))
    return {name: value.item() for name, value in terms.items()}


def hide_source(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the network see zeros in place of any source."""
    if isinstance(method, elf.Elf):
        monkeypatch.setattr(elf, "SOURCE_DROP", 1.0)
    elif method.sources == "before":
        places = S + getattr(method, "before", 0)
        method.backbone.blocks[0].register_forward_pre_hook(lambda block, args: (zeroed(args[0], places), *args[1:]))
    else:
        real = method.source_context
        monkeypatch.setattr(method, "source_context", lambda s: Context(real(s).z_BCD * 0, real(s).present_BC))


def zeroed(x: Tensor, places: int) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :places]), x[:, places:]], 1)


def watch_inputs(method: Any) -> list[Tensor]:
    """Return a list that fills with what the first layer reads."""
    seen: list[Tensor] = []
    method.backbone.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].detach().clone()))
    return seen


def clean_source(method: Any) -> Tensor:
    """Return what the first layer reads of SOURCE without noise."""
    backbone = method.backbone
    if method.title != "LangFlow":
        return backbone.vocab_embed(SOURCE)
    embedding_BSH = backbone.embeddings()[SOURCE]
    return backbone.conditioned(embedding_BSH, embedding_BSH)


# ---------------------------------------------------------------- training


@each_reader
def test_the_loss_depends_on_the_source_only_through_the_network(name, monkeypatch):
    method = reader(name)
    assert losses(method) != losses(method, OTHER)
    hide_source(method, monkeypatch)
    assert losses(method) == losses(method, OTHER)


@each_noised
@pytest.mark.parametrize("training", [False, True])  # the curriculum of Duo is in training alone
def test_sources_are_never_noised_in_training(name, training):
    method = reader(name).train(training)
    seen = watch_inputs(method)
    for step in (0, 1):
        losses(method, step=step)
        torch.testing.assert_close(seen[-1][:, :S], clean_source(method))
    targets = [x[:, S:] for x in (seen[-1], seen[len(seen) // 2 - 1])]
    assert not torch.equal(*targets)


# ---------------------------------------------------------------- sampling


def written(method: Any, rows: list[int], source: Tensor = SOURCE) -> Tensor:
    return sample(method, method.config.sampler, RowNoise(1, rows), source=Batch(source[rows]))


@each_reader
def test_a_target_is_the_same_in_any_batch_and_depends_on_its_source(name):
    method = reader(name)
    together = written(method, list(range(B)))
    assert together.shape == (B, L) and 0 <= together.min() and together.max() < VOCAB
    assert torch.equal(torch.cat([written(method, [i]) for i in range(B)]), together)
    assert not torch.equal(written(method, list(range(B)), OTHER), together)


@each_noised
def test_sources_are_clean_at_every_step_of_sampling(name):
    method = reader(name, **({"sampler__cache": False} if name == "mdlm" else {}))
    seen = watch_inputs(method)
    written(method, list(range(B)))
    seen = seen[1:] if name == "langflow" else seen  # its first evaluation has no earlier prediction
    assert len(seen) >= 2
    for x_BLH in seen:
        torch.testing.assert_close(x_BLH[:, :S], clean_source(method))


@each_reader
def test_watching_shows_targets_alone(name):
    method, shown = reader(name), []
    rows = sample(
        method, method.config.sampler, RowNoise(1, range(B)), lambda *seen: shown.append(seen[3]()), source=Batch(SOURCE)
    )
    assert all(tokens_BL.shape == (B, L) for tokens_BL in shown) and torch.equal(shown[-1], rows)


# ---------------------------------------------------------------- likelihood


@pytest.mark.parametrize("name", BOUNDED)
def test_a_likelihood_is_that_of_the_target(name, monkeypatch):
    method = reader(name)

    def nats(source: Tensor) -> Tensor:
        found = method.likelihood(batch(method, source, PADDING), RowNoise(0, range(B)))
        assert found.tokens_B.tolist() == [12, 3, 5, 1]
        return found.nats_B

    assert not torch.equal(nats(SOURCE), nats(OTHER))
    hide_source(method, monkeypatch)
    assert torch.equal(nats(SOURCE), nats(OTHER))


@pytest.mark.parametrize("name", ["mdlm", "sedd"])
def test_masked_targets_alone_have_weights(name, monkeypatch):
    """Where each of the n masked tokens costs 1 and weighs L / n, a row costs L."""
    method = reader(name)
    monkeypatch.setattr(method, "cost", lambda h_NH, x0_N: torch.ones(len(h_NH)))
    found = method.likelihood(batch(method), RowNoise(0, range(B)))
    torch.testing.assert_close(found.nats_B, torch.full((B,), float(L)))


# ---------------------------------------------------------------- from a command


@each_reader
def test_a_command_trains_on_pairs_and_the_model_writes_targets(name, tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"{i // 10} {i % 10}\t{i % 10} {i // 10}\n" for i in range(100)), "utf-8")
    words = ["train", "--preset", "smoke", "--method", name, "--data", str(file), "--out", str(tmp_path / "run"), "--quiet"]
    sizes = {"data__tokenizer": "words", "data__packing": "padded", "data__source_len": S, "data__vocab_size": 16}
    steps = {"train__steps": 2, "train__encoder_steps": 2, "train__save_every": 2, "train__eval_every": 2}
    assert main([*words, *micro_flags(name, **sizes, **steps)]) == 0
    texts = load(tmp_path / "run", "cpu").generate(2, source=["1 2", "3 4"])
    assert len(texts) == 4 and set(" ".join(texts).split()) <= set("0123456789")
