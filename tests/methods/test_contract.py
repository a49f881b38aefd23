"""What every method promises, over the whole registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from micro import micro_model
from torch import Tensor

from jpeg_dlm.config import validate
from jpeg_dlm.methods.base import FREE, Batch, Method
from jpeg_dlm.methods.registry import for_method, names
from jpeg_dlm.options import from_dict, to_dict
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.util.rng import RowNoise

B, L, VOCAB = 4, 12, 300
NOT_MATRICES = ("embedding", "pos_emb", "pos_latent", "tokens", "query", "scale_mlp", "lm_head", "unembed", "bias")

each_system = pytest.mark.parametrize("name", names("system"))
each_trained = pytest.mark.parametrize("name", names("system", "stage"))


def tokens(rows: int = B) -> Tensor:
    return torch.randint(2, VOCAB, (rows, L), generator=torch.Generator().manual_seed(7))


PADDING = torch.arange(L) < torch.tensor([12, 3, 5, 1])[:, None]


def noise(rows: int = B, step: int = 0, seed: int = 0) -> RowNoise:
    return RowNoise(seed, range(rows), step)


def losses(method: Any, batch: Batch, noise: RowNoise) -> dict[str, float]:
    with torch.no_grad():
        return {term: float(value) for term, value in method.losses(batch, noise).items()}


# ---------------------------------------------------------------- training


@each_trained
def test_losses_are_finite_numbers_and_those_with_a_weight_exist(name):
    method = micro_model(name, 0.1).train()
    for batch in (Batch(tokens()), Batch(tokens(), PADDING)):
        terms = method.losses(batch, noise())
        assert all(value.ndim == 0 and value.isfinite() for value in terms.values())
        assert method.loss_weights.keys() & terms.keys()
        total = method.total_loss(terms)
        assert total.isfinite()
        assert total.item() == pytest.approx(sum(w * terms[t].item() for t, w in method.loss_weights.items() if t in terms))


@each_trained
def test_every_parameter_of_a_group_gets_a_gradient(name):
    """Distributed training waits for each, also in the first step of a fresh model."""
    method = micro_model(name, 0.0).train()
    method.total_loss(method.losses(Batch(tokens()), noise())).backward()
    parameters = {n: p for group in method.parameter_groups() for n, p in group.parameters.items()}
    assert [n for n, p in parameters.items() if p.grad is None or not p.grad.isfinite().all()] == []
    assert parameters.keys() == {n for n, p in method.named_parameters() if p.requires_grad}


@each_trained
def test_losses_depend_on_rows_and_step_not_on_global_randomness(name):
    method = micro_model(name, 0.1)
    torch.manual_seed(1)
    first = losses(method, Batch(tokens()), noise())
    torch.manual_seed(2)
    assert losses(method, Batch(tokens()), noise()) == first
    assert name == "ar" or losses(method, Batch(tokens()), noise(step=1)) != first


@each_trained
def test_padding_does_not_change_a_loss(name):
    """Nor does what stands there, for methods that see only real tokens through an encoder or count only them."""
    method = micro_model(name, 0.1)
    if name in ("mdlm", "sedd", "duo", "flm", "langflow", "elf"):
        pytest.skip("padding is noised like text: it is part of the row that the network sees")
    first, second = (losses(method, Batch(torch.where(PADDING, tokens(), fill), PADDING), noise()) for fill in (0, 1))
    assert first == pytest.approx(second, rel=1e-4)


@each_trained
def test_chunks_and_bf16_change_a_loss_little(name):
    method = micro_model(name, 0.1)
    whole = losses(method, Batch(tokens()), noise())
    with torch.autocast("cpu", torch.bfloat16):
        half = losses(method, Batch(tokens()), noise())
    assert half == pytest.approx(whole, rel=0.1, abs=0.02)
    if hasattr(method.config.objective if hasattr(method, "config") else None, "ce_chunk"):
        chunked = losses(micro_model(name, 0.1, objective__ce_chunk=5), Batch(tokens()), noise())
        assert chunked == pytest.approx(whole, rel=1e-4, abs=1e-6)


@each_trained
def test_hidden_matrices_are_maps_of_vectors_alone(name):
    """Muon orthogonalizes these: a gate of one number would become its sign, a table would forget how often a token occurs."""
    method = micro_model(name)
    parameters = {n: p for group in method.parameter_groups() for n, p in group.parameters.items()}
    matrices = method.hidden_matrices() & parameters.keys()
    assert matrices and not any(n.endswith(".latents") for n in matrices)
    for matrix in matrices:
        parts = matrix.removesuffix(".weight").split(".")
        assert parameters[matrix].ndim == 2 and min(parameters[matrix].shape) > 1
        assert not parts[-1].endswith(NOT_MATRICES) and parts[-2:] != ["output_layer", "linear"]
    others = {n for n, p in parameters.items() if p.ndim == 2} - matrices
    assert all("head" in n or "linear" in n or n.removesuffix(".weight").endswith((*NOT_MATRICES, ".latents")) for n in others)


# ---------------------------------------------------------------- sampling


def sample(method: Method, rows: Any, seed: int = 1, **options: Any) -> Tensor:
    return method.sample(method.config.sampler, RowNoise(seed, rows), **options)


@each_system
def test_a_sample_is_the_same_in_any_batch(name):
    method = micro_model(name, 0.1)
    together = sample(method, range(6))
    assert together.shape == (6, L) and 0 <= together.min() and together.max() < VOCAB
    assert torch.equal(torch.cat([sample(method, [i]) for i in range(6)]), together)
    assert torch.equal(sample(method, [4, 1]), together[[4, 1]])
    assert len({tuple(row) for row in together.tolist()}) > 1 and not torch.equal(sample(method, range(6), seed=2), together)


@each_system
def test_watching_shows_every_step_and_changes_nothing(name):
    method, calls = micro_model(name), []
    rows = sample(method, range(2), watch=lambda k, n, t, decode: calls.append((k, n, t, decode().clone())))
    assert torch.equal(rows, sample(method, range(2)))
    steps = calls[0][1]
    assert [call[:2] for call in calls] == [(k, steps) for k in range(steps + 1)]
    times = [t for *_, t, _ in calls]
    assert times == sorted(times) and times[0] < 0.5 and times[-1] == 1.0
    assert all(shown.shape == (2, L) and shown.max() < VOCAB for *_, shown in calls) and torch.equal(calls[-1][3], rows)


@each_system
def test_given_tokens_are_kept(name):
    method = micro_model(name)
    given = tokens(5).where(torch.rand(5, L, generator=torch.Generator().manual_seed(0)) < 0.4, FREE)
    given[0], given[1] = tokens(1)[0], FREE  # nothing to fill, everything to fill
    assert "templates" in method.supports
    rows = sample(method, range(5), fixed_BL=given)
    assert torch.equal(rows[given != FREE], given[given != FREE]) and rows.min() >= 0 and rows.max() < VOCAB
    if "guides" not in method.supports:  # gradients of a batch round otherwise than those of a row
        assert torch.equal(sample(method, [3], fixed_BL=given[3:4]), rows[3:4])


# ---------------------------------------------------------------- likelihood


@each_system
def test_a_likelihood_counts_real_tokens_and_is_the_same_in_parts(name):
    method = micro_model(name, 0.1)
    whole = method.likelihood(Batch(tokens()), noise())
    if whole is None:
        pytest.skip("it has none")
    padded = method.likelihood(Batch(tokens(), PADDING), noise())
    unpredicted = L - int(whole.tokens_B[0])
    assert padded.tokens_B.tolist() == [n - unpredicted for n in (12, 3, 5, 1)]
    assert padded.nats_B[0] == whole.nats_B[0] and (padded.nats_B <= whole.nats_B).all() and (whole.nats_B > 0).all()
    parts = [method.likelihood(Batch(tokens()[i : i + 1]), RowNoise(0, [i], total=B)).nats_B for i in range(B)]
    torch.testing.assert_close(torch.cat(parts), whole.nats_B, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- files and options


@each_system
def test_exported_tensors_come_back(name):
    method, fresh = micro_model(name), micro_model(name, 0.0)
    state = method.export_state()
    assert state and not any(tensor.startswith("encoder.") for tensor in state)
    fresh.import_state({tensor: value.clone() for tensor, value in state.items()}, "here")
    assert all(torch.equal(value, state[tensor]) for tensor, value in fresh.export_state().items())
    assert torch.equal(sample(fresh, range(2)), sample(method, range(2)))


@each_trained
@pytest.mark.parametrize("preset_name", list(PRESETS))
def test_every_preset_has_a_valid_config_that_survives_json(preset_name, name):
    base = preset(preset_name)
    config = validate(for_method(base, name))
    assert (config.method, config.preset) == (name, preset_name) and from_dict(to_dict(config)) == config
    assert config.data.token_len == base.data.token_len
