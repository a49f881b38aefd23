"""Checkpoints in the layouts of the field, made small here: imported, loaded again, and equal to the network they are of."""

import json

import pytest
import torch
from safetensors.torch import save_file

from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.errors import CheckpointError
from jpeg_dlm.folders.model_folder import read_model
from jpeg_dlm.foreign.pickle_machine import Foreign
from jpeg_dlm.foreign.published import dig, read_published
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.nn.ddit import CausalTransformer, DDiT
from jpeg_dlm.presets import preset
from jpeg_dlm.text.tokenizer import train_bpe

pytest_plugins = ["tiny_evaluation"]  # fixtures

V, H, DEPTH, HEADS, C, L = 41, 32, 2, 4, 16, 10  # 8 channels a head: only a config can tell


def shaken(module, seed):
    """Every parameter random, so that none can be forgotten; the parts that start as zero too."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    return module.eval()


def network(seed=0, heads=HEADS):
    return shaken(DDiT(V, H, DEPTH, heads, C, 8), seed)


def causal(seed=0):
    return shaken(CausalTransformer(V, H, DEPTH, HEADS), seed)


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
    return {"config": omegaconf({"algo": {"name": algo}, "model": model} | more), "tokenizer": Node(merges={("a", "b"): 1})}


# ---------------------------------------------------------------- the layouts


def mdlm_folder(path, net, ema):
    config = {
        "model_type": "mdlm", "architectures": ["MDLM"], "auto_map": {"AutoConfig": "configuration_mdlm.MDLMConfig"},
        "vocab_size": V, "model_length": L, "hidden_dim": H, "cond_dim": C, "n_blocks": DEPTH, "n_heads": HEADS,
        "dropout": 0.1, "time_conditioning": False,
    }  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored(net, "backbone."), path / "model.safetensors")


def sharded_folder(path, net, ema):
    mdlm_folder(path, net, ema)
    (path / "model.safetensors").unlink()
    tensors = stored(net, "backbone.")
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


SEDD_CONFIG = {
    "tokens": V - 1, "graph": {"type": "absorb"}, "noise": {"type": "loglinear"}, "ngpus": 8,
    "model": {"length": L, "n_heads": HEADS, "hidden_size": H, "scale_by_sigma": True},
}  # fmt: skip


def sedd_folder(path, net, ema):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SEDD_CONFIG))
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


# name -> (writer, file, options of the command, system, whether it has an average)
LAYOUTS = {
    "MDLM on the hub": (mdlm_folder, "hub", [], "mdlm", False),
    "MDLM in shards": (sharded_folder, "hub", [], "mdlm", False),
    "SEDD on the hub": (sedd_folder, "hub", [], "sedd", False),
    "SEDD's checkpoint": (
        sedd_training, "checkpoint.pth",
        ["--method", "sedd", "--model.heads", HEADS, "--data.token-len", L], "sedd", True,
    ),
    "Duo's checkpoint": (lightning("duo"), "duo.ckpt", ["--data.vocab-size", V - 1], "duo", True),
    "MDLM's checkpoint": (lightning("?", parameterization="subs", time_conditioning=False), "last.ckpt", [], "mdlm", True),
    "MDLM's checkpoint, raw": (lightning("mdlm"), "last.ckpt", ["--weights", "raw"], "mdlm", False),
    "AR's checkpoint": (lightning("ar"), "ar.ckpt", [], "ar", True),
    "AR, by its tensors": (lightning("?"), "ar.ckpt", [], "ar", True),
}  # fmt: skip


def run(path, out, *options):
    return main(["import", str(path), "--out", str(out), *map(str, options)])


@pytest.mark.parametrize("case", LAYOUTS)
def test_an_imported_network_gives_the_same_logits(case, tmp_path, capsys):
    write, name, options, method, averaged = LAYOUTS[case]
    make = causal if method == "ar" else network
    net, ema = make(1), make(2)
    write(tmp_path / name, net, ema)
    assert run(tmp_path / name, tmp_path / "model", *options) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert ("averaged weights" in said) == averaged and "assumed" not in said

    parts = read_model(tmp_path / "model")
    assert (parts.config.method, parts.config.model.heads, parts.config.data.token_len) == (method, HEADS, L)
    assert parts.config.data.vocab_size == V - 1 and parts.config.preset == "owt1024"
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randint(V, (3, L), generator=g)] + ([] if method == "ar" else [torch.rand(3, generator=g)])
    with torch.no_grad():
        wanted, other = (ema, net) if averaged else (net, ema)
        found = parts.method.backbone(*inputs)
        assert torch.equal(found, wanted(*inputs)) and not torch.allclose(found, other(*inputs))


def small(method, **options):
    sizes = {"model.hidden": H, "model.depth": 1, "model.heads": HEADS, "data.token_len": L, "data.vocab_size": V}
    return shaken(build_method(override(for_method(preset("owt1024"), method), sizes | options)), 3)


def flm_file(path, state):
    average = [t.clone() for name, t in state.items() if name.startswith("backbone.")]
    zero = {name: torch.zeros_like(t) for name, t in state.items()}
    torch.save({"state_dict": zero, "ema": {"shadow_params": average}, "hyper_parameters": hyper("flm")}, path)


def fmlm_file(algo):
    def write(path, state):
        """As the authors save a flow map: among the network's parameters are those that weighted its loss."""
        more = {"mlp.0.weight": torch.ones(3, 2), "mlp.0.bias": torch.ones(3)}
        whole = {}
        for name, t in state.items():
            if name.startswith("backbone.blocks.0.norm1"):
                whole |= {f"backbone.learnable_loss_weighting.{key}": value for key, value in more.items()}
                whole["backbone.rotary_emb.inv_freq"] = torch.ones(4)
            whole[name] = t
        average = [t.clone() for name, t in whole.items() if "inv_freq" not in name and name.startswith("backbone.")]
        zero = {name.replace("backbone.", "backbone._orig_mod."): torch.zeros_like(t) for name, t in whole.items()}
        torch.save({"state_dict": zero, "ema": {"shadow_params": average}, "hyper_parameters": hyper(algo)}, path)

    return write


