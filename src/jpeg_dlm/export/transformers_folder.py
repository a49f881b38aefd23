"""A folder for `transformers.AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`, where this package is not installed.

The files of `remote` are copied into it as they are and import nothing of this package; all sizes are in config.json.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from jpeg_dlm.checkpoints.model_folder import MODEL_FILE, ModelParts
from jpeg_dlm.encoders.small import SmallEncoder
from jpeg_dlm.options import to_dict
from jpeg_dlm.text.packing import layout_of
from jpeg_dlm.text.tokenizer import TextTokenizer
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import atomic_directory, dump_json, save_tensors, write_atomic, write_manifest

CODE = Path(__file__).parent / "remote"
FLOW = ("latent_flow.py", "text_diffusion.py")
# Of each system the beginning of the names of its classes, and the files of code; the first one has the classes.
SYSTEMS = {
    "jpeg-dlm": ("JpegDlm", ("modeling_jpeg_dlm.py", *FLOW)),
    "elf": ("Elf", ("modeling_elf.py", *FLOW)),
    "mdlm": ("Mdlm", ("modeling_mdlm.py", "text_diffusion.py")),
}
# Sampling needs none of these: what encodes texts to latents, and the encoder's features of them.
UNUSED = ("encoder.", "target.", "compressor.", "latent_updates")
USAGE = """from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("REPOSITORY", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("REPOSITORY", trust_remote_code=True)
{call}
tokenizer.batch_decode(ids, skip_special_tokens=True)"""
CALL = "ids = model.generate(num_return_sequences=4, seed=0)  # after a prompt: **tokenizer('PROMPT', return_tensors='pt')"
CALL_OF_PAIRS = "ids = model.generate(**tokenizer('SOURCE', return_tensors='pt'), num_return_sequences=4, seed=0)"


def write_transformers(parts: ModelParts, out: Path, card: str) -> Path:
    """Write code, weights, config, tokenizer and the model card."""
    code, config = exportable(parts), parts.config
    tensors = {name: t for name, t in parts.method.state_dict().items() if not name.startswith(UNUSED)}
    encoder, tokenizer = read_encoder(parts), parts.read_tokenizer()
    if encoder:
        tensors |= {f"encoder.{name}": t for name, t in encoder.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(out, new=True) as temp:
        for name in code:
            shutil.copyfile(CODE / name, temp / name)
        write_atomic(temp / "config.json", dump_json(config_of(parts, tokenizer)))
        save_tensors(temp / MODEL_FILE, tensors)
        tokenizer.save_pretrained(temp, config.data.source_len or config.data.token_len)
        write_atomic(temp / "README.md", card)
        write_manifest(temp, {})
    return out


def usage(parts: ModelParts) -> str:
    """Return the code of the model card."""
    return USAGE.format(call=CALL_OF_PAIRS if parts.config.data.source_len else CALL)


def exportable(parts: ModelParts) -> tuple[str, ...]:
    """Return the files of code of a model; refuse one without."""
    config, m = parts.config, parts.config.model
    if config.method not in SYSTEMS:
        raise UsageError(f"transformers can load {', '.join(SYSTEMS)}, not {config.method}: leave the format out.")
    if getattr(m, "context_blocks", 0) or (config.data.source_len and getattr(m, "source", "features") != "features"):
        raise UsageError("A model that reads latents of other texts has no form for transformers: leave the format out.")
    return SYSTEMS[config.method][1]


def read_encoder(parts: ModelParts) -> dict[str, Tensor] | None:
    """Return the weights and statistics of the encoder that reads sources; None if nothing does."""
    if not (parts.config.data.source_len and parts.method.uses_encoder):
        return None
    encoder = parts.read_encoder()
    if not isinstance(encoder.model, SmallEncoder):
        raise UsageError("Of models of pairs, those with a small encoder have a form for transformers: leave the format out.")
    statistics = {"feature_mean": encoder.feature_mean, "feature_std": encoder.feature_std}  # as `scale` has them
    return encoder.model.state_dict() | statistics


def config_of(parts: ModelParts, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return config.json: all sizes and the sampler's options, flat but for these."""
    config, (name, (file, *_)) = parts.config, SYSTEMS[parts.config.method]
    data, encoder, layout = config.data, config.encoder, layout_of(config.data, tokenizer)
    module = Path(file).stem
    sizes = {key: getattr(data, key) for key in ("vocab_size", "token_len", "source_len", "rows_end")}
    sizes |= {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    sizes |= {"begin_token_id": layout.bos_id if data.frame else None, **to_dict(config)["model"]}
    if parts.method.uses_encoder:
        layer = encoder.layer if encoder.layer >= 0 else encoder.depth + 1 + encoder.layer
        sizes |= {"feature_dim": encoder.feature_dim, "encoder_layer": layer}
        sizes |= {"encoder_depth": encoder.depth, "encoder_heads": encoder.heads}
    if config.method == "elf":
        sizes["noise_scale"] = config.objective.noise_scale
    return {
        "model_type": config.method,
        "architectures": [f"{name}Model"],
        "auto_map": {"AutoConfig": f"{module}.{name}Config", "AutoModel": f"{module}.{name}Model"},
        "dtype": "float32",
        "tie_word_embeddings": False,
        **sizes,
        "sampler": {key: value for key, value in to_dict(config)["sampler"].items() if key != "cache"},
    }
