"""ONNX and OpenVINO folders: the same tokens as torch, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, assert_same_tokens, made_up_text, perturb

from jpeg_dlm.api import Model
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.errors import CheckpointError, MissingPackageError, UsageError
from jpeg_dlm.export import folder as export_folder
from jpeg_dlm.export.folder import EXPORT_FILE, is_exported, read_exported, write_exported
from jpeg_dlm.export.interface import DENOISE, in_torch, random_inputs
from jpeg_dlm.export.onnx_builder import Graph
from jpeg_dlm.export.onnx_networks import logits, write_network
from jpeg_dlm.export.onnx_runtime import open_onnx
from jpeg_dlm.files import verify_manifest, write_manifest
from jpeg_dlm.folders.model_folder import ModelParts, write_model
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise
from jpeg_dlm.sampling.folded import fold
from jpeg_dlm.text.tokenizer import train_bpe

KINDS = ("onnx", "openvino")


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
def folders(parts, tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("exported")
    write_model(parts, place / "model")
    for kind in KINDS:
        assert main(["export", str(place / "model"), "--format", kind, "--out", str(place / kind)]) == 0
    return {kind: place / kind for kind in KINDS}


@pytest.fixture(params=KINDS)
def folder(request, folders, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(folders[request.param], tmp_path / request.param))


@pytest.fixture(scope="module", params=KINDS)
def sampler(request, folders):
    return read_exported(folders[request.param]).writer


# ---------------------------------------------------------------- the same as torch


@pytest.mark.parametrize("rows", [1, 2, 9, 20])  # more and fewer than the example, and than are decoded at once
@pytest.mark.parametrize("solver", ["euler", "heun", "multistep"])
def test_tokens_are_those_of_torch(sampler, parts, solver, rows):
    options = replace(parts.config.sampler, solver=solver, steps=5, grid="random", w=1.7)
    noise = RowNoise(3, range(4, 4 + rows))
    assert_same_tokens(sampler.sample(options, noise), parts.method.sample(options, noise))


def test_openvino_is_asked_for_full_precision(folders, monkeypatch):
    """By itself it takes bf16 on a CPU that has it."""
    import openvino

    seen, compile_model = [], openvino.Core.compile_model
    monkeypatch.setattr(openvino.Core, "compile_model", lambda *a: seen.append(compile_model(*a)) or seen[-1])
    read_exported(folders["openvino"])
    assert [compiled.get_property("INFERENCE_PRECISION_HINT") for compiled in seen] == [openvino.Type.f32] * 2


def test_what_is_watched_is_that_of_torch(sampler, parts):
    def seen(method) -> list:
        found = []
        method.sample(parts.config.sampler, RowNoise(0, range(3)), lambda *a: found.append((*a[:3], a[3]())))
        return found

    ours, theirs = seen(sampler), seen(parts.method)
    assert [s[:3] for s in ours] == [s[:3] for s in theirs] and len(ours) == parts.config.sampler.steps + 1
    assert_same_tokens(torch.cat([s[3] for s in ours]), torch.cat([s[3] for s in theirs]))


def test_a_model_with_exported_networks_writes_and_decodes_but_does_not_encode(folder, parts):
    model, whole = Model(read_exported(folder)), Model(parts)
    assert_same_tokens(model.sample(5, seed=2, batch=2), whole.sample(5, seed=2, batch=2))
    released = {"protocol": "released", "grid": "quantile"}
    assert_same_tokens(model.sample(3, **released), whole.sample(3, **released))
    z = RowNoise(0, range(2)).normal("z", 3, 16)
    assert model.decode(z) == whole.decode(z)
    acts = (
        lambda: model.reconstruct(["The farmer"]),
        lambda: model.save(folder / "again"),
        model.accelerate,
        lambda: model.method,
    )
    for act in acts:
        with pytest.raises(UsageError, match="exported"):
            act()
    assert not model.can_accelerate and not (folder / "again").exists()
    assert repr(model).startswith("<JPEG-DLM, exported: 3 latents for 12 tokens") and "float32 on cpu" in repr(model)
    assert main(["benchmark", str(folder), "--batch", "2", "--repeats", "1", "--warmup", "0", "--quiet"]) == 0


SIZES = [
    {"model.shared": False, "model.decode_residual": True, "model.denoise_skip": True},
    {"model.shared": True, "model.decode_residual": False, "model.position_scale": 0.7, "model.codec_mlp_ratio": 1.5},
    {"model.heads": 4, "model.codec_heads": 1, "model.depth": 3, "model.codec_layers": 2, "model.mlp_ratio": 2.5},
    {"model.time_tokens": 1, "model.sc_tokens": 3, "model.mode_tokens": 2, "model.freq_dim": 6, "model.latent_len": 12},
    {"model.context_blocks": 2, "data.packing": "padded"},
    {"model.context_blocks": 1, "data.packing": "padded", "model.shared": False},
    {"model.codec": "causal", "encoder.causal": True, "model.depth": 2},
    {"model.codec": "causal", "encoder.causal": True, "model.context_blocks": 1, "data.packing": "padded"},
]


@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_every_size_and_switch_of_the_networks_reaches_the_graphs(changes, tmp_path):
    method = micro(changes)
    inputs = random_inputs(DENOISE, method.config, 5)
    write_network(DENOISE, method, tmp_path / "denoise.onnx")
    assert_close(open_onnx(tmp_path / "denoise.onnx")(**inputs), in_torch(DENOISE, method, inputs))

    graph, (z, w) = Graph(), (inputs["z"], inputs["w"])  # tokens would hide errors that turn none of them over
    names = {"z": graph.input("z", *z.shape[1:]), "w": graph.input("w")}
    graph.save(tmp_path / "logits.onnx", logits(graph, fold(method), **names), "logits", [12, 300], integers=False)
    with torch.no_grad():
        wanted = method.project(method.decompressor(method.unstandardize(method.decode_latents(z, w))))
    assert_close(open_onnx(tmp_path / "logits.onnx")(z=z, w=w), wanted)


def assert_close(found, wanted):
    assert wanted.std(0).min() > 1e-3  # rows differ, so that agreeing is no accident
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the folder


def test_the_folder_says_what_it_is_and_keeps_no_path(folder, parts):
    said = json.loads((folder / EXPORT_FILE).read_text())
    assert said["format"] == folder.name and {"torch", "onnx"} < said["versions"].keys()
    assert said["agreement"]["denoise"] < 1e-5 and said["agreement"]["decode"] == 1
    assert said["config"]["data"]["source"] == "text.txt" and str(parts.origin) not in json.dumps(said)
    assert (folder / "tokenizer.json").read_bytes() == parts.tokenizer.read_bytes()
    networks = {"onnx": ["decode.onnx", "denoise.onnx"], "openvino": ["decode.bin", "decode.xml", "denoise.bin", "denoise.xml"]}
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([*networks[folder.name], EXPORT_FILE, "manifest.json", "tokenizer.json"])
    assert verify_manifest(folder)["files"].keys() == set(names) - {"manifest.json"} and is_exported(folder)


def test_any_changed_byte_is_found_before_a_file_is_used(folder):
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
        with pytest.raises(CheckpointError, match=path.name):
            read_exported(folder)
        path.write_bytes(whole)
    next(folder.glob("decode*")).unlink()
    with pytest.raises(CheckpointError, match="decode.* is missing"):
        read_exported(folder)


def test_foreign_files_with_right_hashes_are_named(folder):
    def refused(said: str) -> None:
        (folder / "manifest.json").unlink()
        write_manifest(folder, {})
        with pytest.raises(CheckpointError, match=said):
            read_exported(folder)

    suffix = {"onnx": ".onnx", "openvino": ".xml"}[folder.name]
    network, other = folder / f"denoise{suffix}", folder / f"decode{suffix}"
    network.write_bytes(other.read_bytes())
    refused(f"denoise{suffix}' (does not take|is not a network)")
    network.write_bytes(b"<html>not found</html>")
    refused(f"denoise{suffix}' is not a network")
    network.unlink()
    refused(f"denoise{suffix}' is missing")
    for text, said in (
        ('{"format": "tflite", "config": {}}', "names no format"),
        ('{"format": [], "config": {}}', "names no format"),
        ('{"format": "onnx", "config": []}', "names no format"),
        ('{"format": "onnx", "config": {"method": "mdlm", "model": {}}}', "is of mdlm"),
    ):
        (folder / EXPORT_FILE).write_text(text)
        refused(f"{EXPORT_FILE}' {said}")


# ---------------------------------------------------------------- refusals


def test_only_jpeg_dlm_is_exported_and_nothing_is_overwritten(parts, folders, tmp_path):
    config = for_method(override(preset("smoke"), MICRO), "mdlm")
    other = ModelParts(build_method(config), config, tmp_path, None, None)
    with pytest.raises(UsageError, match="not mdlm"):
        write_exported(other, "onnx", tmp_path / "out")
    with pytest.raises(UsageError, match="Only jpeg-dlm"):  # what is exported has no torch networks any more
        write_exported(read_exported(folders["onnx"]), "openvino", tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists"):
        write_exported(parts, "onnx", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, wrong", [("denoise", np.nan), ("denoise", 0.1), ("decode", 1)])
def test_a_network_that_is_off_is_not_written(parts, folders, name, wrong):
    opened = export_folder._open(folders["onnx"], name, "onnx", parts.config)
    assert export_folder.agreement_of(name, parts.method, opened) in (1.0, pytest.approx(0, abs=1e-5))
    off = replace(opened, run=lambda arrays: opened.run(arrays) + np.asarray(wrong, dtype=opened.run(arrays).dtype))
    with pytest.raises(CheckpointError, match=f"{name} network does not compute"):
        export_folder.agreement_of(name, parts.method, off)


def test_a_network_beyond_the_format_is_refused(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("jpeg_dlm.export.onnx_builder.LARGEST", 1000)
    with pytest.raises(UsageError, match="2 GB"):
        write_exported(parts, "openvino", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package, kind", [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_a_missing_package_names_the_extra(package, kind, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r"jpeg-dlm\[export\]"):
        read_exported(folders[kind])


def test_openvino_reports_to_nobody(folders):
    script = f"""
