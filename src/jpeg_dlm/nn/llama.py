"""transformers' Llama with weights in the names and the layout of llama.cpp, which GGUF files use and llama2.c's resemble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Names of llama.cpp and of transformers.
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def llama_state(tensors: Mapping[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Return the tensors as a state dict of `LlamaForCausalLM`; a name that does not belong to it is a KeyError."""
    state = {}
    for name, tensor in tensors.items():
        *block, part, _ = name.split(".")
        full = f"model.layers.{block[1]}.{_LAYER[part]}" if block else _OUTER[part]
        if part in ("attn_q", "attn_k"):
            tensor = _halves(tensor, heads if part == "attn_q" else kv_heads)
        state[f"{full}.weight"] = tensor
    return state


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: rotary positions pair neighbors (2i, 2i + 1) here, but halves in transformers."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def llama_sizes(state: Mapping[str, Tensor], heads: int, kv_heads: int) -> dict[str, Any]:
    """Return those arguments of `LlamaConfig` that heads and tensors determine."""
    vocabulary, width = state["model.embed_tokens.weight"].shape
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": state["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in state),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": "lm_head.weight" not in state,
    }


def build_llama(sizes: Mapping[str, Any], state: Mapping[str, Tensor]) -> LlamaForCausalLM:
    """Return the network of these arguments of `LlamaConfig`; missing, spare and misshapen tensors are refused."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**sizes)
    with torch.device("meta"):  # random initialization would take longer than everything else here
        model = LlamaForCausalLM(config)
    model.load_state_dict({"lm_head.weight": state["model.embed_tokens.weight"], **state}, strict=True, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are no part of a state dict
    return model.eval().requires_grad_(False)
