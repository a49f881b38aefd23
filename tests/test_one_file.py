"""`examples/jpeg_dlm_in_one_file.py` with the package's weights and noise has the package's losses and samples."""

import importlib.util
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from micro import micro_config, micro_model

from jpeg_dlm.methods.base import Batch
from jpeg_dlm.util.rng import RowNoise

PATH = Path(__file__).parent.parent / "examples" / "jpeg_dlm_in_one_file.py"
SIZES = {f"model__{name}": 1 for name in ("time_tokens", "sc_tokens", "mode_tokens")}
SIZES |= {"data__vocab_size": 40, "model__freq_dim": 32, "model__proj_dim": 16, "model__depth": 2}
SIZES |= {"objective__standardize_steps": 0, "train__steps": 40}
# Names in the package, which are those of the released checkpoints, and names in the file.
RENAMED = {
    r"\.net\.4\.": ".3.",
    r"\.net\.": ".",
    r"gamma$": "weight",
    r"\.down\.": ".0.",
    r"\.up\.": ".1.",
    r"\.proj1\.": ".0.",
    r"\.proj2\.": ".1.",
    r"\.mlp_0\.": ".0.",
    r"\.mlp_2\.": ".2.",
    r"_head\.norm_final\.": "_head.0.",
    r"_head\.linear\.": "_head.1.",
    r"^(compressor|target|decompressor)\.layers\.(\d)\.attn\.": r"\1.layers.\2.",
    r"^dit\.blocks\.(\d)\.(attn|mlp)\.": r"dit.blocks.\1.",
}


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("jpeg_dlm_in_one_file", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the package under the names of the file; a gate is one number there."""
    weights = {}
    for name, tensor in state.items():
        for pattern, new in RENAMED.items():
            name = re.sub(pattern, new, name)
        weights[name] = tensor
    for kind in ("attn_gate", "ffn_gate", "query_gate"):
        for name in [n for n in weights if n.endswith(f"{kind}.scale_mlp.weight")]:
            bias = weights.pop(name.replace("weight", "bias"))
            weights[name.removesuffix(".scale_mlp.weight")] = 1 + (weights.pop(name) + bias).squeeze()
    for name in [n for n in weights if n.endswith(".attn_gate")]:
        gates = weights.pop(name), weights.pop(name.replace("attn_gate", "ffn_gate"))
        weights[name.replace("attn_gate", "gates")] = torch.stack(gates)
    return {name: tensor for name, tensor in weights.items() if not name.startswith(("encoder.", "latent_updates"))}


@pytest.fixture(scope="module")
def both(one_file):
    package = micro_model(**SIZES)
    c = micro_config(**SIZES)
    known = {"bottleneck": c.model.bottleneck_dim}
    # The names are the same; the sizes of the model win over the encoder's.
    for group in (c.data, c.encoder, c.model, c.objective, c.train):
        known |= {f.name: getattr(group, f.name) for f in fields(one_file.Options) if hasattr(group, f.name)}
    mine = one_file.JpegDlm(one_file.Options(**known))
    mine.load_state_dict(renamed(package.state_dict()))
    return package, mine


@pytest.mark.parametrize("step", [0, 1, 30])
def test_losses_and_gradients(both, step):
    package, mine = both
    tokens = torch.randint(40, (6, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) < torch.tensor([12, 3, 7, 12, 5, 1])[:, None]
    batch, noise = Batch(tokens, mask), RowNoise(3, range(6), step)
    expected = package.train().losses(batch, noise)
    losses = mine.losses(tokens, mask, package.features(batch), noise, step)
    assert losses.keys() == expected.keys()
    for name, loss in losses.items():
        assert torch.allclose(loss, expected[name], rtol=2e-4, atol=1e-5), (name, loss, expected[name])
    for ours, theirs in zip((mine, package), (losses, expected), strict=True):
        ours.zero_grad()
        sum(theirs.values()).backward()
    for part in ("lm_head.weight", "dit.t_emb_tokens", "compressor.latents", "decompressor.base_query"):
        gradients = (model.get_parameter(part).grad for model in (mine, package))
        assert torch.allclose(*gradients, rtol=2e-3, atol=1e-4), part
    torch.testing.assert_close(mine.latent_scale, package.latent_scale, rtol=1e-4, atol=1e-5)


def test_samples(both):
    package, mine = both
    sampler = replace(package.config.sampler, steps=5, grid="uniform", solver="euler", w=2.0)
    expected = package.eval().sample(sampler, RowNoise(4, range(16)))
    assert torch.equal(mine.eval().sample(RowNoise(4, range(16)), steps=5, w=2.0), expected)
    assert len(set(map(tuple, expected.tolist()))) > 1


@pytest.mark.slow
def test_it_learns_to_write_sentences(one_file, tmp_path, capsys):
    """On four sentences it writes these and no others."""
    lines = ["A man is riding a bike.", "Two dogs run on the beach.", "A girl sings a song now.", "Some people sit down there."]
    options = one_file.Options(steps=400)
    words, rows = one_file.token_rows(lines * 40, options)
    torch.manual_seed(0)
    one_file.train(rows, words, options, torch.Generator().manual_seed(0))
    written = {line.strip() for line in capsys.readouterr().out.splitlines()[-8:]}
    assert written <= {" ".join(re.findall(r"\w+|[^\w\s]", line)) for line in lines} and len(written) >= 2
