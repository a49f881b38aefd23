"""Micro models and runs that tests share: every part of the system is in them, and a step takes milliseconds."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from jpeg_dlm.checkpoints.model_folder import ModelParts, write_model
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import Config, validate
from jpeg_dlm.methods.registry import build_method, for_method, methods
from jpeg_dlm.options import option_names, override
from jpeg_dlm.presets import preset

# Pieces of words in rows without padding, for made-up text; the preset `smoke` has whole words and padded rows.
PIECES: dict[str, Any] = {"data.tokenizer": "bpe", "data.known": False, "data.packing": "continuous", "data.whole": False}
# Sizes and a short training; names of JPEG-DLM's options, which `for_method` adapts to other methods.
MICRO: dict[str, Any] = PIECES | {
    "data.vocab_size": 300,
    "data.token_len": 12,
    "encoder.feature_dim": 16,
    "encoder.depth": 1,
    "encoder.heads": 2,
    "model.latent_len": 3,
    "model.latent_dim": 16,
    "model.bottleneck_dim": 8,
    "model.codec_layers": 1,
    "model.codec_heads": 2,
    "model.proj_dim": 16,
    "model.hidden": 16,
    "model.depth": 1,
    "model.heads": 2,
    "model.freq_dim": 8,
    "objective.sigreg_slices": 8,
    "train.batch": 8,
    "train.steps": 12,
    "train.encoder_steps": 4,
    "train.save_every": 4,
    "train.eval_every": 6,
    "train.log_every": 1,
    "sampler.steps": 3,
}
RANDOM_ENCODER = {"encoder.kind": "random", "encoder.scale": "none"}  # features without any training


def dotted(changes: Mapping[str, object]) -> dict[str, object]:
    """Return keyword arguments such as model__depth=2 as options: {"model.depth": 2}."""
    return {name.replace("__", "."): value for name, value in changes.items()}


def micro_config(method: str = "jpeg-dlm", **changes: object) -> Config:
    """Return the micro config of a method with a random encoder; changes are options of the method, as model__depth=2."""
    config = for_method(override(preset("smoke"), MICRO | RANDOM_ENCODER), method)
    steps = {"sampler.steps": MICRO["sampler.steps"]} if hasattr(config.sampler, "steps") else {}
    return validate(override(config, steps | dotted(changes)))


def micro_model(method: str = "jpeg-dlm", scale: float = 0.3, **changes: object) -> Any:
    """Return a method with fresh weights, in eval mode, moved by fixed noise so that no head is zero."""
    from jpeg_dlm.encoders import build_encoder
    from jpeg_dlm.methods.registry import method_class

    config = micro_config(method, **changes)
    encoded = method_class(method).uses_encoder
    encoder = build_encoder(config.encoder, config.data.vocab_size, 0, Path()) if encoded else None
    return perturb(build_method(config, encoder), scale).eval()


def perturb(method: Any, scale: float = 0.3) -> Any:
    """Add fixed noise to every weight: a fresh head is zero, so every token as likely, and stops gradients behind it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return method


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Return options as words of a command."""
    return list(itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(value)) for name, value in values.items()))


def micro_flags(method: str = "jpeg-dlm", /, **changes: object) -> list[str]:
    """Return MICRO with changes as command-line options, those that a method has."""
    known = option_names(for_method(preset("smoke"), method))
    return as_flags({name: value for name, value in (MICRO | dotted(changes)).items() if name in known})


@contextmanager
def installed_package(site: Path, code: Path, *lines: str) -> Iterator[None]:
    """Install a package of systems as pip would leave it, here and in processes that are started from here."""
    info = site / "systems-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: systems\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(["[jpeg_dlm.systems]", *lines]))
    with pytest.MonkeyPatch.context() as patch:
        for folder in (code, site):
            patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(code), *filter(None, [os.environ.get("PYTHONPATH")])]))
        methods.cache_clear()
        yield
    methods.cache_clear()


class MicroFolders:
    """Model folders and runs in one directory that the test processes share; each is made once.

    Tests must not write into what these methods return: copy it first.
    """

    def __init__(self, root: Path, text: str) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.corpus = self._made("corpus.txt", text, lambda out: out.write_text(text, "utf-8"))

    def _made(self, name: str, key: object, make: Any) -> Path:
        """Return the path `name` in a folder of its own, which `make` fills if no test has done so."""
        digest = hashlib.sha256(json.dumps([name, key], sort_keys=True, default=str).encode()).hexdigest()[:16]
        folder = self.root / digest
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                make(folder / name)
                (folder / "done").touch()
        return folder / name

    def tokenizer(self) -> Path:
        """Return a BPE tokenizer of 300 tokens trained on the made-up corpus."""
        from jpeg_dlm.text.tokenizer import train_bpe

        return self._made("tokenizer.json", 300, lambda out: train_bpe([self.corpus.read_text("utf-8")], 300).save(out))

    def model(self, method: str = "jpeg-dlm", **changes: object) -> Path:
        """Return a model folder of a method with random weights and no encoder."""

        def make(out: Path) -> None:
            config = micro_config(method, data__source=str(self.corpus), **changes)
            write_model(ModelParts(build_method(config).eval(), config, self.root, self.tokenizer(), None), out)

        return self._made(method, ["model", changes], make)

    __call__ = model

    def run(self, method: str = "jpeg-dlm", **changes: object) -> Path:
        """Return a finished run of `jpeg-dlm train` on the made-up corpus, with its own encoder and tokenizer."""

        def make(out: Path) -> None:
            words = ["train", "--preset", "smoke", "--method", method, "--data", str(self.corpus), "--out", str(out), "--quiet"]
            assert main([*words, *micro_flags(method, **changes)]) == 0

        return self._made(method, ["run", changes], make)