@pytest.mark.parametrize("algo", ["flm_distill", "flm_distill_double", "flm_semigroup_distill", "fmlm_twostage"])
def test_a_flow_map_comes_without_the_weights_of_its_loss(algo, tmp_path, capsys):
    map_ = small("flm", **{"objective.flow_map": True})
    state = {key: t.detach().clone() for key, t in map_.export_state().items()}
    fmlm_file(algo)(tmp_path / "owt_fmlm.ckpt", state)
    assert run(tmp_path / "owt_fmlm.ckpt", tmp_path / "model") == 0, capsys.readouterr().err
    parts = read_model(tmp_path / "model")
    assert parts.config.method == "flm" and parts.config.objective.flow_map
    z, tau, end = torch.randn(2, L, map_.ids), torch.tensor([0.1, 0.4]), torch.tensor([0.5, 1.0])
    with torch.no_grad():
        assert torch.equal(parts.method.denoise(z, tau, end), map_.denoise(z, tau, end))


def gpt2_stand_in(path):
    """A tokenizer with GPT-2's number of ids and its one special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*letters, *(f"Ġ{i}" for i in range(50_256 - len(letters)))])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>"])
    core.save(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("flow_map", [False, True])
def test_the_padding_id_of_flm_on_openwebtext_is_never_written(flow_map, byte_gpt2, tmp_path, capsys):
    """Its 50,258 ids are GPT-2's and [PAD], here by far the most probable everywhere."""
    sizes = {"model.hidden": 8, "model.heads": 2, "data.vocab_size": 50_257, "model.extra_ids": 1}
    net = small("flm", **sizes | {"objective.flow_map": flow_map})
    state = {key: t.detach().clone() for key, t in net.export_state().items()}
    state["backbone.output_layer.linear.bias"][-1] = 1e4
    assert len(state["backbone.vocab_embed.embedding"]) == 50_258
    (fmlm_file("flm_distill") if flow_map else flm_file)(tmp_path / "owt.ckpt", state)
    gpt2_stand_in(tmp_path / "tokenizer.json")
    options = ["--tokenizer", tmp_path / "tokenizer.json", "--model.heads", 2, "--sampler.steps", 2]
    assert run(tmp_path / "owt.ckpt", tmp_path / "model", *options) == 0, capsys.readouterr().err
    config = read_model(tmp_path / "model").config
    assert (config.data.vocab_size, config.model.extra_ids, config.data.tokenizer) == (50_257, 1, "gpt2")
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "model"), "-n", "2", "--tokens"]) == 0
    ids = [int(i) for i in capsys.readouterr().out.split()]
    assert len(ids) == 2 * L and max(ids) < 50_257
    (tmp_path / "real.txt").write_text("real text\n" * 4)
    evaluate = ["evaluate", str(tmp_path / "model"), "-n", "4", "--scorer", f"hf:{byte_gpt2}", "--mauve", "off"]
    for protocol in ("default", "duo", "sedd"):  # text, text with special tokens, ids
        assert main([*evaluate, "--protocol", protocol, "--seeds", "1", "--reference", str(tmp_path / "real.txt")]) == 0


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
    state = {key: t.detach().clone() for key, t in small(name).export_state().items()}
    write(tmp_path / file, state)
    heads = [] if name == "elf" else ["--model.heads", HEADS]
    assert run(tmp_path / file, tmp_path / "model", "--data.token-len", L, *heads) == 0, capsys.readouterr().err
    parts = read_model(tmp_path / "model")
    found = parts.method.export_state()
    assert parts.config.method == name and parts.config.model.heads == HEADS
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


