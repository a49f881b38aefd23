"""Which weights decay."""

import torch
from conftest import MICRO

from jpeg_dlm.config_io import override
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.presets import preset
from jpeg_dlm.training.optim import is_decayed


def test_matrices_decay_and_learned_inputs_do_not():
    options = {"model.context_blocks": 1, "data.packing": "padded", "data.whole": False, "data.frame": False}
    with torch.device("meta"):
        method = JpegDlm(override(preset("smoke"), MICRO | options | {"encoder.kind": "none"}))
    trained = {name: p for name, p in method.named_parameters() if p.requires_grad and p.ndim >= 2}
    assert {name for name, p in trained.items() if not is_decayed(name, p)} == {
        "compressor.latents", "compressor.pos_emb.weight", "decompressor.base_query", "decompressor.pos_emb.weight",
        "decompressor.pos_latent.weight", "dit.t_emb_tokens", "dit.sc_tokens", "dit.mode_tokens", "dit.no_context",
        "dit.context_kind", "embedding.weight",
    }  # fmt: skip
    assert is_decayed("dit.blocks.0.attn.qkv.weight", trained["dit.blocks.0.attn.qkv.weight"])
    assert not is_decayed("lm_head.bias", method.lm_head.bias)
