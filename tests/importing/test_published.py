"""Checkpoints in the layouts of the field, made small here: imported, loaded again, and equal to the network they are of."""

import json

import pytest
import torch
from micro import perturb
from refusals import refusal
from safetensors.torch import save_file

from jpeg_dlm.checkpoints.model_folder import read_model
from jpeg_dlm.cli.main import main
from jpeg_dlm.methods.base import system_class
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.nn.ddit import CausalTransformer, DDiT, DditConfig
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.text.tokenizer import train_bpe

V, H, DEPTH, HEADS, C, L = 41, 32, 2, 4, 16, 10  # 8 channels a head: only a config can tell


def network(seed=0, vocabulary=V, hidden=H, depth=DEPTH, heads=HEADS):
    torch.manual_seed(seed)
    return perturb(DDiT(vocabulary, DditConfig(hidden, depth, heads, cond_dim=C, freq_dim=8))).eval()


def causal(seed=0):
    torch.manual_seed(seed)
    return perturb(CausalTransformer(V, DditConfig(H, DEPTH, HEADS))).eval()


def stored(net, prefix=""):
    """A network's tensors as the public code bases save them: with the rotary buffer in the middle."""
    state = {}
    for name, tensor in net.state_dict().items():
        if name.startswith("blocks.0.norm1"):
            state[f"{prefix}rotary_emb.inv_freq"] = torch.ones(4)
        state[prefix + name] = tensor
    return state


def shadow(net):
    return {"decay": 0.9999, "num_updates": 7, "shadow_params": [p.detach().clone() for p in net.parameters()]}


