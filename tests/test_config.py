"""The options: strict parsing, exact round trips, the paper's numbers, and refusals that say what is wrong."""

import dataclasses
import json
import subprocess
import sys
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.config import Config, TrainConfig, validate
from jpeg_dlm.config_io import changed, flatten, from_dict, option_names, override, read_json_file, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.registry import default_config, for_method, groups_of
from jpeg_dlm.presets import PRESETS, preset

# ---------------------------------------------------------------- strictness


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"model": {"latent_length": 8}}, "latent_len"),
        ({"train": {"learning_rate": 1e-3, "batches": 4}}, None),
        ({"sampler": {"step": 8}}, "steps"),
        ({"modell": {}}, "model"),
        ({"objective": {"sigmma": 1}}, "sigma"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(values, nearest):
    with pytest.raises(UsageError, match="Unknown option") as error:
        from_dict(values)
    if nearest:
        assert f"did you mean '{nearest}'?" in str(error.value)


def test_override_suggests_the_full_dotted_name():
    with pytest.raises(UsageError, match="did you mean 'model.latent_len'"):
        override(default_config(), {"model.latent-lenn": 8})
    with pytest.raises(UsageError, match="Unknown option 'model'"):
        override(default_config(), {"model": {}})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model.latent_len", "eight"),
        ("model.latent_len", 8.5),
        ("model.latent_len", True),
        ("model.latent_len", None),
        ("model.latent_len", [8]),
        ("model.latent_len", float("nan")),
        ("model.latent_len", float("inf")),
        ("model.latent_len", "9" * 5000),
        ("train.lr", "fast"),
        ("train.lr", False),
        ("train.lr", "nan"),
        ("train.lr", "inf"),
        ("train.lr", 10**400),
        ("train.lr", {}),
        ("model.shared", 1),
        ("model.shared", "maybe"),
        ("model.shared", None),
        ("data.source", 3),
        ("data.packing", "tight"),
        ("data.packing", ["continuous"]),
        ("sampler.solver", None),
    ],
)
def test_wrong_types_are_refused_by_name(option, value):
    with pytest.raises(UsageError, match=option):
        override(default_config(), {option: value})


def test_a_value_in_place_of_a_group_is_refused():
    with pytest.raises(UsageError, match="'model' must be a group of options"):
        from_dict({"model": 3})


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("model.latent_len", "16", 16),
        ("model.latent-len", "1e3", 1000),
        ("train.seed", str(2**62 + 1), 2**62 + 1),  # not rounded through a float
        ("train.lr", "3e-4", 3e-4),
        ("train.lr", 1, 1.0),
        ("model.shared", "No", False),
        ("train.compile", "true", True),
        ("sampler.solver", "heun", "heun"),
    ],
)
def test_command_line_strings_become_typed_values(option, text, value):
    changed = flatten(to_dict(override(default_config(), {option: text})))[option.replace("-", "_")]
    assert changed == value and type(changed) is type(value)


def test_override_changes_one_option_and_not_its_argument():
    base = preset("smoke")
    changed = override(base, {"model.latent_len": 2})
    assert base == preset("smoke")
    differing = {k for k, v in flatten(to_dict(changed)).items() if flatten(to_dict(base))[k] != v}
    assert differing == {"model.latent_len"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.model.latent_len = 3


# ---------------------------------------------------------------- JSON


def values_of(hint):
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0])).map(tuple)
    return {
        bool: st.booleans(),
        int: st.integers(-(2**70), 2**70),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
    }[hint]


def configs(cls=Config):
    hints = typing.get_type_hints(cls)
    hints |= groups_of("jpeg-dlm") if cls is Config else {}
    fields = {
        f.name: configs(hints[f.name]) if dataclasses.is_dataclass(hints[f.name]) else values_of(hints[f.name])
        for f in dataclasses.fields(cls)
    }
    if cls is Config:
        fields["method"] = st.just("jpeg-dlm")  # any other has groups of its own
    return st.builds(cls, **fields)


