"""The options: strict parsing, exact round trips, the paper's numbers, and refusals that say what is wrong."""

import dataclasses
import itertools
import json
import math
import typing
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpeg_dlm.config import BOUNDS, Config, TrainConfig, validate
from jpeg_dlm.methods.registry import METHODS, default_config, for_method, groups_of
from jpeg_dlm.options import changed, flatten, from_dict, option_names, override, to_dict
from jpeg_dlm.presets import PRESETS, preset
from jpeg_dlm.util.errors import UsageError

# ---------------------------------------------------------------- strictness


WRONG = {
    "model.latent_len": ("eight", 8.5, True, None, [8], float("nan"), float("inf"), "9" * 5000),
    "train.lr": ("fast", False, "nan", "inf", 10**400, {}),
    "model.shared": (1, "maybe", None),
    "data.source": (3,),
    "data.packing": ("tight", ["continuous"]),
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in WRONG.items() for value in values])
def test_wrong_types_are_refused_by_name(option, value):
    with pytest.raises(UsageError, match=option):
        override(default_config(), {option: value})


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
        ("sampler.solver", "sde", "sde"),
    ],
)
def test_command_line_strings_become_typed_values(option, text, value):
    changed = flatten(to_dict(override(default_config(), {option: text})))[option.replace("-", "_")]
    assert changed == value and type(changed) is type(value)


# ---------------------------------------------------------------- JSON


def values_of(hint):
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
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


# ---------------------------------------------------------------- the paper's numbers

# Table "Model and training configurations of JPEG-DLM on LM1B and OWT-1024" and the appendix on OWT-128, in full. The
# vocabulary and the scale of positions are of the released code; the last line is of options that the paper does not have.
SAME_IN_ALL = """
encoder.name=t5-small encoder.feature_dim=512 encoder.layer=-1 data.vocab_size=32100
model.latent_dim=512 model.bottleneck_dim=128 model.codec_layers=6 model.codec_heads=8
model.proj_dim=512 model.depth=12 model.hidden=768 model.heads=12 model.freq_dim=256
model.position_scale=0 model.time_tokens=4 model.sc_tokens=4 model.mode_tokens=4 model.shared=true
train.accumulation=2 train.devices=8 train.seed=42 train.precision=auto train.beta2=0.999 train.clip=1
train.weight_decay=0.01 train.lr=1e-3 train.ema=0.999
objective.jep_weight=1 objective.feat_weight=1 objective.sigreg_weight=0.1
objective.var_weight=0.2 objective.cov_weight=0.002 objective.target_ema_end=0.999
objective.time_mean=-1.5 objective.time_std=0.8 objective.ce_time_min=1
sampler.solver=euler sampler.grid_mean=-1.5 sampler.grid_std=0.8
model.decode_residual=false model.denoise_skip=false objective.flow_draws=1 objective.time_uniform=0 objective.sigreg_late=0
"""
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
    values = dict(pair.split("=") for pair in SAME_IN_ALL.split()) | {option: row[column] for option, row in DIFFERENT.items()}
    assert override(config, values) == config
    assert config.rate == (0.25, 0.5, 0.5)[column]
    assert config.train.batch * config.train.accumulation * config.train.devices == (6144, 384, 384)[column]
    assert config.preset == name


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    assert validate(preset(name)).preset == name


# ---------------------------------------------------------------- impossible combinations


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"model.latent_len": 17}, "data.token_len"),
        ({"model.latent_dim": 66}, "model.codec_heads"),
        ({"model.hidden": 97}, "model.heads"),
        ({"model.hidden": 12}, "model.heads"),
        ({"model.freq_dim": 31}, "model.freq_dim"),
        ({"encoder.feature_dim": 66}, "encoder.heads"),
        ({"data.frame": True, "data.token_len": 3, "model.latent_len": 1}, "data.frame"),
        ({"data.whole": True, "data.packing": "continuous"}, "data.packing"),
        ({"train.steps": 0, "train.epochs": 0}, "train.epochs"),
    ],
)
def test_impossible_combinations_are_refused_in_one_sentence(options, names):
    with pytest.raises(UsageError, match=names) as error:
        validate(override(preset("smoke"), options))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


# ---------------------------------------------------------------- bounds


ODD = (-1, 0, -0.5, 1e300, -1e300, float("nan"), float("inf"), 2**63, 10**9)


def numbers(config):
    """The numeric options of a config by dotted name, with their bounds."""
    for group in dataclasses.fields(config):
        options = getattr(config, group.name)
        hints = typing.get_type_hints(type(options)) if dataclasses.is_dataclass(options) else {}
        for f in dataclasses.fields(options) if hints else ():
            if hints[f.name] in (int, float):
                yield f"{group.name}.{f.name}", f.metadata["bounds"]


@pytest.mark.parametrize("method", METHODS)
def test_every_number_of_every_method_has_bounds(method):
    bounds = {name: set(limits) for name, limits in numbers(default_config(method))}
    assert [name for name, kinds in bounds.items() if not (kinds & {"ge", "gt"} and kinds & {"le", "lt"})] == []


@pytest.mark.parametrize("method", METHODS)
def test_odd_numbers_are_refused_or_within_bounds(method):
    base = default_config(method)
    for (name, limits), odd in itertools.product(numbers(base), ODD):
        try:
            config = validate(override(base, {name: odd}))
        except UsageError:
            continue
        value = attrgetter(name)(config)
        assert math.isfinite(value) and all(BOUNDS[kind][0](value, limit) for kind, limit in limits.items()), (name, odd)


def test_what_tells_configs_apart_is_what_was_changed():
    base = for_method(preset("smoke"), "mdlm")
    again = override(base, {"train.seed": str(TrainConfig.seed + 1)})
    assert changed(again) == changed(base) | {"train.seed": TrainConfig.seed + 1}
    assert changed(default_config()) == {"method": "jpeg-dlm"}
    elf = for_method(preset("smoke"), "elf")
    assert changed(dataclasses.replace(elf, method="encoder"))["method"] == "encoder"  # a stage keeps the groups of its method