class Node:
    """Stands for OmegaConf's nodes: same attributes, and a class that the reader must never make."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def omegaconf(value):
    if isinstance(value, dict):
        return Node(_content={key: omegaconf(v) for key, v in value.items()}, _metadata=Node(), _parent=None)
    return Node(_val=value, _metadata=Node())


def hyper(algo, **more):
    model = {"length": L, "n_heads": HEADS, "name": "small"}
    laughs = "ha"
    for _ in range(40):  # whoever writes this out, or copies it, does not come to an end
        laughs = [laughs] * 10
    config = omegaconf({"algo": {"name": algo or laughs}, "model": model} | more)
    return {"config": config, "tokenizer": Node(merges={("a", "b"): 1}), "model_type": laughs}


# ---------------------------------------------------------------- the layouts


def mdlm_folder(path, net, ema=None, **changes):
    config = {"model_type": "mdlm", "model_length": L, "n_heads": HEADS, "hidden_dim": H, "time_conditioning": False}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    save_file(stored(net, "backbone."), path / "model.safetensors")


def sedd_folder(path, net, ema=None, **changes):
    model = {"length": L, "n_heads": HEADS, "hidden_size": H, "scale_by_sigma": True}
    config = {"tokens": V - 1, "graph": {"type": "absorb"}, "noise": {"type": "loglinear"}, "ngpus": 8, "model": model}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    torch.save(stored(net), path / "pytorch_model.bin")


def sedd_training(path, net, ema):
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 3e-4, "params": [0]}]}
    torch.save({"optimizer": optimizer, "model": stored(net, "module."), "ema": shadow(ema), "step": 3}, path)


def lightning(algo, **more):
    def write(path, net, ema):
        loops = {"fit_loop": {"state_dict": {}}}
        saved = {"epoch": 1, "state_dict": stored(net, "backbone._orig_mod."), "loops": loops, "ema": shadow(ema)}
        torch.save(saved | {"hyper_parameters": hyper(algo, **more)}, path)

    return write


SIZES = ["--model.heads", HEADS, "--data.token-len", L]
# name -> (writer, file, options of the command, system, whether it has an average)
LAYOUTS = {
    "MDLM on the hub": (mdlm_folder, "hub", [], "mdlm", False),
    "SEDD on the hub": (sedd_folder, "hub", [], "sedd", False),
    "SEDD's checkpoint": (sedd_training, "checkpoint.pth", ["--method", "sedd", *SIZES], "sedd", True),
    "Duo's checkpoint": (lightning("duo"), "duo.ckpt", ["--data.vocab-size", V - 1], "duo", True),
    "MDLM's checkpoint": (lightning("?", parameterization="subs", time_conditioning=False), "last.ckpt", [], "mdlm", True),
    "MDLM's checkpoint, raw": (lightning("mdlm"), "last.ckpt", ["--weights", "raw"], "mdlm", False),
    "AR's checkpoint": (lightning("ar"), "ar.ckpt", [], "ar", True),
    "AR, by its tensors": (lightning(""), "ar.ckpt", [], "ar", True),
}


def run(path, out, *options):
    return main(["import", str(path), "--out", str(out), *map(str, options)])


@pytest.mark.parametrize("case", LAYOUTS)
def test_an_imported_network_gives_the_same_logits(case, tmp_path, capsys):
    write, name, options, method, averaged = LAYOUTS[case]
    make = causal if method == "ar" else network
    net, ema = make(1), make(2)
    write(tmp_path / name, net, ema)
    assert run(tmp_path / name, tmp_path / "model", *options) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert ("averaged weights" in out) == averaged and "assumed" not in out

    parts = read_model(tmp_path / "model")
    assert (parts.config.method, parts.config.model.heads, parts.config.data.token_len) == (method, HEADS, L)
    assert parts.config.data.vocab_size == V - 1 and parts.config.preset == "owt1024"
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randint(V, (3, L), generator=g)] + ([] if method == "ar" else [torch.rand(3, generator=g)])
    with torch.no_grad():
        wanted, other = (ema, net) if averaged else (net, ema)
        logits = parts.method.backbone(*inputs)
        assert torch.equal(logits, wanted(*inputs)) and not torch.allclose(logits, other(*inputs))


def exported(method):
    """The tensors of a small network with the options of OpenWebText."""
    sizes = {"model.hidden": H, "model.depth": 1, "model.heads": HEADS, "data.token_len": L, "data.vocab_size": V}
    network = perturb(build_method(override(for_method(preset("owt1024"), method), sizes)))
    return {key: t.detach().clone() for key, t in network.export_state().items()}


def flm_file(path, state):
    average = [t.clone() for name, t in state.items() if name.startswith("backbone.")]
    zero = {name: torch.zeros_like(t) for name, t in state.items()}
    torch.save({"state_dict": zero, "ema": {"shadow_params": average}, "hyper_parameters": hyper("flm")}, path)


def elf_file(path, state):
    raw = {name: torch.zeros_like(t) for name, t in state.items()}
    torch.save({"params": raw, "ema_params1": state, "opt_state": {}, "step": 3, "epoch": 0}, path)


CONTINUOUS = {
    "langflow": ("model.safetensors", lambda p, s: save_file({k: t.contiguous() for k, t in s.items()}, p)),
    "flm": ("owt_flm.ckpt", flm_file),
    "elf": ("checkpoint_3", elf_file),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_systems_come_back_tensor_by_tensor(name, tmp_path, capsys):
    file, write = CONTINUOUS[name]
    state = exported(name)
    write(tmp_path / file, state)
    heads = [] if name == "elf" else ["--model.heads", HEADS]
    assert run(tmp_path / file, tmp_path / "model", "--data.token-len", L, *heads) == 0, capsys.readouterr().err
    parts = read_model(tmp_path / "model")
    back = parts.method.export_state()
    assert parts.config.method == name and parts.config.model.heads == HEADS
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)


def test_elf_of_pairs_has_the_same_tensors_and_is_told_its_lengths(tmp_path, capsys):
    """De-En and XSum: only positions differ, which are no tensors, so the command says how long sources and targets are."""
    state = exported("elf")
    elf_file(tmp_path / "checkpoint_3", state)
    lengths = ["--data.source-len", 6, "--data.token-len", 4, "--data.packing", "padded", "--sampler.source-scale", 2]
    assert run(tmp_path / "checkpoint_3", tmp_path / "model", *lengths) == 0, capsys.readouterr().err
    method = read_model(tmp_path / "model").method
    back = method.export_state()
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert method.latent_shape[0] == 10 and method.config.sampler.source_scale == 2


# ---------------------------------------------------------------- what is not told, and what else a command can say


def test_options_win_over_the_file(tmp_path):
    mdlm_folder(tmp_path / "hub", network())
    assert run(tmp_path / "hub", tmp_path / "model", "--model.heads", 2, "--data.token-len", 6, "--sampler.steps", 5) == 0
    config = read_model(tmp_path / "model").config
    assert (config.model.heads, config.data.token_len, config.sampler.steps) == (2, 6, 5)


@pytest.mark.parametrize("name", ["mdlm", "langflow", "flm"])
@pytest.mark.parametrize("origin", ["lm1b", "owt1024", "tiny"])
def test_the_number_of_ids_tells_the_tokenizer(name, origin):
    """BERT's, GPT-2's, and one that only the preset names."""
    config, base = for_method(preset(origin), name), for_method(preset("tiny"), name)
    with torch.device("meta"):
        read = system_class(name).config_of(build_method(config).export_state(), base)
    tokenizers = {"lm1b": "bert-base-uncased", "owt1024": "gpt2", "tiny": base.data.tokenizer}
    assert (read.data.tokenizer, read.data.vocab_size) == (tokenizers[origin], config.data.vocab_size)
    for size in {"hidden", "depth", "cond_dim", "freq_dim", "mask_id", "extra_ids"} & vars(config.model).keys():
        assert getattr(read.model, size) == getattr(config.model, size), size


def test_the_vocabulary_tells_the_preset(tmp_path, capsys):
    save_file(stored(network(0, 30_522, 8, 1, 1), "backbone."), tmp_path / "mdlm.safetensors")
    assert run(tmp_path / "mdlm.safetensors", tmp_path / "model", "--method", "mdlm") == 0
    config = read_model(tmp_path / "model").config
    assert (config.preset, config.data.tokenizer, config.data.token_len) == ("lm1b", "bert-base-uncased", 128)
    assert "assumed: --data.token-len 128" in capsys.readouterr().out, "what the file does not tell is named"
    assert (config.data.vocab_size, config.model.mask_id) == (30_522, 103)


def test_a_tokenizer_is_kept_with_the_model(tmp_path, capsys):
    train_bpe(["a b c"], 262).save(tmp_path / "tokenizer.json")
    save_file(stored(network(0, 263, 16, 1, 2)), tmp_path / "mdlm.safetensors")
    options = ["--method", "mdlm", "--model.heads", 2, "--tokenizer"]
    assert run(tmp_path / "mdlm.safetensors", tmp_path / "model", *options, tmp_path) == 0
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()

    save_file(stored(network(0, 300, 16, 1, 2)), tmp_path / "larger.safetensors")
    assert run(tmp_path / "larger.safetensors", tmp_path / "other", *options, tmp_path / "tokenizer.json") == 2
    assert "262 ids, the model 299" in capsys.readouterr().err


# ---------------------------------------------------------------- what is refused


def checkpoint(path, **changes):
    saved = {"state_dict": stored(network(), "backbone."), "ema": shadow(network(1)), "hyper_parameters": hyper("mdlm")}
    torch.save(saved | changes, path)


STATE = stored(network(), "backbone.")
LAST = "backbone.output_layer.linear.bias"
REFUSED = {
    "tensors that fit several systems": (lambda p: save_file(STATE, f"{p}.safetensors"), ".safetensors", "--method"),
    "a missing tensor": (lambda p: checkpoint(p, state_dict={k: t for k, t in STATE.items() if k != LAST}, ema={}), "", LAST),
    "an extra tensor": (lambda p: checkpoint(p, state_dict=STATE | {"teacher.w": torch.ones(2)}), "", "teacher.w"),
    "a shorter average": (lambda p: checkpoint(p, ema={"shadow_params": shadow(network())["shadow_params"][1:]}), "", "raw"),
    "a weight that is no tensor": (lambda p: checkpoint(p, state_dict=STATE | {"backbone.x": Node()}), "", "backbone.x"),
    "a whole pickled model": (lambda p: torch.save(Node(net=network()), p), "", "state_dict"),
    "a tensor twice": (lambda p: checkpoint(p, state_dict=STATE | {f"module.{LAST}": STATE[LAST]}), "", "twice"),
    "another kind of MDLM": (lambda p: mdlm_folder(p, network(), time_conditioning=True), "", "time_conditioning"),
    "another kind of SEDD": (lambda p: sedd_folder(p, network(), graph={"type": "uniform"}), "", "graph.type uniform"),
    "heads that do not divide the width": (lambda p: mdlm_folder(p, network(), n_heads=5), "", "do not fit together"),
    "something else": (lambda p: torch.save({"weight": torch.ones(2)}, p), "", "released layout"),
    "a flow map": (
        lambda p: flm_file(p, exported("flm") | {"backbone.sigma_map_prime.mlp.0.weight": torch.ones(3, 2)}),
        "",
        "backbone.sigma_map_prime",
    ),
    "averages that are not there": (lambda p: checkpoint(p, ema={}), "", "leave out --weights", "--weights", "ema"),
    "a network of another method": (lambda p: lightning("ar")(p, causal(1), causal(2)), "", "another", "--method", "mdlm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_import_refuses(case, tmp_path, capsys):
    write, suffix, word, *options = REFUSED[case]
    write(tmp_path / "source")
    words = ["import", f"{tmp_path / 'source'}{suffix}", "--out", tmp_path / "model", *options]
    assert word in refusal(capsys, words, (1, 2)) and not (tmp_path / "model").exists()
