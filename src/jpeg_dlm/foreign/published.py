"""Checkpoints of the field as models of this project.

    .safetensors            tensors by name: the authors' JPEG-DLM, LangFlow
    a Hugging Face folder   config.json with model.safetensors (or its shards) or pytorch_model.bin: MDLM, Duo, SEDD
    .ckpt                   Lightning: {state_dict, ema: {shadow_params: [...]}, hyper_parameters}: MDLM, Duo, AR, FLM, FMLM
    .pth                    {model, ema: {shadow_params: [...]}}: SEDD's own code
    checkpoint_<step>       {params, ema_params1}: ELF in torch

Sizes come from the tensors, and the number of heads and the length of a text from the config beside or inside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import Tensor

from jpeg_dlm.config import Config, validate
from jpeg_dlm.config_io import option_names, override
from jpeg_dlm.errors import CheckpointError, UsageError, reason_of
from jpeg_dlm.files import MANIFEST, load_json, load_tensors
from jpeg_dlm.folders.model_folder import MODEL_FILE, TOKENIZER_FILE, ModelParts, build_stored
from jpeg_dlm.foreign.pickle_machine import Foreign, StoredTensor
from jpeg_dlm.foreign.torch_files import load_stored, read_torch_file
from jpeg_dlm.methods.base import Publication
from jpeg_dlm.methods.registry import for_method, names, system_class
from jpeg_dlm.presets import preset
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.wording import either

Weights = Literal["ema", "raw"]
T = TypeVar("T", Tensor, StoredTensor)

CONFIG_BYTES = 1 << 20
INDEX_FILE, TORCH_FILE = f"{MODEL_FILE}.index.json", "pytorch_model.bin"
JAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "flax_model.msgpack")
WRAPPERS = ("module", "_orig_mod")  # what distributed training and torch.compile put into names
BUFFER = "rotary_emb.inv_freq"  # a constant that the published networks store
LOSS_WEIGHTS = "learnable_loss_weighting."  # a part of FMLM's network that only weighted its loss (FLM)
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
    """A checkpoint as it was found: tensors under this project's names, and the config that came with them."""

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
        found = {name: [dig(self.notes, *path) for path in paths] for name, paths in FACTS.items()}
        numbers = {name: [value for value in values if type(value) is int] for name, values in found.items()}
        return {name: values[0] for name, values in numbers.items() if values}


@dataclass(frozen=True)
class Imported:
    """The model, the sizes that nothing in the file told, and the other options that only the preset tells."""

    parts: ModelParts
    assumed: tuple[str, ...]
    of_preset: tuple[str, ...]


def import_published(
    published: Published, options: Mapping[str, Any], method: str = "", base: str = "", tokenizer: Path | None = None
) -> Imported:
    """The model of a checkpoint; `options` win over what it says of itself, the preset `base` tells the rest."""
    method = method or published.method
    known = system_class(method).publication or Publication()
    _refuse_variants(published, method, known)
    start = override(for_method(preset(base or _preset_of(published, method, known)), method), options)
    sized = _sized(published, method, start)
    facts = {name: value for name, value in published.facts().items() if name in known.untold}
    config = override(sized, facts | dict(options))
    try:
        validate(config)
    except UsageError as error:
        raise CheckpointError(f"The sizes in '{published.path}' do not fit together: {error}") from error
    given = {*facts, *(name.replace("-", "_") for name in options)}
    assumed = tuple(name for name in known.untold if name not in given)
    of_preset = tuple(name for name in OF_PRESET if name in option_names(config) and name not in given)
    return Imported(_model(published, config, tokenizer), assumed, of_preset)


def _sized(published: Published, method: str, start: Config) -> Config:
    """`start` with the sizes of the tensors, which may have any shape."""
    try:
        return system_class(method).config_of(published.tensors, start)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"The tensors of '{published.path}' do not have the shapes of {method} ({reason_of(error)}): "
            "name its system with --method."
        ) from error


