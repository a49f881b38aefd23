"""Temperature and top-p of the systems that predict distributions over tokens, against closed forms and their limits."""

import pytest
import torch
from micro import micro_config, micro_model

from jpeg_dlm.methods.discrete import AncestralSampler, TokenSampler, cooled
from jpeg_dlm.util.rng import RowNoise

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.25, 0.5, 2.0])
def test_a_known_distribution(temperature):
    powers = P ** (1 / temperature)
    assert torch.allclose(cooled(P.log() + 7, temperature).softmax(-1), powers / powers.sum())
    cut = TokenSampler(temperature=temperature, top_p=float(powers[:2].sum() / powers.sum()) - 1e-9).sharpened(P.log())
    assert torch.allclose(cut.softmax(-1), torch.cat([powers[:2] / powers[:2].sum(), torch.zeros(2)]))


def test_limits():
    logits = torch.tensor([[1.0, 900.0, 900.0, -900.0], [2.0, 1.0, 0.0, -torch.inf]])
    assert TokenSampler().sharpened(logits) is logits
    assert cooled(logits, 0).softmax(-1).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]  # the first of equals
    assert cooled(logits, 1e-30)[1].softmax(-1).tolist() == [1, 0, 0, 0]
    assert cooled(logits, 0.01).exp().isfinite().all()  # SEDD has exponentials without a softmax


@pytest.mark.parametrize("name", ["mdlm", "sedd"])
def test_unmasked_tokens_have_the_sharpened_law(name):
    method, n, sampler = micro_model(name), 20_000, AncestralSampler(temperature=0.6)
    with torch.no_grad():
        h_1H = method.states(torch.full((1, 12), method.mask_id), torch.ones(1))[0, :1]
        u_N = (torch.arange(n) + 0.5) / n  # one in each of n equal intervals: frequencies are within 1 / n
        tokens_N = method.draw(h_1H.expand(n, -1), u_N, sampler)
        powers_V = method.weights(h_1H)[0].double() ** (1 / 0.6)
        before, after = (method.total_weight(h) for h in (h_1H, h_1H))
    share_V = torch.bincount(tokens_N, minlength=len(powers_V)) / n
    assert (share_V - powers_V / powers_V.sum()).abs().max() < 1.5 / n
    assert before == after


@pytest.mark.parametrize("name", ["ar", "mdlm", "sedd", "duo", "flm", "langflow"])
def test_the_limits_of_both_are_the_most_probable_tokens(name):
    method = micro_model(name)

    def tokens(**options):
        return method.sample(micro_config(name, **options).sampler, RowNoise(3, range(6)))

    greedy = tokens(sampler__temperature=0)
    assert greedy.equal(tokens(sampler__temperature=1e-6)) and greedy.equal(tokens(sampler__top_p=1e-9))
    assert not greedy.equal(tokens(sampler__temperature=1))
    assert "greedy" in micro_config(name, sampler__temperature=0).sampler.label()


def test_a_greedy_duo_ends_with_the_most_probable_tokens():
    method = micro_model("duo")
    ends = [micro_config("duo", sampler__temperature=0, sampler__final=final).sampler for final in ("ancestral", "greedy")]
    one, other = (method.sample(sampler, RowNoise(3, range(6))) for sampler in ends)
    assert one.equal(other)
