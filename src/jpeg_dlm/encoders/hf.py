"""Load T5 and BERT-like encoders through transformers, by hub name or from a local folder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from jpeg_dlm.config import EncoderConfig
from jpeg_dlm.encoders.frozen import FrozenEncoder
from jpeg_dlm.encoders.pretrained import load_pretrained
from jpeg_dlm.errors import UsageError

# Encoder-decoder families whose encoder can be loaded without the decoder.
_ENCODER_CLASSES = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


class TransformersEncoder(FrozenEncoder):
    """Any transformers encoder that takes input_ids and attention_mask."""

    def __init__(self, model: nn.Module, name: str, config: EncoderConfig) -> None:
        model_config: Any = model.config
        layers, self.vocab_size = int(model_config.num_hidden_layers), int(model_config.vocab_size)
        for layer in (config.layer, *config.layers):
            if not -layers - 1 <= layer <= layers:
                known = f"{name} has hidden states 0 to {layers}, or -1 for the last"
                raise UsageError(f"encoder.layer {layer} does not exist: {known}.")
        super().__init__(model.float(), name, int(model_config.hidden_size), config)

    def raw_features(self, tokens_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
        wanted = self.layers or (self.layer,)
        inner = wanted != (-1,)
        attention = None if mask_BL is None else mask_BL.long()
        output = self.model(input_ids=tokens_BL, attention_mask=attention, output_hidden_states=inner, return_dict=True)
        return self.mixed([output.hidden_states[layer] for layer in wanted] if inner else [output.last_hidden_state])


def load_transformers_encoder(config: EncoderConfig) -> TransformersEncoder:
    """Load the encoder `config.name` from a folder (offline), the local cache or the hub."""
    name = config.name
    if not name:
        raise UsageError("encoder.kind 'hf' needs a model: give --encoder.name with a hub name such as t5-small, or a folder.")
    import transformers

    def load(options: dict[str, Any]) -> nn.Module:
        model_config = transformers.AutoConfig.from_pretrained(name, **options)
        family = _ENCODER_CLASSES.get(model_config.model_type, "AutoModel")
        model = getattr(transformers, family).from_pretrained(name, **options)
        whole = family == "AutoModel" and getattr(model_config, "is_encoder_decoder", False)
        return model.get_encoder() if whole else model

    remedy = (
        "point --encoder.name at a local folder with config.json and model.safetensors, "
        "or use the pinned package with --encoder.kind flan-t5-small."
    )
    return TransformersEncoder(load_pretrained(load, name, config.revision, "the encoder", remedy), name, config)
