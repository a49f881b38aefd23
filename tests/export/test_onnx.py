"""ONNX Runtime: the same networks as torch's, folders of them, and what is refused."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MICRO, assert_same_tokens, made_up_text, perturb

from jpeg_dlm.api import Model, load
from jpeg_dlm.checkpoints.model_folder import ModelParts, write_model
from jpeg_dlm.cli.main import main
from jpeg_dlm.export import onnx_model
from jpeg_dlm.export.onnx_builder import Graph
from jpeg_dlm.export.onnx_model import (
    EXPORT_FILE,
    OnnxNetworks,
    build_graphs,
    compare,
    is_exported,
    onnx_backend,
    read_exported,
    write_exported,
)
from jpeg_dlm.export.onnx_networks import logits
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.text.tokenizer import train_bpe
from jpeg_dlm.util.errors import CheckpointError, MissingPackageError, UsageError
from jpeg_dlm.util.files import verify_manifest, write_manifest
from jpeg_dlm.util.rng import RowNoise


def micro(changes: dict) -> JpegDlm:
    """A model of which nothing is zero, one, or at its default."""
    method = perturb(build_method(override(preset("smoke"), MICRO | changes)).eval())
    method.latent_mean.copy_(torch.linspace(-1, 1, 16))
    method.latent_scale.copy_(torch.linspace(0.5, 2, 16))
    return method


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> ModelParts:
    place = tmp_path_factory.mktemp("parts")
    train_bpe([made_up_text(8)], 300).save(place / "tokenizer.json")
    torch.manual_seed(0)
    method = micro({"data.source": str(place / "text.txt")})
    return ModelParts(method, method.config, place, place / "tokenizer.json", None)


@pytest.fixture(scope="module")
def exported(parts, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("exported")
    write_model(parts, place / "model")
    assert main(["export", str(place / "model"), "--format", "onnx", "--out", str(place / "onnx")]) == 0
    return place / "onnx"


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


# ---------------------------------------------------------------- the same as torch


@pytest.mark.parametrize("rows", [1, 9])  # fewer and more than are decoded at once
@pytest.mark.parametrize("solver", ["euler", "sde"])
def test_tokens_and_what_is_watched_are_those_of_torch(exported, parts, solver, rows):
    options = replace(parts.config.sampler, solver=solver, steps=5, grid="random", w=1.7)
    tokens, steps = [], []
    for writer in (read_exported(exported).writer, parts.method):
        seen = []
        noise = RowNoise(3, range(4, 4 + rows))
        tokens.append(writer.sample(options, noise, lambda *a, seen=seen: seen.append((*a[:3], a[3]()))))
        steps.append(seen)
    assert_same_tokens(*tokens)
    assert [s[:3] for s in steps[0]] == [s[:3] for s in steps[1]] and len(steps[0]) == 6


SIZES = [
    {"model.shared": False, "model.decode_residual": True, "model.denoise_skip": True},
    {"model.decode_residual": False, "model.position_scale": 0.7},
    {"model.heads": 4, "model.codec_heads": 1, "model.depth": 3, "model.codec_layers": 2},
    {"model.time_tokens": 1, "model.sc_tokens": 3, "model.mode_tokens": 2, "model.freq_dim": 6, "model.latent_len": 12},
    {"model.context_blocks": 2, "data.packing": "padded", "model.shared": False},
]


@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_every_size_and_switch_of_the_networks_reaches_the_graphs(changes):
    method = micro(changes)
    m, noise, w = method.config.model, RowNoise(0, range(5)), torch.full((5,), 1.7)
    z, s = (noise.normal(name, m.latent_len, m.latent_dim) for name in "zs")
    with torch.no_grad():
        x = method.dit(z, torch.full((5,), 0.3), s, w)
        wanted = method.project(method.decompressor(method.unstandardize(method.decode_latents(z, w))))
        graph = Graph(int8=False)  # tokens would hide errors that turn none of them over
        output = logits(graph, method, graph.input("z", *z.shape[1:]), graph.input("w"))
        session = onnx_model.open_network("decode", graph.serialized(output, "logits", [12, 300], False), method.config)
    sampler = OnnxNetworks(method.config, build_graphs(method, "fp32"))
    for output, expected in ((sampler.denoise(z, 0.3, s, 1.7), x), (onnx_model.run(session, z=z, w=w), wanted)):
        assert expected.std(0).min() > 1e-3  # rows differ, so that agreeing is no accident
        assert torch.allclose(output, expected, rtol=1e-4, atol=1e-4)


def test_int8_multiplies_in_integers_and_keeps_most_tokens(parts):
    graphs = build_graphs(parts.method, "int8")
    assert graphs["denoise"].count(b"MatMulInteger") >= 4 and b"MatMulInteger" not in graphs["decode"]
    assert compare(parts.method, OnnxNetworks(parts.config, graphs), "int8")["denoise"] > 1e-6
    fp32, int8 = (onnx_backend(parts, p).sample(parts.config.sampler, RowNoise(0, range(20))) for p in ("fp32", "int8"))
    assert (fp32 == int8).float().mean() > 0.8


def test_exported_networks_write_and_decode_but_do_not_encode(folder, parts):
    model, whole = load(folder), Model(parts)
    assert_same_tokens(model.sample(5, seed=2, batch=2), whole.sample(5, seed=2, batch=2))
    z = RowNoise(0, range(2)).normal("z", 3, 16)
    assert model.decode(z) == whole.decode(z) and model.dtype == "onnx fp32"
    for act in (lambda: model.reconstruct(["The farmer"]), lambda: model.save(folder / "again"), lambda: model.method):
        with pytest.raises(UsageError):
            act()
    assert not (folder / "again").exists() and "onnx fp32 on cpu" in repr(model)
    assert main(["benchmark", str(folder), "--batch", "2", "--repeats", "1", "--warmup", "0", "--quiet"]) == 0


# ---------------------------------------------------------------- the folder


def test_the_folder_says_what_it_is_and_keeps_no_path(parts, tmp_path):
    folder = write_exported(parts, tmp_path / "out", "int8")
    facts = json.loads((folder / EXPORT_FILE).read_text())
    assert facts["precision"] == "int8" and {"torch", "onnx", "onnxruntime"} == facts["versions"].keys()
    assert facts["config"]["data"]["source"] == "text.txt" and str(parts.origin) not in json.dumps(facts)
    names = {path.name for path in folder.iterdir()}
    assert names == {"decode.onnx", "denoise.onnx", EXPORT_FILE, "manifest.json", "tokenizer.json"}
    assert verify_manifest(folder)["files"].keys() == names - {"manifest.json"} and is_exported(folder)
    assert load(folder).dtype == "onnx int8"


def test_foreign_files_are_refused_even_with_right_hashes(folder):
    changes = {"denoise.onnx": (folder / "decode.onnx").read_bytes(), "decode.onnx": b"<html>not found</html>"}
    changes |= {EXPORT_FILE: b'{"precision": "fp32", "config": {"method": "mdlm", "model": {}}}'}
    for name, content in changes.items():
        whole, manifest = (folder / name).read_bytes(), (folder / "manifest.json").read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            read_exported(folder)
        (folder / "manifest.json").unlink()
        write_manifest(folder, {})
        with pytest.raises(CheckpointError):
            read_exported(folder)
        (folder / name).write_bytes(whole)
        (folder / "manifest.json").write_bytes(manifest)


# ---------------------------------------------------------------- refusals


def test_only_jpeg_dlm_is_exported_and_nothing_is_overwritten(parts, exported, tmp_path):
    config = for_method(override(preset("smoke"), MICRO), "mdlm")
    other = ModelParts(build_method(config), config, tmp_path, None, None)
    for refused in (other, read_exported(exported)):  # what is exported has no torch networks any more
        with pytest.raises(UsageError):
            write_exported(refused, tmp_path / "out")
    with pytest.raises(UsageError, match="mdlm"):
        Model(other, backend="onnx")
    with pytest.raises(CheckpointError, match="already exists"):
        write_exported(parts, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_networks_that_are_off_are_not_written(parts):
    right = OnnxNetworks
    for error, shift in ((float("nan"), 0), (0.1, 0), (0.0, 1)):
        off = onnx_backend(parts, "fp32")
        off.denoise = lambda z, t, s, w, error=error, off=off: right.denoise(off, z, t, s, w) + error
        off.tokens = lambda z, w, shift=shift, off=off: right.tokens(off, z, w) + shift
        with pytest.raises(CheckpointError):
            compare(parts.method, off, "fp32")


def test_what_cannot_be_exported_or_opened_says_why(parts, exported, tmp_path, monkeypatch):
    for options in ({"backend": "torch"}, {"precision": "int8"}):
        with pytest.raises(UsageError, match="fp32"):
            load(exported, **options)
    with pytest.raises(UsageError, match="onnx"):
        load(precision="int8")
    monkeypatch.setattr("jpeg_dlm.export.onnx_builder.LARGEST", 1000)
    with pytest.raises(UsageError, match="2 GB"):
        write_exported(parts, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError):
        read_exported(exported)
    assert list(tmp_path.iterdir()) == []
