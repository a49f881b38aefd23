"""Checkpoints of the field as models of this project.

    .safetensors            tensors by name: the authors' JPEG-DLM, LangFlow
    a Hugging Face folder   config.json with model.safetensors or pytorch_model.bin: MDLM, Duo, SEDD
    .ckpt                   Lightning: {state_dict, ema: {shadow_params: [...]}, hyper_parameters}: MDLM, Duo, AR, FLM
    .pth                    {model, ema: {shadow_params: [...]}}: SEDD's own code
    checkpoint_<step>       {params, ema_params1}: ELF in torch

Sizes come from the tensors, and the number of heads and the length of a text from the config beside or inside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from jpeg_dlm.checkpoints.model_folder import MODEL_FILE, TOKENIZER_FILE, ModelParts, build_stored
from jpeg_dlm.config import Config, validate
from jpeg_dlm.importing.torch_files import Stub, read_torch_file
from jpeg_dlm.methods.base import CheckpointSignature, system_class
from jpeg_dlm.methods.registry import for_method, names
from jpeg_dlm.options import option_names, override
from jpeg_dlm.presets import preset
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.errors import CheckpointError, JpegDlmError, UsageError, either, reason_of
from jpeg_dlm.util.files import MANIFEST, load_json, load_tensors

Weights = Literal["ema", "raw"]

CONFIG_BYTES = 1 << 20
TORCH_FILE = "pytorch_model.bin"
WRAPPERS = ("module", "_orig_mod")  # what distributed training and torch.compile put into names
BUFFER = "rotary_emb.inv_freq"  # a constant that the published networks store
NETWORK, EMBEDDING = "backbone.", "backbone.vocab_embed.embedding"  # the shared transformer
BERT_VOCABULARY = 30_522  # bert-base-uncased, of every LM1B checkpoint of the field; OpenWebText has GPT-2 or T5
RELEASED = ("lm1b", "owt1024")  # the presets of the authors' JPEG-DLM files, which differ in tokens and latents
# What training and sampling chose and no tensor shows.
OF_PRESET = ("data.source", "data.tokenizer", "sampler.steps", "sampler.w", "sampler.grid")

# Where the length and the heads stand: MDLM's and Duo's hub config, SEDD's hub config, and Lightning's hyperparameters.
FACTS = {
    "data.token_len": (("model_length",), ("model", "length"), ("config", "model", "length")),
    "model.heads": (("n_heads",), ("model", "n_heads"), ("config", "model", "n_heads")),
}


@dataclass(frozen=True)
class Published:
    """A checkpoint as it was read: tensors under this project's names, and the config that came with them."""

    path: Path
    tensors: dict[str, Tensor]
    notes: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = "raw"

    @property
    def method(self) -> str:
        """Name of the system."""
        return _system_of_notes(self.notes) or _system_of_tensors(self)

    def facts(self) -> dict[str, int]:
        """Options that the notes tell and the tensors do not."""
        stated = [(name, dig(self.notes, *path)) for name, paths in FACTS.items() for path in reversed(paths)]
        return {name: value for name, value in stated if type(value) is int}


def import_published(
    published: Published, options: Mapping[str, Any], method: str = "", base: str = "", tokenizer: Path | None = None
) -> tuple[ModelParts, list[str], list[str]]:
    """The model of a checkpoint, the sizes that nothing in the file told, and the other options that only the preset tells.

    `options` win over what the file says of itself, and the preset `base` tells the rest.
    """
    method = method or published.method
    known = system_class(method).signature or CheckpointSignature()
    for path, wanted in known.fixed.items():
        value = dig(published.notes, *path)
        if isinstance(value, (str, bool)) and value != wanted:
            raise CheckpointError(f"'{published.path}' was trained with {'.'.join(path)} {value}: {method} here has {wanted}.")
    start = override(for_method(preset(base or _preset_of(published, method, known)), method), options)
    sized = _sized(published, method, start)
    facts = {name: value for name, value in published.facts().items() if name in known.not_in_tensors}
    config = override(sized, facts | dict(options))
    try:
        validate(config)
    except UsageError as error:
        raise CheckpointError(f"The sizes in '{published.path}' do not fit together: {error}") from error
    given = {*facts, *(name.replace("-", "_") for name in options)}
    assumed = [name for name in known.not_in_tensors if name not in given]
    of_preset = [name for name in OF_PRESET if name in option_names(config) and name not in given]
    return _model(published, config, tokenizer), assumed, of_preset