def _refuse_variants(published: Published, method: str, known: Publication) -> None:
    for path, wanted in known.fixed.items():
        found = dig(published.notes, *path)
        if isinstance(found, (str, bool)) and found != wanted:
            raise CheckpointError(f"'{published.path}' was trained with {'.'.join(path)} {found}: {method} here has {wanted}.")


def _preset_of(published: Published, method: str, known: Publication) -> str:
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
    """A file or folder; `weights` None takes the averaged ones where there are any."""
    if path.is_dir():
        return _from_folder(path, weights)
    if not path.is_file():
        raise CheckpointError(f"'{path}' does not exist: name a checkpoint file or a Hugging Face folder to import.")
    if path.suffix == ".safetensors":
        return _from_tensors(path, load_tensors(path), {}, weights)
    return _from_torch_file(path, {}, weights)


def _from_folder(folder: Path, weights: Weights | None) -> Published:
    if (folder / MANIFEST).is_file() or (folder / "checkpoints").is_dir():
        raise UsageError(f"'{folder}' is a model or a run of this project already: it can be used as it is.")
    notes = load_json(folder / "config.json", CONFIG_BYTES) if (folder / "config.json").is_file() else {}
    if (folder / MODEL_FILE).is_file():
        return _from_tensors(folder, load_tensors(folder / MODEL_FILE), notes, weights)
    if (folder / INDEX_FILE).is_file():
        return _from_tensors(folder, _load_shards(folder), notes, weights)
    if (folder / TORCH_FILE).is_file():
        return _from_torch_file(folder / TORCH_FILE, notes, weights)
    if any((folder / name).exists() for name in JAX_FILES):
        raise CheckpointError(f"'{folder}' is a checkpoint of JAX, which is not read: import the release for torch.")
    raise CheckpointError(f"'{folder}' holds none of {MODEL_FILE}, {INDEX_FILE} and {TORCH_FILE}: name the file to import.")


def _load_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors of several files, exactly as their index lists them."""
    listed = load_json(folder / INDEX_FILE, CONFIG_BYTES * 16).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) and Path(file).name == file for file in listed.values()):
        raise CheckpointError(f"'{folder / INDEX_FILE}' does not list files of its own folder: restore it from a copy.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(listed.values())):
        shard = load_tensors(folder / file)
        if shard.keys() != {name for name, where in listed.items() if where == file}:
            raise CheckpointError(f"'{folder / file}' does not hold the tensors that {INDEX_FILE} lists: restore both.")
        tensors |= shard
    return tensors


def _from_tensors(path: Path, tensors: dict[str, Tensor], notes: Mapping[str, Any], weights: Weights | None) -> Published:
    if weights == "ema":
        raise UsageError(f"'{path}' holds one set of weights: leave out --weights.")
    return Published(path, _sampled(unify(tensors, path)), notes, "raw")


# ---------------------------------------------------------------- what torch.save wrote


def _from_torch_file(path: Path, notes: Mapping[str, Any], weights: Weights | None) -> Published:
    saved = read_torch_file(path)
    if not isinstance(saved, dict):
        raise CheckpointError(f"'{path}' holds no weights by name: save the model's state_dict.")
    key = next((key for key in ("state_dict", "model", "params") if isinstance(saved.get(key), dict)), None)
    stored = unify(_only_tensors(saved if key is None else saved[key], path), path)
    average = saved.get("ema_params1") if key == "params" else dig(saved, "ema", "shadow_params")
    if weights == "ema" and average is None:
        raise UsageError(f"'{path}' holds no averaged weights: leave out --weights.")
    if weights is None:
        weights = "raw" if average is None else "ema"
    if weights == "ema":
        stored = _averaged(stored, average, path)
    stored = _sampled(stored)  # only now, because the list of averages counts every parameter
    if sum(t.nbytes for t in stored.values()) > path.stat().st_size:
        raise CheckpointError(f"The tensors of '{path}' are larger than the file: restore it from a copy.")
    own = dig(saved, "hyper_parameters")
    return Published(path, load_stored(path, stored), own if isinstance(own, dict) else notes, weights)


def _only_tensors(values: Mapping[Any, Any], path: Path) -> dict[str, StoredTensor]:
    if not values:
        raise CheckpointError(f"'{path}' holds no weights.")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise CheckpointError(
                f"'{path}' holds no weights to read ({str(name)[:80]!r} is no plain tensor): save the model's state_dict."
            )
    return dict(values)


def _averaged(stored: dict[str, StoredTensor], average: Any, path: Path) -> dict[str, StoredTensor]:
    """Return `stored` with its moving average, given by name (ELF) or as a list in the order of the parameters."""
    if isinstance(average, list):
        names = [name for name in stored if name.startswith(NETWORK)]
        average = dict(zip(names, average, strict=True)) if len(names) == len(average) else None
    else:
        names = list(stored)
    named = unify(_only_tensors(average, path), path) if isinstance(average, dict) else {}
    if named.keys() != set(names) or any(named[name].shape != stored[name].shape for name in names):
        raise CheckpointError(f"The averages in '{path}' are not those of its weights, one for each: use --weights raw.")
    return stored | named


def unify(tensors: Mapping[str, T], path: Path) -> dict[str, T]:
    """Tensors under the names that models here have: no wrappers, no constants, a bare shared transformer as `backbone`."""
    names = [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in tensors]
    if EMBEDDING.removeprefix(NETWORK) in names:
        names = [NETWORK + name for name in names]
    if len(set(names)) != len(names):
        raise CheckpointError(f"'{path}' holds a tensor twice, with and without {' or '.join(WRAPPERS)}: save it without.")
    return {name: tensor for name, tensor in zip(names, tensors.values(), strict=True) if not name.endswith(BUFFER)}


def _sampled(tensors: dict[str, T]) -> dict[str, T]:
    """Return the tensors that sampling needs."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(NETWORK + LOSS_WEIGHTS)}


