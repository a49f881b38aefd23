"""Every method keeps what it is given; methods of latents also follow guides and begin from texts."""

from __future__ import annotations

import pytest
import torch
from conftest import perturb

from jpeg_dlm.api import Model, load
from jpeg_dlm.flow.guidance import GuidedDecoder, given_tokens
from jpeg_dlm.methods.base import FILL, GUIDE, system_class
from jpeg_dlm.methods.registry import names
from jpeg_dlm.sampling.prompts import FixedTokenCounter
from jpeg_dlm.util.errors import DataError, UsageError

pytest_plugins = ["stand_in"]  # fixtures

GUIDED_METHODS = [name for name in names("system") if "guides" in system_class(name).supports]


@pytest.fixture
def models(micro_folders):
    def make(name: str, **changes: object) -> Model:
        # A few steps: random networks make a difference of the last bit grow with every step.
        few = {"sampler__steps": 8} if name == "elf" else {}
        model = load(micro_folders(name, **few, **changes), "cpu")
        perturb(model.method, 0.2)
        return model

    return make


def test_every_system_says_what_it_takes():
    assert {"elf", "cosmos", "ldlm", "jpeg-dlm"} == set(GUIDED_METHODS)
    for name in names("system"):
        long = {"long text"} if name in ("ldlm", "jpeg-dlm") else set()
        assert system_class(name).supports == (GUIDE if name in GUIDED_METHODS else FILL) | long


def test_given_tokens_are_kept_and_counted_over_batches(models):
    g = torch.Generator().manual_seed(0)
    fixed = torch.randint(6, 300, (10, 12), generator=g).where(torch.rand(10, 12, generator=g) < 0.5, -1)
    decoded = FixedTokenCounter(fixed)
    tokens = models("jpeg-dlm").sample(10, fixed=fixed, batch=4, watch=decoded, steps=2)
    assert tokens[fixed >= 0].equal(fixed[fixed >= 0])
    assert decoded.tokens == int((fixed >= 0).sum()) and decoded.kept < decoded.tokens  # random weights decode to few of them


@pytest.mark.parametrize("name", GUIDED_METHODS)
def test_a_guide_lowers_its_loss(name, models):
    """The loss of the final latents, told by the last call, is lower than without strength."""
    model = models(name)
    seen: dict[float, float] = {}
    for strength in (0.0, 1.0):
        losses = []

        def guide(logits, losses=losses):
            loss = -logits.log_softmax(-1)[..., 17].mean(1)
            losses.append(loss.detach().mean().item())
            return loss

        model.sample(4, guide=guide, strength=strength)
        seen[strength] = losses[-1]
    assert seen[1.0] < seen[0.0]


@pytest.mark.parametrize("name", GUIDED_METHODS)
def test_without_a_guide_nothing_is_steered(name, models, monkeypatch):
    model = models(name)
    plain = model.sample(4, seed=2)

    def broken(*args):
        raise AssertionError("a gradient was taken")

    monkeypatch.setattr(GuidedDecoder, "_step", broken)
    assert model.sample(4, seed=2).equal(plain)
    monkeypatch.undo()
    still = model.sample(4, seed=2, guide=lambda logits: 0 * logits.flatten(1).sum(1))  # a loss of 0 moves nothing
    assert still.equal(plain)


@pytest.mark.parametrize("name", GUIDED_METHODS)
def test_a_guided_text_is_the_same_in_any_batch(name, models):
    model = models(name)
    fixed = torch.full((12,), -1)
    fixed[2:6] = torch.arange(20, 24)
    together = model.sample(5, seed=3, fixed=fixed, guide=model.contains("farmer"))
    alone = torch.cat([model.sample(1, seed=3, first=i, fixed=fixed, guide=model.contains("farmer")) for i in range(5)])
    assert (together == alone).float().mean() > 0.9  # but for ids that rounding makes equally probable


@pytest.mark.parametrize("name", GUIDED_METHODS)
def test_an_edit_without_noise_is_the_refined_text_and_with_noise_alone_a_new_one(name, models):
    model = models(name)
    text = "The farmer plants corn"
    assert model.edit(text, 3, noise=1.0, seed=4) == [
        said for said in model.to_text(model.sample(3, seed=4)[:, : len(model.tokenizer.encode(text))])
    ]
    first = model.edit(text, 2, noise=0.0)
    assert first[0] == first[1] and first == model.edit(text, 2, noise=0.0, seed=9)  # nothing is random
    assert len(model.edit(text, 2, noise=0.5, steps=2)) == 2


def test_latents_of_an_edit_are_fitted_to_the_text(models):
    """More tokens come back than from the codec alone."""
    model = models("jpeg-dlm")
    rows = torch.randint(6, 300, (64, 12), generator=torch.Generator().manual_seed(3))
    z = model._encode_rows(rows)
    codec = (model._decode_rows(z) == rows).float().mean()
    kept = (model.rewritten(rows, 0.0) == rows).float().mean()
    assert kept > codec
    logits = lambda z: model.method.logits(z, model.config.sampler.w)  # noqa: E731
    assert logits(z).argmax(-1).equal(model._decode_rows(z))
    by_hand = GuidedDecoder(logits, given_tokens(rows)).refine(z)
    assert model._decode_rows(by_hand).equal(model.rewritten(rows, 0.0))


REFUSED = [
    lambda m: m.generate(1, guide=3),
    lambda m: m.generate(1, guide=lambda x: x.sum()),
    lambda m: m.generate(1, guide=lambda x: x.flatten(1).sum(1) * torch.nan),
    lambda m: m.generate(1, prompt="The", strength=-1),
    lambda m: m.generate(1, prompt="The", strength=torch.inf),
    lambda m: m.generate(2, fixed=torch.zeros(3, 12, dtype=torch.long)),
    *[lambda m, words=words: m.contains(*words) for words in ((), (" ",), ("corn " * 40,), (4,))],
    *[lambda m, noise=noise: m.edit("The", noise=noise) for noise in (1.5, "a")],
    *[lambda m, text=text: m.edit(text) for text in ("", "corn " * 40)],
    lambda m: m.edit("The", 0),
    lambda m: m.interpolate("The"),
]


def test_what_cannot_be_done_is_refused(models):
    model = models("jpeg-dlm")
    for call in REFUSED:
        with pytest.raises((UsageError, DataError)):
            call(model)


def test_unknown_words_are_refused_by_name(models, monkeypatch):
    model = models("jpeg-dlm")
    monkeypatch.setattr(model.tokenizer, "unk_id", model.tokenizer.encode("corn")[0])
    for call in (model.fixed_tokens, model.contains, model.edit, model.reconstruct, model.encode):
        with pytest.raises(DataError, match="'corn'"):
            call("The corn")


def test_a_path_passes_through_every_text(models):
    model = models("jpeg-dlm")
    texts = ["The farmer plants", "The smith forges", "The captain steers"]
    path = model.interpolate(*texts, points=4)
    legs = [model.interpolate(*pair, points=4) for pair in (texts[:2], texts[1:])]
    assert len(path) == 7 and len(legs[0]) == 4
    z = model.encode(texts)
    longest = max(len(model.tokenizer.encode(text)) for text in texts)
    ends = model._decode_rows(z)[:, :longest].tolist()
    assert [path[0], path[3], path[6]] == [model.tokenizer.decode(ids) for ids in ends]
