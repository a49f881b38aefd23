"""Checkpoints in the authors' layout: import, sampling in their random-number order, export, and what is refused."""

import math
import os
import pickle

import pytest
import torch
from reference import slow_dit, slow_tokens, under
from safetensors.torch import load_file, save_file

from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.files import save_tensors, sha256_file
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling.sampler import RELEASED_BATCH

L, N, D, F, V, HIDDEN, HEADS, CODEC_HEADS = 9, 4, 12, 10, 23, 24, 3, 2
SIZES = {
    "data.token_len": L, "data.vocab_size": V, "encoder.feature_dim": F, "model.latent_len": N, "model.latent_dim": D,
    "model.bottleneck_dim": 6, "model.codec_layers": 2, "model.codec_heads": CODEC_HEADS, "model.proj_dim": 14,
    "model.hidden": HIDDEN, "model.depth": 2, "model.heads": HEADS, "model.freq_dim": 8, "model.time_tokens": 2,
    "model.sc_tokens": 3, "model.mode_tokens": 1,
}  # fmt: skip


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
    save_tensors(path, released, {"format": "pt"})
    return path


@pytest.fixture(scope="session")
def folder(file, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "model"
    assert main(["import", str(file), "--preset", "lm1b", "--out", str(out)]) == 0
    return out


# ---------------------------------------------------------------- names and sizes


def test_the_names_are_those_of_the_released_files(released):
    assert {"latent_mean", "latent_scale", "compressor.latents", "decompressor.base_query", "lm_head.bias"} <= set(released)
    assert released["compressor.layers.1.attn.to_kv_ctx.weight"].shape == (2 * D, D)
    assert released["decompressor.query_gate.scale_mlp.weight"].shape == (1, 1)
    assert released["dit.t_emb_tokens"].shape == (1, 2, HIDDEN)
    assert released["dit.blocks.1.mlp.w12.weight"].shape == (2 * int(int(HIDDEN * 4) * 2 / 3), HIDDEN)
    assert not any(name.startswith(("target.", "encoder.", "latent_updates")) for name in released)


def test_import_reads_every_size_from_the_tensors(folder):
    from jpeg_dlm.folders.model_folder import read_model

    config = read_model(folder).config
    wanted = override(preset("lm1b"), SIZES)
    assert config.model == wanted.model
    assert (config.data.token_len, config.data.vocab_size, config.encoder.feature_dim) == (L, V, F)
    assert not config.model.decode_residual and config.model.position_scale == 0


def of_lengths(path, tokens, latents):
    """A file of the released layout with these lengths; its networks are small."""
    lengths = SIZES | {"data.token_len": tokens, "model.latent_len": latents}
    save_tensors(path, build_method(override(preset("lm1b"), lengths)).export_state(), {"format": "pt"})


@pytest.mark.parametrize(("name", "tokens", "latents", "w", "grid"), [
    ("lm1b", 128, 32, 3.0, "random"), ("owt1024", 1024, 512, 2.0, "quantile"),
])  # fmt: skip
def test_the_lengths_of_a_released_file_tell_its_preset(name, tokens, latents, w, grid, tmp_path, capsys):
    from jpeg_dlm.folders.model_folder import read_model

    of_lengths(tmp_path / "a.safetensors", tokens, latents)
    assert main(["import", str(tmp_path / "a.safetensors"), "--out", str(tmp_path / "model")]) == 0
    config = read_model(tmp_path / "model").config
    assert (config.preset, config.sampler.w, config.sampler.grid) == (name, w, grid)
    assert (config.data.source, config.data.frame) == (preset(name).data.source, preset(name).data.frame)
    wanted = f"--data.tokenizer t5, --sampler.steps 32, --sampler.w {w}, --sampler.grid {grid}."
    assert f"Of preset {name}, as no weights tell them: --data.source {config.data.source}, {wanted}" in capsys.readouterr().out


def test_other_lengths_need_a_preset(tmp_path, capsys):
    of_lengths(tmp_path / "a.safetensors", 128, 64)
    command = ["import", str(tmp_path / "a.safetensors"), "--out", str(tmp_path / "model")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "64 latents for 128 tokens" in error and "--preset lm1b, owt1024 or owt128" in error and error.count("\n") == 1
    assert not (tmp_path / "model").exists()
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


@torch.no_grad()
@pytest.mark.parametrize("grid", ["random", "quantile"])
@pytest.mark.parametrize("seed", [0, 3])
def test_tokens_equal_those_of_an_independent_sampler(folder, released, capsys, monkeypatch, grid, seed):
    monkeypatch.setitem(RELEASED_BATCH, grid, 2)
    command = ["generate", str(folder), "--protocol", "released", "--tokens", "--grid", grid, "-n", "5"]
    assert main([*command, "--steps", "6", "--w", "2.5", "--seed", str(seed), "--device", "cpu"]) == 0
    found = [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    expected = released_sampler(released, 5, 6, 2.5, seed, 2, grid)
    assert len({tuple(row) for row in expected}) >= 4 and len({i for row in expected for i in row}) >= 4  # far from constant
    assert found == expected


@torch.no_grad()
@pytest.mark.parametrize(("grid", "batch"), [("random", 32), ("quantile", 16)])
def test_the_released_protocol_has_the_released_batch(folder, released, capsys, grid, batch):
    """A new random grid for every 32 texts on LM1B, a new seed for every 16 on OWT, whatever --batch is."""

    def rows(*options):
        command = ["generate", str(folder), "--tokens", "-n", str(batch + 2), "--steps", "2", "--w", "2.5", "--grid", grid]
        assert main([*command, *options]) == 0
        return [list(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]

    found = rows("--protocol", "released", "--batch", "5")
    assert found == rows("--protocol", "released") == released_sampler(released, batch + 2, 2, 2.5, 0, batch, grid)
    assert rows("--batch", "5") == rows()


def test_the_released_protocol_refuses_the_uniform_grid(folder, capsys):
    assert main(["generate", str(folder), "--tokens", "--protocol", "released", "--grid", "uniform"]) == 2
    assert "random (LM1B) or quantile (OWT)" in capsys.readouterr().err


# ---------------------------------------------------------------- export


def test_export_writes_the_same_file_back(file, folder, released, tmp_path):
    assert main(["export", str(folder), "--out", str(tmp_path / "again")]) == 0
    back = tmp_path / "again" / "model.safetensors"
    tensors = load_file(back)
    assert tensors.keys() == released.keys()
    for name, tensor in released.items():
        assert torch.equal(tensors[name].view(torch.int32), tensor.contiguous().view(torch.int32)), name
    assert sha256_file(back) == sha256_file(file)
    assert sha256_file(folder / "model.safetensors") == sha256_file(file)


def test_a_file_written_by_the_safetensors_package_is_read_too(released, folder, tmp_path):
    save_file({k: t.contiguous() for k, t in released.items()}, tmp_path / "other.safetensors", metadata={"made": "elsewhere"})
    assert main(["import", str(tmp_path / "other.safetensors"), "--preset", "lm1b", "--out", str(tmp_path / "model")]) == 0
    assert sha256_file(tmp_path / "model" / "model.safetensors") == sha256_file(folder / "model.safetensors")


# ---------------------------------------------------------------- what is refused


class Trap:
    """Unpickling this would leave a mark."""

    def __reduce__(self):
        return os.mkdir, ("unpickled-by-mistake",)


def written(path, tensors):
    save_tensors(path, tensors, {"format": "pt"})


def without(name):
    return lambda path, tensors: written(path, {k: t for k, t in tensors.items() if k != name})


def instead(name, change):
    return lambda path, tensors: written(path, tensors | {name: change(tensors[name])})


def truncated(path, tensors):
    written(path, tensors)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickled(path, tensors):
    path.write_bytes(pickle.dumps(Trap()))


BROKEN = {
    "lacks a tensor that tells a size": (without("compressor.latents"), "compressor.latents"),
    "lacks another tensor": (without("dit.blocks.1.attn.proj.bias"), "dit.blocks.1.attn.proj.bias"),
    "has an extra tensor": (lambda p, t: written(p, t | {"dit.extra": torch.zeros(2)}), "dit.extra"),
    "has an extra layer": (lambda p, t: written(p, t | {"dit.blocks.2.norm1.weight": torch.ones(HIDDEN)}), "dit.blocks.2"),
    "has a wrong shape": (instead("dit.self_cond_proj.weight", lambda t: t[:, :-1].clone()), "dit.self_cond_proj.weight"),
    "has a wrong number of axes": (instead("dit.t_emb_tokens", lambda t: t[0].clone()), "dit.t_emb_tokens"),
    "has sizes that contradict each other": (instead("compressor.latents", lambda t: t.repeat(5, 1)), "latent_len"),
    "is truncated": (truncated, "safetensors"),
    "is a pickle": (pickled, "safetensors"),
    "is empty": (lambda p, t: p.write_bytes(b""), "safetensors"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_import_refuses_a_file_that(case, released, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, word = BROKEN[case]
    make(tmp_path / "file.safetensors", released)
    assert main(["import", "file.safetensors", "--preset", "lm1b", "--out", "model"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and word in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.safetensors"]


def test_import_refuses_a_missing_file_and_an_existing_folder(file, tmp_path, capsys):
    assert main(["import", str(tmp_path / "none.safetensors"), "--out", str(tmp_path / "model")]) == 1
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("keep me")
    assert main(["import", str(file), "--preset", "lm1b", "--out", str(tmp_path / "model")]) == 1
    assert "nothing was overwritten" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine.txt"]


def test_the_swiglu_width_alone_tells_the_ratio():
    from jpeg_dlm.methods.common.released_layout import swiglu_ratio

    for hidden in (16, 24, 96, 256, 768):
        for ratio in (2.0, 8 / 3, 4.0, 5.5):
            inner = int(int(hidden * ratio) * 2 / 3)
            found = swiglu_ratio(inner, hidden)
            assert int(int(hidden * found) * 2 / 3) == inner and math.isclose(found, ratio, abs_tol=2 / hidden)