def _sized(published: Published, method: str, start: Config) -> Config:
    """`start` with the sizes of the tensors, which may have any shape."""
    try:
        return system_class(method).config_of(published.tensors, start)
    except JpegDlmError:
        raise
    except Exception as error:  # tensors of any shape make the methods raise any
        raise CheckpointError(
            f"The tensors of '{published.path}' do not have the shapes of {method} ({reason_of(error)}): "
            "name its system with --method."
        ) from error


def _preset_of(published: Published, method: str, known: CheckpointSignature) -> str:
    """The paper's preset with the checkpoint's vocabulary, for JPEG-DLM with its tokens and latents."""
    if method == "jpeg-dlm":
        sized = _sized(published, method, preset(known.preset))
        sizes = sized.data.token_len, sized.model.latent_len
        for name in RELEASED:
            if sizes == (preset(name).data.token_len, preset(name).model.latent_len):
                return name
        raise UsageError(
            f"'{published.path}' has {sizes[1]} latents for {sizes[0]} tokens, unlike the released files: name the preset of "
            f"its data and sampler with --preset {either([*RELEASED, 'owt128'])}."
        )
    embedding = published.tensors.get(EMBEDDING)
    bert = embedding is not None and len(embedding) == BERT_VOCABULARY
    return "lm1b" if bert else known.preset


def _model(published: Published, config: Config, tokenizer: Path | None) -> ModelParts:
    """Every tensor must find its place, and the tokenizer must know every id."""
    if tokenizer is not None:
        tokenizer = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
        known = TextTokenizer.from_file(tokenizer).vocab_size
        if known < config.data.vocab_size:
            raise UsageError(f"The tokenizer '{tokenizer}' has {known} ids, the model {config.data.vocab_size}: name its own.")
    method = build_stored(config, published.tensors, published.path)
    method.import_state(published.tensors, str(published.path))
    return ModelParts(method.eval(), config, published.path, tokenizer, None)


# ---------------------------------------------------------------- files and folders


def read_published(path: Path, weights: Weights | None = None) -> Published:
    """Read a file or folder; `weights` None takes the averaged ones where there are any."""
    notes: Mapping[str, Any] = {}
    if path.is_dir():
        if (path / MANIFEST).is_file() or (path / "checkpoints").is_dir():
            raise UsageError(f"'{path}' is a model or a run of this project already: it can be used as it is.")
        notes = load_json(path / "config.json", CONFIG_BYTES) if (path / "config.json").is_file() else {}
        files = [path / name for name in (MODEL_FILE, TORCH_FILE) if (path / name).is_file()]
        if not files:
            raise CheckpointError(f"'{path}' holds neither {MODEL_FILE} nor {TORCH_FILE}: name one file with all weights.")
        path = files[0]
    if not path.is_file():
        raise CheckpointError(f"'{path}' does not exist: name a checkpoint file or a Hugging Face folder to import.")
    saved = load_tensors(path) if path.suffix == ".safetensors" else read_torch_file(path)
    return _chosen(path, saved, notes, weights)