# ---------------------------------------------------------------- notes


def dig(value: Any, *path: str) -> Any:
    """Return the value under a path of keys, or None; look through objects of OmegaConf (`_content`, `_val`)."""
    for key in path:
        value = _plain(value)
        value = value.get(key) if isinstance(value, dict) else None
    return _plain(value)


def _plain(value: Any) -> Any:
    if not isinstance(value, Foreign) or not isinstance(value.state, dict):
        return value
    state = value.state
    return state.get("_content", state.get("_val", state))


def _publications() -> dict[str, Publication]:
    found = {name: system_class(name).publication for name in names("system")}
    return {name: publication for name, publication in found.items() if publication is not None}


def _system_of_notes(notes: Mapping[str, Any]) -> str | None:
    """The system that a config names, by the first of the ways in which it can."""
    known = _publications()
    algo, parameterization = dig(notes, "config", "algo", "name"), dig(notes, "config", "parameterization")
    hub = str([notes.get(key) for key in ("model_type", "architectures", "auto_map")]).lower()
    ways = (
        [name for name, p in known.items() if any(fnmatchcase(str(algo), pattern) for pattern in p.algo)],
        [name for name, p in known.items() if p.parameterization and p.parameterization == parameterization],
        [name for name, p in known.items() if p.keys and p.keys <= notes.keys()],
        [name for name, p in known.items() if p.hub and p.hub in hub],
    )
    return next((found[0] for found in ways if len(found) == 1), None)


def _system_of_tensors(published: Published) -> str:
    """The system with the most tensors to know it by; JPEG-DLM has none, since its own layout says by itself what it lacks."""
    ends = {".".join(parts[i:]) for name in published.tensors for parts in [name.split(".")] for i in range(len(parts))}
    known = {name: len(p.tensors) for name, p in _publications().items() if ends.issuperset(p.tensors)}
    found = [name for name, marks in known.items() if marks == max(known.values())]
    if len(found) > 1:
        raise UsageError(f"'{published.path}' fits several systems: name it with --method {either(found)}.")
    return found[0]