@settings(max_examples=40, deadline=None)
@given(config=configs())
def test_every_config_survives_json_and_dotted_names(config):
    again = json.loads(json.dumps(to_dict(config)))
    assert from_dict(again) == config
    assert override(default_config(), flatten(again)) == config


def test_every_option_has_a_help_text_and_missing_options_keep_their_defaults():
    names = option_names()
    assert all(f.metadata["help"] for f in names.values())
    assert set(names) == set(flatten(to_dict(default_config())))
    assert from_dict({}) == default_config()


@pytest.mark.parametrize(("text", "says"), [("{", "not valid JSON"), ("[1]", "JSON object"), ("[" * 100_000, "not valid JSON")])
def test_json_files_that_cannot_be_used_are_explained(tmp_path, text, says):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_json_file(path)


def test_a_missing_json_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere.json"):
        read_json_file(tmp_path / "nowhere.json")


# ---------------------------------------------------------------- the paper's numbers

# Table "Model and training configurations of JPEG-DLM on LM1B and OWT-1024" and the appendix on OWT-128, in full.
SAME_IN_ALL = {
    "encoder.name": "t5-small",
    "encoder.feature_dim": 512,
    "encoder.layer": -1,
    "data.vocab_size": 32100,  # released code
    "model.latent_dim": 512,
    "model.bottleneck_dim": 128,
    "model.codec_layers": 6,
    "model.codec_heads": 8,
    "model.codec_mlp_ratio": 4.0,
    "model.proj_dim": 512,
    "model.depth": 12,
    "model.hidden": 768,
    "model.heads": 12,
    "model.mlp_ratio": 4.0,
    "model.dropout": 0.0,
    "model.freq_dim": 256,
    "model.time_tokens": 4,
    "model.sc_tokens": 4,
    "model.mode_tokens": 4,
    "model.shared": True,
    "model.decode_residual": False,  # these six are not in the paper
    "model.denoise_skip": False,
    "objective.flow_draws": 1,
    "objective.time_uniform": 0.0,
    "objective.flow_weighting": "none",
    "objective.sigreg_late": 0.0,
    "model.position_scale": 0.0,  # D**-0.5, as released
    "train.accumulation": 2,
    "train.devices": 8,
    "train.seed": 42,
    "train.precision": "auto",  # bf16 on CUDA
    "train.beta1": 0.9,
    "train.beta2": 0.999,
    "train.clip": 1.0,
    "train.weight_decay": 0.01,
    "train.lr": 1e-3,
    "train.ema": 0.999,
    "objective.jep_weight": 1.0,
    "objective.flow_weight": 1.0,
    "objective.feat_weight": 1.0,
    "objective.ce_weight": 1.0,
    "objective.sigreg_weight": 0.1,
    "objective.var_weight": 0.2,
    "objective.cov_weight": 0.002,
    "objective.standardize_momentum": 0.99,
    "objective.target_ema_end": 0.999,
    "objective.time_mean": -1.5,
    "objective.time_std": 0.8,
    "objective.sc_prob": 0.5,
    "objective.flow_loss": "x",
    "objective.ce_time_min": 1.0,
    "sampler.solver": "euler",
    "sampler.grid_mean": -1.5,
    "sampler.grid_std": 0.8,
}
DIFFERENT = {  # option: LM1B, OWT-1024, OWT-128 (which takes OWT-1024's architecture and schedule)
    "data.token_len": (128, 1024, 128),
    "model.latent_len": (32, 512, 64),
    "train.epochs": (20.0, 5.0, 5.0),
    "train.batch": (384, 24, 24),
    "train.codec_lr": (3e-4, 2e-4, 2e-4),
    "objective.sigma": (0.8, 0.8, 1.0),
    "objective.target_ema_start": (0.995, 0.996, 0.996),
    "sampler.steps": (32, 32, 64),
    "sampler.w": (3.0, 2.0, 3.0),
    "sampler.grid": ("random", "quantile", "quantile"),  # released code
}


