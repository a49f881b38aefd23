"""Checkpoints in the authors' layout: import, sampling in their random-number order, export, and what is refused."""

from dataclasses import replace

import pytest
import torch
from reference import slow_dit, slow_tokens, under
from refusals import refusal

from jpeg_dlm.api import load
from jpeg_dlm.checkpoints.model_folder import read_model
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.util.files import save_tensors, sha256_file

L, N, D, F, V, HIDDEN, HEADS, CODEC_HEADS = 9, 4, 12, 10, 23, 24, 3, 2
CODEC = {"latent_len": N, "latent_dim": D, "bottleneck_dim": 6, "codec_layers": 2, "codec_heads": CODEC_HEADS, "proj_dim": 14}
DIT = {"hidden": HIDDEN, "depth": 2, "heads": HEADS, "freq_dim": 8, "time_tokens": 2, "sc_tokens": 3, "mode_tokens": 1}
SIZES = {"data.token_len": L, "data.vocab_size": V, "encoder.feature_dim": F}
SIZES |= {f"model.{name}": size for name, size in (CODEC | DIT).items()}


@pytest.fixture(scope="session")
def released():
    """Tensors in the released layout, random enough that every one of them matters."""
    g = torch.Generator().manual_seed(6)
    state = {k: t.clone() for k, t in build_method(override(preset("lm1b"), SIZES)).export_state().items()}
    for name, t in state.items():
        t.add_(0.4 * torch.randn(t.shape, generator=g))
        if name == "latent_scale":
            t.abs_().add_(0.3)
        # tokens differ from place to place and from sample to sample
        elif name.startswith("decompressor.pos_"):
            t.mul_(20)
        elif "_head.linear.weight" in name or (name.startswith("decompressor.layers") and "attn.out" in name):
            t.mul_(4)
        elif name == "lm_head.bias":
            t.mul_(0.1)
        elif name == "lm_head.weight":
            t.mul_(5)
    return state


@pytest.fixture(scope="session")
def file(released, tmp_path_factory):
    path = tmp_path_factory.mktemp("released") / "jpeg_dlm_small.safetensors"
    save_tensors(path, released)
    return path


