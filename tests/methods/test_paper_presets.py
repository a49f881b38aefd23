"""The paper's presets stay what they are: rows, parameters, random numbers, losses and texts of shrunken ones are on record.

`paper_presets.json` was written by the code from before there were contexts and guides. Integers, names and shapes are exact;
CPUs round differently, so losses are compared with a tolerance, and tokens where one is clearly the most probable.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import perturb
from torch import Tensor, nn

from jpeg_dlm.config import Config, validate
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.text.packing import RowLayout, pack_document
from jpeg_dlm.training import data as training_data
from jpeg_dlm.training.data import BatchStream
from jpeg_dlm.training.trainer import Trainer
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.rng import RowNoise

RECORD = Path(__file__).with_name("paper_presets.json")
NAMES = ("lm1b", "owt128", "owt1024")
L, VOCAB, F = 12, 60, 8
# The rate r, the number of prefix tokens, packing, schedules, weights and all else remain the preset's.
SMALL = {
    "data.vocab_size": VOCAB, "data.token_len": L, "encoder.feature_dim": F, "model.latent_dim": 8, "model.bottleneck_dim": 4,
    "model.codec_layers": 1, "model.codec_heads": 2, "model.proj_dim": 8, "model.hidden": 8, "model.depth": 2, "model.heads": 2,
    "model.freq_dim": 4, "objective.sigreg_slices": 4, "train.batch": 4, "train.steps": 100,
    "train.precision": "fp32", "sampler.steps": 4,
}  # fmt: skip
CLEAR = 0.05  # margin between the two most probable tokens from which rounding does not decide


def small(name: str) -> Config:
    base = preset(name)
    latents = L * base.model.latent_len // base.data.token_len
    return validate(override(base, SMALL | {"model.latent_len": latents}))


class Features(nn.Module):
    """Stands for the frozen encoder: waves whose frequency is the token."""

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
        return torch.sin(0.1 * tokens_BL[..., None] * torch.arange(1, F + 1) + torch.arange(L)[:, None])


@dataclass
class PackedRows:
    """Stands for prepared blocks: documents of sentences, packed as the preset says."""

    config: Config
    source_len = 0

    def __post_init__(self) -> None:
        d, found, i = self.config.data, [], 0
        for document in range(12):
            sizes = [3 + (5 * document + 7 * sentence) % 11 for sentence in range(1 + document % 4)]
            found.append([[4 + (i := i + 1) * 7 % (VOCAB - 4) for _ in range(size)] for size in sizes])
        layout, rows, carry = RowLayout(d.packing, L, 1, 0, d.frame, 2, 3, d.whole), [], []
        for document in found:
            filled, carry = pack_document(layout, carry, document)
            rows += filled
        self.all = torch.tensor(rows)

    def __len__(self) -> int:
        return len(self.all)

    def rows(self, numbers) -> Tensor:
        return self.all[list(numbers)]

    def mask(self, tokens_BL: Tensor) -> Tensor | None:
        return tokens_BL != 0 if self.config.data.packing == "padded" else None


def facts(name: str, run: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what is on record of a preset."""
    config, drawn = small(name), []

    class Recording(RowNoise):
        def _draw(self, law, purpose: str, shape: tuple[int, ...]) -> Tensor:
            x = super()._draw(law, purpose, shape)
            # Uniform numbers are multiples of 2**-24, equal on every CPU.
            whole = (x.flatten()[:3].double() * 2**24).long().tolist() if law == "uniform" else []
            drawn.append([law, purpose, list(shape), [self.seed, self.step, *self.rows], whole])
            return x

        def shared(self, purpose: str) -> torch.Generator:
            g = super().shared(purpose)
            drawn.append(["shared", purpose, g.initial_seed()])
            return g

    blocks = PackedRows(config)
    method = build_method(config, Features())
    assert isinstance(method, JpegDlm)
    found: dict[str, Any] = {
        "rows": blocks.all.tolist(),
        "state": [[n, list(t.shape), str(t.dtype)] for n, t in method.state_dict().items()],
        "groups": [[g.name, list(g.parameters)] for g in method.parameter_groups()],
        "first weights": sum(p.detach().double().norm().item() for p in method.parameters()),
    }
    perturb(method.eval(), 0.15)
    with torch.no_grad():
        method.decompressor.pos_emb.weight.mul_(4)  # so that places differ in their tokens
    stream = BatchStream(blocks, config.train, torch.device("cpu"))  # type: ignore[arg-type]
    found["order"] = [stream.row_numbers(step, micro)[1] for step in (0, 1) for micro in (0, 1)]
    decoded: list[Tensor] = []  # latents that go into the decompressor, then logits
    hooks = [
        method.decompressor.register_forward_hook(lambda module, inputs, output: decoded.append(inputs[0])),
        method.lm_head.register_forward_hook(lambda module, inputs, output: decoded.append(output)),
    ]
    tokens_BL = method.sample(config.sampler, Recording(0, [0, 5]))
    for hook in hooks:
        hook.remove()
    found["sampling"], drawn = drawn, []
    z_BND, logits_BLV = decoded[0], decoded[1].view(*tokens_BL.shape, -1)
    top = logits_BLV.topk(2).values
    assert torch.equal(tokens_BL, logits_BLV.argmax(-1))
    found["latents"], found["tokens"] = z_BND.flatten().tolist(), tokens_BL.tolist()
    found["margins"] = (top[..., 0] - top[..., 1]).tolist()
    patch.setattr(training_data, "RowNoise", Recording)
    found["losses"] = Trainer(config, method, stream, run, Ranks()).train_step()
    return found | {"training": drawn, "statistics": method.latent_scale.tolist()}


@pytest.mark.parametrize("name", NAMES)
def test_a_paper_preset_is_unchanged(name, tmp_path, monkeypatch):
    expected = json.loads(RECORD.read_text())[name]
    found = json.loads(json.dumps(facts(name, tmp_path, monkeypatch)))
    for exact in ("rows", "order", "state", "groups", "training", "sampling"):
        assert found[exact] == expected[exact], exact
    assert found["first weights"] == pytest.approx(expected["first weights"], rel=1e-5)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["statistics"] == pytest.approx(expected["statistics"], rel=1e-4)
    assert found["latents"] == pytest.approx(expected["latents"], abs=1e-3)
    rows = zip(found["tokens"], expected["tokens"], expected["margins"], strict=True)
    clear = [(a, b) for row in rows for a, b, margin in zip(*row, strict=True) if margin > CLEAR]
    assert len(clear) > L and all(a == b for a, b in clear)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        found = {name: facts(name, Path(folder), patch) for name in NAMES}
    lines = [
        f'"{name}": {{\n' + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in of.items()) + "\n}" for name, of in found.items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
