"""`examples/autoregressive_decoder.py` as an installed plug-in: it trains, and its steps are those of teacher forcing."""

from pathlib import Path

import pytest
import torch
from micro import installed_package, micro_flags, micro_model

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.util.rng import RowNoise

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def installed(tmp_path):
    with installed_package(tmp_path / "site", EXAMPLES, "decoded = autoregressive_decoder:Decoded"):
        yield


@pytest.mark.slow
def test_it_trains_writes_and_decodes_as_under_teacher_forcing(installed, corpus_file, tmp_path):
    words = ["train", "--preset", "smoke", "--method", "decoded", "--data", str(corpus_file), "--out", str(tmp_path / "run")]
    assert main([*words, "--quiet", *micro_flags()]) == 0
    assert len(load(tmp_path / "run").generate(2)) == 2

    method = micro_model("decoded")
    batch = Batch(torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(0)))
    z = method.encode(batch)
    tokens = method.tokens(z, 1.0)
    assert method.logits(z, 1.0).argmax(-1).equal(tokens)  # the cache changes nothing
    hhat = method.decompressed(z)
    other = tokens.clone()
    other[:, 6:] = 7
    before, after = (method.token_decoder.corrected(hhat, read, method.lm_head) for read in (tokens, other))
    assert torch.allclose(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7:], after[:, 7:])  # it is causal
    method.train().total_loss(method.losses(batch, RowNoise(0, range(3), 5))).backward()
    assert all(p.grad is not None for p in method.token_decoder.parameters())