# ---------------------------------------------------------------- what is not told, and what else a command can say


def test_what_the_file_does_not_tell_is_named(tmp_path, capsys):
    sedd_training(tmp_path / "checkpoint.pth", shaken(DDiT(V, 128, 1, 2, C, 8), 0), shaken(DDiT(V, 128, 1, 2, C, 8), 1))
    assert run(tmp_path / "checkpoint.pth", tmp_path / "model", "--method", "sedd") == 0
    assert "assumed: --data.token-len 1024, --model.heads 2." in capsys.readouterr().out


def test_options_win_over_the_file(tmp_path):
    mdlm_folder(tmp_path / "hub", network(), None)
    assert run(tmp_path / "hub", tmp_path / "model", "--model.heads", 2, "--data.token-len", 6, "--sampler.steps", 5) == 0
    config = read_model(tmp_path / "model").config
    assert (config.model.heads, config.data.token_len, config.sampler.steps) == (2, 6, 5)


def test_the_vocabulary_tells_the_preset(tmp_path):
    net = shaken(DDiT(30_522, 8, 1, 1, 4, 8), 0)
    save_file(stored(net, "backbone."), tmp_path / "mdlm.safetensors")
    assert run(tmp_path / "mdlm.safetensors", tmp_path / "model", "--method", "mdlm") == 0
    config = read_model(tmp_path / "model").config
    assert (config.preset, config.data.tokenizer, config.data.token_len) == ("lm1b", "bert-base-uncased", 128)
    assert (config.data.vocab_size, config.model.mask_id) == (30_522, 103)


def test_a_tokenizer_is_kept_with_the_model(tmp_path, capsys):
    train_bpe(["a b c"], 262).save(tmp_path / "tokenizer.json")
    net = shaken(DDiT(263, 16, 1, 2, 4, 8), 0)
    save_file(stored(net), tmp_path / "mdlm.safetensors")
    options = ["--method", "mdlm", "--model.heads", 2, "--tokenizer"]
    assert run(tmp_path / "mdlm.safetensors", tmp_path / "model", *options, tmp_path) == 0
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()

    save_file(stored(shaken(DDiT(300, 16, 1, 2, 4, 8), 0)), tmp_path / "larger.safetensors")
    assert run(tmp_path / "larger.safetensors", tmp_path / "other", *options, tmp_path / "tokenizer.json") == 2
    assert "262 ids, the model 299" in capsys.readouterr().err


def test_notes_are_read_through_foreign_objects():
    leaf = Foreign("omegaconf.nodes.AnyNode", state={"_val": 128})
    tree = {"config": Foreign("omegaconf.DictConfig", state={"_content": {"length": leaf, "plain": 3}})}
    assert dig(tree, "config", "length") == 128 and dig(tree, "config", "plain") == 3
    assert dig(tree, "config", "none", "deeper") is None and dig(tree, "none") is None
    loop = Foreign("x")
    loop.state = {"_content": loop}
    assert dig(loop, "a", "b") is None


# ---------------------------------------------------------------- what is refused


def checkpoint(path, **changes):
    saved = {"state_dict": stored(network(), "backbone."), "ema": shadow(network(1)), "hyper_parameters": hyper("mdlm")}
    torch.save(saved | changes, path)