import os, sys
from pathlib import Path
from jpeg_dlm.export.folder import read_exported  # and torch, whose builds for GPUs look for libraries with a process
def hook(event, args):
    if event.startswith("socket.") and event != "socket.gethostname" or event == "subprocess.Popen":
        print("SEEN", event, args, flush=True); os._exit(7)
assert "openvino" not in sys.modules
sys.addaudithook(hook)
read_exported(Path({str(folders["openvino"])!r}))
assert "openvino" in sys.modules and "openvino_telemetry" not in sys.modules
print("done")
"""
    home = folders["openvino"].parent / "home"
    home.mkdir(exist_ok=True)
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "done", done.stdout + done.stderr
    assert not (home / "intel").exists()


def test_openvino_leaves_the_stack_of_signals_alone(folders):
    script = f"""
import ctypes, sys
from pathlib import Path
from jpeg_dlm.export.folder import read_exported
from jpeg_dlm.export.openvino_runtime import SignalStack
from jpeg_dlm.rng import RowNoise
found = [SignalStack(), SignalStack()]
look = lambda stack: ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
look(found[0])
parts = read_exported(Path({str(folders["openvino"])!r}))
parts.writer.sample(parts.config.sampler, RowNoise(0, range(2)))
look(found[1])
assert [s.address for s in found] == [found[0].address] * 2, [(s.address, s.flags) for s in found]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