def _chosen(path: Path, saved: Any, notes: Mapping[str, Any], weights: Weights | None) -> Published:
    """Choose the weights, raw or averaged, of what was saved: tensors by name, or a training with them inside."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"'{path}' holds no weights by name: save the model's state_dict.")
    key = next((key for key in ("state_dict", "model", "params") if isinstance(saved.get(key), dict)), None)
    tensors = unify(saved if key is None else saved[key], path)
    average = saved.get("ema_params1") if key == "params" else dig(saved, "ema", "shadow_params")
    if weights == "ema" and average is None:
        raise UsageError(f"'{path}' holds no averaged weights: leave out --weights.")
    if weights is None:
        weights = "raw" if average is None else "ema"
    if weights == "ema":
        tensors = _averaged(tensors, average, path)
    config = dig(saved, "hyper_parameters", "config")
    return Published(path, tensors, notes if config is None else {"config": config}, weights)


def _averaged(tensors: dict[str, Tensor], average: Any, path: Path) -> dict[str, Tensor]:
    """Return `tensors` with their moving average, given by name (ELF) or as a list in the order of the parameters."""
    if isinstance(average, list):
        names = [name for name in tensors if name.startswith(NETWORK)]
        average = dict(zip(names, average, strict=True)) if len(names) == len(average) else None
    else:
        names = list(tensors)
    named = unify(average, path) if isinstance(average, dict) else {}
    if named.keys() != set(names) or any(named[name].shape != tensors[name].shape for name in names):
        raise CheckpointError(f"The averages in '{path}' are not those of its weights, one for each: use --weights raw.")
    return tensors | named


def unify(tensors: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return tensors under the names of models here: no wrappers, no constants, a bare shared transformer as `backbone`."""
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"'{path}' holds no weights to read ({str(name)[:80]!r} is no plain tensor): save the model's state_dict."
            )
    names = [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in tensors]
    if EMBEDDING.removeprefix(NETWORK) in names:
        names = [NETWORK + name for name in names]
    if len(set(names)) != len(names):
        raise CheckpointError(f"'{path}' holds a tensor twice, with and without {' or '.join(WRAPPERS)}: save it without.")
    return {name: tensor for name, tensor in zip(names, tensors.values(), strict=True) if not name.endswith(BUFFER)}


# ---------------------------------------------------------------- notes


def dig(value: Any, *path: str) -> Any:
    """Return the value under a path of keys, or None; look through objects of OmegaConf (`_content`, `_val`)."""
    if isinstance(value, Stub) and isinstance(value.state, dict):
        value = value.state.get("_content", value.state.get("_val", value.state))
    if not path:
        return value
    return dig(value.get(path[0]) if isinstance(value, dict) else None, *path[1:])


def _signatures() -> dict[str, CheckpointSignature]:
    return {name: signature for name in names("system") if (signature := system_class(name).signature) is not None}


def _system_of_notes(notes: Mapping[str, Any]) -> str | None:
    """The system that a config names, by the first property that only one system has."""
    known = _signatures()
    algo, parameterization = dig(notes, "config", "algo", "name"), dig(notes, "config", "parameterization")
    hub = str([notes.get(key) for key in ("model_type", "architectures", "auto_map")]).lower()
    candidates = (
        [name for name, p in known.items() if algo in p.algo],
        [name for name, p in known.items() if p.parameterization and p.parameterization == parameterization],
        [name for name, p in known.items() if p.keys and p.keys <= notes.keys()],
        [name for name, p in known.items() if p.hub and p.hub in hub],
    )
    return next((systems[0] for systems in candidates if len(systems) == 1), None)


def _system_of_tensors(published: Published) -> str:
    """The system with the most tensors to know it by; JPEG-DLM has none, since its own layout says by itself what it lacks."""
    ends = {".".join(parts[i:]) for name in published.tensors for parts in [name.split(".")] for i in range(len(parts))}
    marks = {name: len(p.tensors) for name, p in _signatures().items() if ends.issuperset(p.tensors)}
    systems = [name for name, count in marks.items() if count == max(marks.values())]
    if len(systems) > 1:
        raise UsageError(f"'{published.path}' fits several systems: name it with --method {either(systems)}.")
    return systems[0]