def hub(path, **changes):
    mdlm_folder(path, network(), None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def jax_folder(path):
    path.mkdir()
    (path / "_CHECKPOINT_METADATA").write_text("{}")


def wrong_index(path, change):
    sharded_folder(path, network(), None)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


def hub_sedd(path, **changes):
    sedd_folder(path, network(), None)
    (path / "config.json").write_text(json.dumps(SEDD_CONFIG | changes))


STATE = stored(network(), "backbone.")
LAST = "backbone.output_layer.linear.bias"
WIDE = torch.zeros(1).expand(V)  # a view of one number
REFUSED = {
    "tensors that fit several systems": (lambda p: save_file(STATE, f"{p}.safetensors"), ".safetensors", "--method"),
    "a missing tensor": (lambda p: checkpoint(p, state_dict=without(STATE, LAST), ema={}), "", LAST),
    "an extra tensor": (lambda p: checkpoint(p, state_dict=STATE | {"teacher.w": torch.ones(2)}), "", "teacher.w"),
    "a shorter average": (lambda p: checkpoint(p, ema={"shadow_params": shadow(network())["shadow_params"][1:]}), "", "raw"),
    "an average in another order": (
        lambda p: checkpoint(p, ema={"shadow_params": shadow(network())["shadow_params"][::-1]}), "", "--weights raw",
    ),
    "an average of something else": (lambda p: checkpoint(p, ema={"shadow_params": Node()}), "", "--weights raw"),
    "a weight that is no tensor": (lambda p: checkpoint(p, state_dict=STATE | {"backbone.x": Node()}), "", "backbone.x"),
    "a whole pickled model": (lambda p: torch.save(Node(net=network()), p), "", "state_dict"),
    "no weights": (lambda p: torch.save({}, p), "", "no weights"),
    "a tensor with and without a wrapper": (
        lambda p: checkpoint(p, state_dict=STATE | {f"module.{LAST}": STATE[LAST]}), "", "twice",
    ),
    "tensors larger than the file": (lambda p: checkpoint(p, state_dict=STATE | {LAST: WIDE}, ema={}), "", "does not fit"),
    "another kind of MDLM": (lambda p: hub(p, time_conditioning=True), "", "time_conditioning"),
    "another kind of SEDD": (lambda p: hub_sedd(p, graph={"type": "uniform"}), "", "graph.type uniform"),
    "heads that do not divide the width": (lambda p: hub(p, n_heads=5), "", "do not fit together"),
    "a file of JAX": (jax_folder, "", "JAX"),
    "an empty folder": (lambda p: p.mkdir(), "", "name the file"),
    "a shard that is not there": (
        lambda p: wrong_index(p, lambda m: m.update(dict.fromkeys(m, "none.safetensors"))), "", "none.safetensors",
    ),
    "a shard with other tensors": (lambda p: wrong_index(p, lambda m: m.pop(LAST)), "", "restore both"),
    "a shard elsewhere": (lambda p: wrong_index(p, lambda m: m.update({LAST: "../x.safetensors"})), "", "own folder"),
    "a damaged config": (lambda p: hub(p) or (p / "config.json").write_text("{"), "", "not valid JSON"),
    "something else": (lambda p: torch.save({"weight": torch.ones(2)}, p), "", "released layout"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_import_refuses(case, tmp_path, capsys):
    write, suffix, word = REFUSED[case]
    write(tmp_path / "source")
    assert run(f"{tmp_path / 'source'}{suffix}", tmp_path / "model") in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and word in error, error
    assert not (tmp_path / "model").exists()


def test_a_few_numbers_cannot_pose_as_many(tmp_path):
    """Views of one storage under many names would make a small file a large model."""
    one = torch.ones(64, 64)
    torch.save({f"blocks.{i}.weight": one for i in range(200)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="larger than the file"):
        read_published(tmp_path / "file.pt")


def test_weights_that_are_not_there_are_not_replaced_by_others(tmp_path, capsys):
    mdlm_folder(tmp_path / "hub", network(), None)
    checkpoint(tmp_path / "last.ckpt", ema={})
    for path in (tmp_path / "hub", tmp_path / "last.ckpt"):
        assert run(path, tmp_path / "model", "--weights", "ema") == 2
        assert "leave out --weights" in capsys.readouterr().err


def test_a_model_of_this_project_needs_no_import(tmp_path, capsys):
    mdlm_folder(tmp_path / "hub", network(), None)
    assert run(tmp_path / "hub", tmp_path / "model") == 0
    assert run(tmp_path / "model", tmp_path / "again") == 2
    assert "as it is" in capsys.readouterr().err


def test_a_network_of_another_method_is_refused(tmp_path, capsys):
    lightning("ar")(tmp_path / "ar.ckpt", causal(1), causal(2))
    assert run(tmp_path / "ar.ckpt", tmp_path / "model", "--method", "mdlm") == 1
    assert "another model or method" in capsys.readouterr().err


def test_a_model_too_large_for_the_memory_is_one_sentence(tmp_path, capsys, monkeypatch):
    def refuse(config):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("jpeg_dlm.folders.model_folder.build_method", refuse)
    mdlm_folder(tmp_path / "hub", network(), None)
    assert run(tmp_path / "hub", tmp_path / "model") == 1
    assert "cannot be built" in capsys.readouterr().err