@pytest.mark.parametrize(("name", "column"), [("lm1b", 0), ("owt1024", 1), ("owt128", 2)])
def test_presets_carry_the_papers_numbers(name, column):
    config = preset(name)
    flat = flatten(to_dict(config))
    expected = SAME_IN_ALL | {option: row[column] for option, row in DIFFERENT.items()}
    assert {option: flat[option] for option in expected} == expected
    assert config.rate == (0.25, 0.5, 0.5)[column]
    assert config.train.batch * config.train.accumulation * config.train.devices == (6144, 384, 384)[column]
    assert config.preset == name


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_says_what_to_expect(name):
    config = preset(name)
    assert validate(config) is config
    assert config.preset == name and PRESETS[name].__doc__


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(UsageError, match="lm1b, owt1024, owt128, captions, stories, tiny, smoke"):
        preset("lm2b")


# ---------------------------------------------------------------- impossible combinations


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model.latent_len": 17}, "17 exceeds data.token_len 16"),
        ({"model.latent_len": 0}, "at least 1"),
        ({"model.latent_dim": 66}, "66 is not divisible by model.codec_heads 4"),
        ({"model.latent_dim": 0}, "at least 1"),
        ({"model.codec_heads": 0}, "codec_heads 0"),
        ({"model.hidden": 97}, "97 is not divisible by model.heads 4"),
        ({"model.hidden": 12}, "even for rotary"),
        ({"model.hidden": 0}, "at least 1"),
        ({"model.heads": 0}, "heads 0"),
        ({"model.freq_dim": 31}, "freq_dim must be even"),
        ({"model.depth": 0}, "at least 1"),
        ({"model.mlp_ratio": 0}, "mlp_ratio"),
        ({"model.dropout": 1.0}, "dropout"),
        ({"model.mode_tokens": 0}, "prefix token"),
        ({"encoder.feature_dim": 66}, "66 must be a multiple"),
        ({"encoder.feature_dim": 0}, "feature_dim"),
        ({"encoder.scale": "fixed", "encoder.std": 0}, "encoder.std"),
        ({"data.vocab_size": 4}, "vocab_size"),
        ({"data.holdout": 0.5}, "holdout"),
        ({"data.frame": True, "data.token_len": 3, "model.latent_len": 1}, "token_len of at least 4"),
        ({"train.batch": 0}, "train.batch"),
        ({"train.devices": 0}, "train.devices"),
        ({"train.steps": 0, "train.epochs": 0}, "train.steps or train.epochs"),
        ({"train.lr": 0}, "(?i)learning rates"),
        ({"train.clip": 0}, "clip"),
        ({"train.ema": 1.0}, "train.ema"),
        ({"train.keep": 0}, "keep"),
        ({"objective.sigma": -1}, "sigma"),
        ({"objective.sc_prob": 1.5}, "sc_prob"),
        ({"objective.w_min": 6}, "w_min"),
        ({"objective.w_min": 0}, "w_min"),
        ({"objective.sigreg_knots": 2}, "knots"),
        ({"sampler.steps": 0}, "sampler.steps"),
        ({"sampler.w": 0}, "sampler.w"),
    ],
)
def test_impossible_combinations_are_refused_in_one_sentence(options, says):
    with pytest.raises(UsageError, match=says) as error:
        validate(override(preset("smoke"), options))
    sentence = str(error.value)
    assert sentence.endswith(".") and "\n" not in sentence
    first = sentence.split()[0]
    assert sentence[0].isupper() or first.rstrip(",") in option_names()  # names stay as they are typed


def test_the_options_do_not_load_torch():
    code = "import sys, jpeg_dlm.config, jpeg_dlm.presets; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_tells_configs_apart_is_what_was_changed():
    base = for_method(preset("smoke"), "mdlm")
    again = override(base, {"train.seed": str(TrainConfig.seed + 1)})
    assert changed(again) == changed(base) | {"train.seed": TrainConfig.seed + 1}
    assert changed(default_config()) == {"method": "jpeg-dlm"}
    elf = for_method(preset("smoke"), "elf")
    assert changed(dataclasses.replace(elf, method="encoder"))["method"] == "encoder"  # a stage keeps the groups of its method
