"""ONNX Runtime: the same networks as torch's, folders of them, and what is refused."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import assert_same_tokens
from micro import micro_model

from jpeg_dlm.api import Model, load
from jpeg_dlm.checkpoints.model_folder import ModelParts, write_model
from jpeg_dlm.cli.main import main
from jpeg_dlm.export import onnx_model as onnx
from jpeg_dlm.export.onnx_networks import Graph, logits
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.util.errors import CheckpointError, MissingPackageError, UsageError
from jpeg_dlm.util.files import verify_manifest, write_manifest
from jpeg_dlm.util.rng import RowNoise


def micro(**changes) -> JpegDlm:
    """A model of which nothing is zero, one, or at its default."""
    method = micro_model(**changes)
    method.latent_mean.copy_(torch.linspace(-1, 1, 16))
    method.latent_scale.copy_(torch.linspace(0.5, 2, 16))
    return method


@pytest.fixture(scope="module")
def parts(micro_folders) -> ModelParts:
    tokenizer = micro_folders.tokenizer()
    method = micro(data__source=str(tokenizer.parent / "text.txt"))
    return ModelParts(method, method.config, tokenizer.parent, tokenizer, None)


@pytest.fixture(scope="module")
def exported(parts, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("exported")
    write_model(parts, place / "model")
    assert main(["export", str(place / "model"), "--format", "onnx", "--out", str(place / "onnx")]) == 0
    return place / "onnx"


@pytest.mark.parametrize("rows", [1, 9])  # fewer and more than are decoded at once
@pytest.mark.parametrize("solver", ["euler", "sde"])
def test_tokens_and_what_is_watched_are_those_of_torch(exported, parts, solver, rows):
    options = replace(parts.config.sampler, solver=solver, steps=5, grid="random", w=1.7)
    tokens, steps = [], []
    for writer in (onnx.read_exported(exported).writer, parts.method):
        seen = []
        noise = RowNoise(3, range(4, 4 + rows))
        tokens.append(writer.sample(options, noise, lambda *a, seen=seen: seen.append((*a[:3], a[3]()))))
        steps.append(seen)
    assert_same_tokens(*tokens)
    assert [s[:3] for s in steps[0]] == [s[:3] for s in steps[1]] and len(steps[0]) == 6


SIZES = [
    {"shared": False, "decode_residual": True, "denoise_skip": True},
    {"decode_residual": False, "position_scale": 0.7},
    {"heads": 4, "codec_heads": 1, "depth": 3, "codec_layers": 2},
    {"time_tokens": 1, "sc_tokens": 3, "mode_tokens": 2, "freq_dim": 6, "latent_len": 12},
    {"context_blocks": 2, "shared": False},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_size_and_switch_of_the_networks_reaches_the_graphs(sizes):
    method = micro(data__packing="padded", **{f"model__{name}": value for name, value in sizes.items()})
    m, noise, w = method.config.model, RowNoise(0, range(5)), torch.full((5,), 1.7)
    z, s = (noise.normal(name, m.latent_len, m.latent_dim) for name in "zs")
    with torch.no_grad():
        x = method.dit(z, torch.full((5,), 0.3), s, w)
        wanted = method.project(method.decompressor(method.unstandardize(method.decode_latents(z, w))))
        graph = Graph(int8=False)  # tokens would hide errors that turn none of them over
        output = logits(graph, method, graph.input("z", *z.shape[1:]), graph.input("w"))
        session = onnx.open_network("decode", graph.serialized(output, "logits", [12, 300], False), method.config)
    sampler = onnx.OnnxNetworks(method.config, onnx.build_graphs(method, "fp32"))
    for output, expected in ((sampler.denoise(z, 0.3, s, 1.7), x), (onnx.run(session, z=z, w=w), wanted)):
        assert expected.std(0).min() > 1e-3  # rows differ, so that agreeing is no accident
        assert torch.allclose(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [-1, 1])
def test_targets_of_sources_are_those_of_torch(micro_folders, tmp_path, layer):
    """With padding in sources, guidance over them, and any layer of the encoder; and after a stay on the disk."""
    method = micro(data__packing="padded", data__source_len=6, encoder__depth=2, encoder__layer=layer)
    parts = ModelParts(method, method.config, tmp_path, micro_folders.tokenizer(), None)
    folder = onnx.write_exported(parts, tmp_path / "out")
    g = torch.Generator().manual_seed(0)
    source = Batch(torch.randint(300, (9, 6), generator=g), torch.arange(6) <= torch.arange(9)[:, None])
    for scale in (1.0, 2.5):
        options = replace(parts.config.sampler, steps=5, source_scale=scale)
        tokens = [w.sample(options, RowNoise(3, range(9)), source=source) for w in (onnx.read_exported(folder).writer, method)]
        assert_same_tokens(*tokens)
    with torch.no_grad():
        memory = method.dit.read(method.source_context(source))
    seen = onnx.onnx_backend(parts, "fp32").read(source)["memory"]
    values = torch.stack([v for _, v in memory.layers], 1)
    real = source.real_BL[:, None, None, :, None].expand_as(values)
    torch.testing.assert_close(seen[:, 1::2][real], values[real], rtol=1e-4, atol=1e-4)
    assert main(["benchmark", str(folder), "--batch", "2", "--repeats", "1", "--warmup", "0", "--quiet"]) == 0


def test_int8_multiplies_in_integers_and_keeps_most_tokens(parts):
    graphs = onnx.build_graphs(parts.method, "int8")
    assert all(graph.count(b"MatMulInteger") >= 4 for graph in graphs.values())
    assert onnx.compare(parts.method, onnx.OnnxNetworks(parts.config, graphs), "int8")["denoise"] > 1e-6
    fp32, int8 = (onnx.onnx_backend(parts, p).sample(parts.config.sampler, RowNoise(0, range(20))) for p in onnx.PRECISIONS)
    assert (fp32 == int8).float().mean() > 0.8


def test_exported_networks_write_and_decode_but_do_not_encode(exported, parts, tmp_path):
    model, whole = load(exported), Model(parts)
    assert_same_tokens(model.sample(5, seed=2, batch=2), whole.sample(5, seed=2, batch=2))
    z = RowNoise(0, range(2)).normal("z", 3, 16)
    assert model.decode(z) == whole.decode(z) and "onnx fp32 on cpu" in repr(model)
    for act in (lambda: model.reconstruct(["The farmer"]), lambda: model.save(tmp_path / "again"), lambda: model.method):
        with pytest.raises(UsageError):
            act()
    assert not (tmp_path / "again").exists()
    assert main(["benchmark", str(exported), "--batch", "2", "--repeats", "1", "--warmup", "0", "--quiet"]) == 0


def test_the_folder_says_what_it_is_and_keeps_no_path(parts, tmp_path):
    folder = onnx.write_exported(parts, tmp_path / "out", "int8")
    facts = json.loads((folder / onnx.EXPORT_FILE).read_text())
    assert facts["precision"] == "int8" and {"torch", "onnx", "onnxruntime"} == facts["versions"].keys()
    assert facts["config"]["data"]["source"] == "text.txt" and str(parts.origin) not in json.dumps(facts)
    names = {"decode.onnx", "denoise.onnx", onnx.EXPORT_FILE, "tokenizer.json"}
    assert verify_manifest(folder)["files"].keys() == names and load(folder).dtype == "onnx int8"


@pytest.mark.parametrize("name", ["denoise.onnx", "decode.onnx", "export.json"])
def test_foreign_files_are_refused_even_with_right_hashes(name, exported, tmp_path):
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    foreign = {"denoise.onnx": (folder / "decode.onnx").read_bytes(), "decode.onnx": b"<html>not found</html>"}
    (folder / name).write_bytes(foreign.get(name, b'{"precision": "fp32", "config": {"method": "mdlm", "model": {}}}'))
    with pytest.raises(CheckpointError, match=name):
        onnx.read_exported(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder, {})
    with pytest.raises(CheckpointError):
        onnx.read_exported(folder)


def test_networks_that_are_off_are_not_written(parts):
    right = onnx.OnnxNetworks
    for error, shift in ((float("nan"), 0), (0.1, 0), (0.0, 1)):
        off = onnx.onnx_backend(parts, "fp32")
        off.denoise = lambda *given, error=error, off=off: right.denoise(off, *given) + error
        off.tokens = lambda z, w, shift=shift, off=off: right.tokens(off, z, w) + shift
        with pytest.raises(CheckpointError):
            onnx.compare(parts.method, off, "fp32")


def test_what_cannot_be_exported_or_opened_says_why(parts, exported, tmp_path, monkeypatch):
    mdlm = micro_model("mdlm")
    other = ModelParts(mdlm, mdlm.config, tmp_path, None, None)
    for act, word in (
        (lambda: onnx.write_exported(other, tmp_path / "out"), "mdlm"),
        (lambda: Model(other, backend="onnx"), "mdlm"),
        (lambda: onnx.write_exported(onnx.read_exported(exported), tmp_path / "out"), None),  # without torch networks
        (lambda: load(exported, backend="torch"), "fp32"),
        (lambda: load(exported, precision="int8"), "fp32"),
        (lambda: load(precision="int8"), "onnx"),
    ):
        with pytest.raises(UsageError, match=word):
            act()
    with pytest.raises(CheckpointError, match="already exists"):
        onnx.write_exported(parts, tmp_path)
    monkeypatch.setattr("jpeg_dlm.export.onnx_networks.LARGEST", 1000)
    with pytest.raises(UsageError, match="2 GB"):
        onnx.write_exported(parts, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError):
        onnx.read_exported(exported)
    assert list(tmp_path.iterdir()) == []