@pytest.fixture(scope="session")
def folder(file, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "model"
    assert main(["import", str(file), "--preset", "lm1b", "--out", str(out)]) == 0
    return out


# ---------------------------------------------------------------- names and sizes


def test_import_reads_every_size_from_the_tensors(folder):
    config = read_model(folder).config
    wanted = override(preset("lm1b"), SIZES)
    assert config.model == wanted.model
    assert (config.data.token_len, config.data.vocab_size, config.encoder.feature_dim) == (L, V, F)
    assert not config.model.decode_residual and config.model.position_scale == 0


def of_lengths(path, tokens, latents):
    """A file of the released layout with these lengths; its networks are small."""
    lengths = SIZES | {"data.token_len": tokens, "model.latent_len": latents}
    save_tensors(path, build_method(override(preset("lm1b"), lengths)).export_state())


@pytest.mark.parametrize(("name", "tokens", "latents"), [("lm1b", 128, 32), ("owt1024", 1024, 512)])
def test_the_lengths_of_a_released_file_tell_its_preset(name, tokens, latents, tmp_path, capsys):
    of_lengths(tmp_path / "a.safetensors", tokens, latents)
    assert main(["import", str(tmp_path / "a.safetensors"), "--out", str(tmp_path / "model")]) == 0
    config, wanted = read_model(tmp_path / "model").config, preset(name)
    assert (config.preset, config.sampler.w, config.sampler.grid) == (name, wanted.sampler.w, wanted.sampler.grid)
    assert (config.data.source, config.data.frame) == (wanted.data.source, wanted.data.frame)
    assert f"Of preset {name}" in capsys.readouterr().out


def test_other_lengths_need_a_preset(tmp_path, capsys):
    of_lengths(tmp_path / "a.safetensors", 128, 64)
    command = ["import", str(tmp_path / "a.safetensors"), "--out", str(tmp_path / "model")]
    assert "--preset" in refusal(capsys, command, 2) and not (tmp_path / "model").exists()
    assert main([*command, "--preset", "owt128", "--sampler.w", "2"]) == 0
    assert "--sampler.steps 64, --sampler.grid quantile." in capsys.readouterr().out  # what was given is not repeated


# ---------------------------------------------------------------- sampling as the authors' code does it


def released_sampler(p, n, steps, w, seed, batch, grid_kind):
    """Algorithm 2 with the global generator, in the order of the first released version."""
    out = []
    torch.manual_seed(seed)
    for start in range(0, n, batch):
        if grid_kind == "quantile":
            torch.manual_seed(seed + start)
        rows = min(batch, n - start)
        z = torch.randn(rows, N, D)
        if grid_kind == "random":
            inner = torch.sigmoid(0.8 * torch.randn(steps - 1) - 1.5).sort().values.tolist()
        else:
            normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
            inner = [torch.sigmoid(-1.5 + 0.8 * normal.icdf(torch.tensor(i / steps).double())).item() for i in range(1, steps)]
        grid = torch.tensor([0.0, *inner, 1.0]).tolist()
        for row in z:
            s = torch.zeros_like(row)
            for t, u in zip(grid, grid[1:], strict=False):
                x = slow_dit(under(p, "dit."), HEADS, row, t, s, w, decode=False)
                row = row + (u - t) * (x - row) / max(1 - t, 0.05)
                s = x
            out.append(slow_tokens(p, CODEC_HEADS, HEADS, row, w).tolist())
    return out


class ReleasedNoise:
    """Random numbers in the order of the authors' code: one generator for the noise and the times of a batch."""

    def __init__(self, rows, generator):
        self.rows, self.generator = rows, generator

    def normal(self, name, *shape):
        return torch.randn(self.rows, *shape, generator=self.generator)

    def shared(self, name):
        return self.generator


@torch.no_grad()
@pytest.mark.parametrize("grid", ["random", "quantile"])
@pytest.mark.parametrize("seed", [0, 3])
def test_tokens_equal_those_of_an_independent_sampler(folder, released, grid, seed):
    method, g, tokens = load(folder, "cpu").method, torch.Generator().manual_seed(seed), []
    sampler = replace(method.config.sampler, solver="euler", grid=grid, steps=6, w=2.5)
    for start in (0, 2, 4):  # with the random grid (LM1B) one generator for all batches, else (OWT) a new one for each
        g = g if grid == "random" else g.manual_seed(seed + start)
        tokens += method.sample(sampler, ReleasedNoise(min(2, 5 - start), g)).tolist()
    expected = released_sampler(released, 5, 6, 2.5, seed, 2, grid)
    assert len({tuple(row) for row in expected}) >= 4 and len({i for row in expected for i in row}) >= 4  # far from constant
    assert tokens == expected


# ---------------------------------------------------------------- export


def test_export_writes_the_same_file_back(file, folder, tmp_path):
    assert main(["export", str(folder), "--out", str(tmp_path / "again")]) == 0
    back = tmp_path / "again" / "model.safetensors"
    assert sha256_file(back) == sha256_file(folder / "model.safetensors") == sha256_file(file)


# ---------------------------------------------------------------- what is refused


def written(path, tensors):
    save_tensors(path, tensors)


def without(name):
    return lambda path, tensors: written(path, {k: t for k, t in tensors.items() if k != name})


def instead(name, change):
    return lambda path, tensors: written(path, tensors | {name: change(tensors[name])})


BROKEN = {
    "lacks a tensor that tells a size": (without("compressor.latents"), "compressor.latents"),
    "has an extra tensor": (lambda p, t: written(p, t | {"dit.extra": torch.zeros(2)}), "dit.extra"),
    "has a wrong shape": (instead("dit.self_cond_proj.weight", lambda t: t[:, :-1].clone()), "dit.self_cond_proj.weight"),
    "has sizes that contradict each other": (instead("compressor.latents", lambda t: t.repeat(5, 1)), "latent_len"),
    "is not there": (lambda p, t: None, "does not exist"),
    "is a pickle": (lambda p, t: p.write_bytes(b"cos\nmkdir\n(S'mark'\ntR."), "safetensors"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_import_refuses_a_file_that(case, released, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, word = BROKEN[case]
    make(tmp_path / "file.safetensors", released)
    assert word in refusal(capsys, ["import", "file.safetensors", "--preset", "lm1b", "--out", "model"], 1)
    assert not (tmp_path / "model").exists()
