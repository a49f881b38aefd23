"""Verbs on a model with a causal codec: training, prompts that its latents hold, and words of each latent."""

import re

import pytest
import torch
from conftest import micro_flags

from jpeg_dlm.api import Model, load
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.nn.spans import span_ends
from jpeg_dlm.sampling.given import Decoded

PROMPT = "The farmer"
TEXT = "The farmer plants corn in the valley. The smith forges nails."


@pytest.fixture(scope="module")
def run(corpus_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("causal") / "run"
    flags = micro_flags(model__codec="causal", encoder__causal=True)
    where = ["--data", str(corpus_file), "--out", str(out), "--device", "cpu", "--threads", "1", "--quiet"]
    assert main(["train", "--preset", "smoke", *where, *flags]) == 0
    return out


class Last:
    """The tokens that the latents themselves decode to."""

    def __call__(self, step, steps, t, tokens):
        self.tokens = tokens().clone()


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_prompt_is_held_by_its_own_latents(run, dtype):
    model = load(run, "cpu", dtype)
    given = model.given(PROMPT)
    length = int((given >= 0).sum())
    fixed = max(end for end in (0, *span_ends(12, 3)) if end <= length)
    assert 0 < fixed < 12
    seen = []
    for seed in (0, 1):
        last = Last()
        assert (model.sample(3, seed=seed, given=given, watch=last)[:, :length] == given[:length]).all()
        seen.append(last.tokens[:, :fixed])
    with torch.no_grad():
        method = model.complete_method()
        row = given.clamp_min(0)[None]
        codec = method.tokens(method.encode(Batch(row)), model.config.sampler.w)[:, :fixed]
    assert torch.equal(seen[0], seen[1]) and (seen[0] == codec).all()


def test_generate_uses_it_and_says_how_much_the_latents_hold(run, capsys):
    assert main(["generate", str(run), "--prompt", PROMPT, "-n", "2", "--device", "cpu"]) == 0
    seen = capsys.readouterr()
    assert seen.out.count(PROMPT) == 2 and "given token" in seen.err
    model = load(run, "cpu")
    given = model.given(PROMPT)
    decoded = Decoded(given)
    model.sample(2, given=given, watch=decoded)
    assert f"{decoded.kept} of {decoded.tokens} given tokens" in seen.err


def words_of(line: str) -> str:
    found = re.fullmatch(r'(?:block \d+, )?latent \d+: "(.*?)"(?:, decoded to ".*")?', line)
    assert found, line
    return found[1]


def test_reconstruct_tells_which_latent_holds_which_words(run, capsys):
    assert main(["reconstruct", TEXT, "--checkpoint", str(run), "--device", "cpu"]) == 0
    seen = capsys.readouterr()
    kept, *lines = seen.err.splitlines()
    model = load(run, "cpu")
    before, after = model.round_trip(TEXT)
    assert "tokens kept" in kept and seen.out.strip() == model.tokenizer.decode(after)
    assert len(before) > 12  # several blocks, the last one not full
    starts = [(block, n) for block in range(0, len(before), 12) for n in range(3) if block + 4 * n < len(before)]
    assert len(lines) == len(starts)
    for (block, n), line in zip(starts, lines, strict=True):
        span = slice(block + 4 * n, min(block + 4 * n + 4, len(before)))
        assert line.startswith(f"block {block // 12}, latent {n}: ")
        assert words_of(line) == model.tokenizer.decode(before[span])
        assert ("decoded to" in line) == (model.tokenizer.decode(after[span]) != model.tokenizer.decode(before[span]))
    assert main(["reconstruct", "The farmer", "--checkpoint", str(run), "--device", "cpu"]) == 0
    assert capsys.readouterr().err.splitlines()[1].startswith('latent 0: "The')


def test_a_model_folder_keeps_the_codec(run, tmp_path):
    model = load(run, "cpu")
    again = load(model.save(tmp_path / "model"), "cpu")
    assert again.config.model.codec == "causal" and again.encoder.model.causal
    assert torch.equal(again.encode([PROMPT]), model.encode([PROMPT]))
    assert again.generate(2, prompt="The farmer") == model.generate(2, prompt="The farmer")
    assert isinstance(again, Model)
