"""Folders for `transformers`: loaded by a process without this package, they write the tokens of the package."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from micro import micro_model, perturb

from jpeg_dlm.api import Model, load
from jpeg_dlm.checkpoints.model_folder import ModelParts
from jpeg_dlm.cli.main import main
from jpeg_dlm.encoders.small import SmallEncoder, save_small_encoder
from jpeg_dlm.export.transformers_folder import write_transformers
from jpeg_dlm.text.tokenizer import SPECIALS
from jpeg_dlm.util.errors import CheckpointError, UsageError
from jpeg_dlm.util.files import verify_manifest

LOADED = """
import json, sys
sys.path.append(sys.argv[1])
try:
    import jpeg_dlm
except ImportError:
    pass
else:
    sys.exit("this process has the package")
import torch
from transformers import AutoModel, AutoTokenizer
results = {}
for folder, cases in json.loads(sys.argv[2]).items():
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    results[folder] = []
    for texts, options in cases:
        if texts and isinstance(texts[0], str):
            given = tokenizer(texts, padding=True, return_tensors="pt")
        else:
            given = {"input_ids": torch.tensor(texts)} if texts else {}
        ids = model.generate(**given, **options)
        results[folder].append([ids.tolist(), tokenizer.batch_decode(ids, skip_special_tokens=True)])
print(json.dumps(results))
"""
PAIRS = {"data__packing": "padded", "data__source_len": 11}
SWITCHES = {"model__shared": False, "model__decode_residual": True, "model__denoise_skip": True, "model__position_scale": 0.7}
FLOW = [{}, {"solver": "sde", "grid": "random", "w": 1.7, "steps": 5, "gamma": 1.2, "noise_scale": 0.8}]
OF_SOURCES = [{}, {"source_scale": 2.5, "solver": "sde"}]
MODELS = {  # options of a model, and of its sampler in several samples
    "jpeg-dlm": ({"data__packing": "padded", "model__depth": 2, "model__time_tokens": 3, "model__codec_layers": 2}, FLOW),
    "jpeg-dlm switches": (SWITCHES, [{"grid": "uniform"}]),
    "jpeg-dlm pairs": (PAIRS, OF_SOURCES),
    "elf": ({"objective__noise_scale": 1.3}, FLOW),
    "elf pairs": ({**PAIRS, "encoder__layer": 1}, OF_SOURCES),
    "mdlm": ({"data__frame": True}, [{}, {"steps": 7, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0}]),
    "mdlm pairs": (PAIRS, [{}]),
}
GIVEN = ["  The farmer", "near\n<s>"]
LINE = SPECIALS.index("<line>")  # a space here, and nothing there, where special tokens are skipped
HOLES = [[270, -1, -1, 280], [280, 260, -1, 270]]


def micro_parts(name: str, folder: Path, tokenizer: Path) -> ModelParts:
    """A model of which nothing is zero or one, with the files of a trained encoder where it reads sources."""
    method = micro_model(name.split()[0], encoder__depth=2, **MODELS[name][0])
    config, spread = method.config, torch.linspace(0.5, 2, 16)
    if name.startswith("jpeg-dlm"):
        method.latent_mean.copy_(-spread)
        method.latent_scale.copy_(spread)
    if not (method.uses_encoder and config.data.source_len):
        return ModelParts(method, config, folder, tokenizer, None)
    trained = perturb(SmallEncoder(300, 16, 2, 2).initialize(0))
    trained.set_feature_statistics(-spread, spread)
    save_small_encoder(folder, trained)
    config = replace(config, encoder=replace(config.encoder, kind="small", scale="per_channel"))
    return ModelParts(method, config, folder, tokenizer, folder)


def run_without_the_package(cases: dict[str, list]) -> dict[str, list]:
    """Return what a process writes that only sees the installed packages, not this one, whose path is in a .pth file."""
    packages = str(Path(torch.__file__).parent.parent)
    words = [sys.executable, "-S", "-c", LOADED, packages, json.dumps(cases)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def written_here(model: Model, texts: list, n: int, seed: int, options: dict) -> torch.Tensor:
    """Tokens of the package: n targets of each source, n texts after each prompt or around what is given, or n texts."""
    if not texts:
        return model.sample(n, seed=seed, **options)
    if model.config.data.source_len:
        given, name = model.source_rows(texts), "source"
    elif texts == HOLES:
        given, name = torch.tensor([model.layout.beginning(ids, -1) for ids in texts]), "fixed"
    else:
        given, name = torch.stack([model.fixed_tokens(text) for text in texts]), "fixed"
    return model.sample(n * len(texts), seed=seed, **{name: given.repeat_interleave(n, 0)}, **options)


@pytest.mark.slow
def test_tokens_and_texts_are_those_of_the_package(micro_folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    models, cases, calls = {}, {}, {}
    for name, (_, samplers) in MODELS.items():
        parts = micro_parts(name, tmp_path / "encoder" / name, micro_folders.tokenizer())
        folder = str(write_transformers(parts, tmp_path / name.replace(" ", "_"), "# A card"))
        models[folder], texts = Model(parts), GIVEN if parts.config.data.source_len else []
        cases[folder] = [(texts, 3, seed, options) for seed, options in enumerate(samplers)]
        cases[folder] += [(GIVEN, 2, 5, {"first": 3, **options}) for options in samplers]
        cases[folder] += [] if texts else [(HOLES, 1, 6, {})]
        calls[folder] = [
            (texts, {"num_return_sequences": n, "seed": seed, "batch_size": 3, **options})
            for texts, n, seed, options in cases[folder]
        ]
    for folder, results in run_without_the_package(calls).items():
        rows = []
        for case, (ids, texts) in zip(cases[folder], results, strict=True):
            tokens = written_here(models[folder], *case)
            assert ids == tokens.tolist(), (folder, case)
            pairs = zip(ids, texts, models[folder].to_text(tokens), strict=True)
            assert all(text == ours for row, text, ours in pairs if LINE not in row), (folder, case)
            rows += map(tuple, ids)
        assert 2 * len(set(rows)) > len(rows), folder  # they differ, so that agreeing is no accident


def test_the_command_writes_all_files_and_refuses_what_has_no_form(micro_folders, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["export", "--format", "transformers", "--out", str(out)]
    assert main([*words, str(micro_folders.model("mdlm")), "--sampler.steps", "5"]) == 0
    code = {"modeling_mdlm.py", "text_diffusion.py"}
    files = verify_manifest(out)["files"].keys()
    assert files == code | {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads((out / "config.json").read_text())["sampler"]["steps"] == 5
    assert "trust_remote_code=True" in (out / "README.md").read_text() and "AutoModel" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="transformers"):
        load(out)
    assert main([*words, str(micro_folders.model("mdlm"))]) == 1  # it exists
    for method, changes in (
        ("duo", {}),
        ("jpeg-dlm", {"data__packing": "padded", "model__context_blocks": 1}),
        ("jpeg-dlm", {"data__packing": "padded", "data__source_len": 12, "model__source": "latents"}),
    ):
        model = micro_model(method, **changes)
        with pytest.raises(UsageError, match="transformers"):
            write_transformers(ModelParts(model, model.config, tmp_path, micro_folders.tokenizer(), None), tmp_path / "new", "")
    assert not (tmp_path / "new").exists()
