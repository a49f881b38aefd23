"""The fastest form is chosen by a measurement, which runtimes and products that are missing or crash do not harm."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import MICRO, assert_same_tokens, perturb

from jpeg_dlm import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import override
from jpeg_dlm.export import fastest
from jpeg_dlm.export.fastest import CLEARLY, MEASURED, PLAIN, TOOK, WORTH_TOKENS, Form, available_forms, ranked, shape_of
from jpeg_dlm.export.folder import EXPORT_FILE, weights_key, write_exported
from jpeg_dlm.folders.model_folder import ModelParts, bundled_folder, read_model, write_model
from jpeg_dlm.machine import cpu
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling.linear import Int8Linear

INT8 = Form("torch", "int8")
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)\n"
CONFIG = override(preset("smoke"), MICRO)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with an export to OpenVINO in the cache."""
    torch.manual_seed(0)
    method = perturb(build_method(CONFIG).eval())
    folder = write_model(ModelParts(method, CONFIG, tmp_path, None, None), tmp_path / "model")
    assert main(["export", str(folder), "--format", "openvino"]) == 0
    return folder


def forms_of(folder: Path, reduced: bool = False) -> list[Form]:
    return available_forms(read_model(folder), reduced)


def with_seconds(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[list[str]]:
    """Answers by runtime or type, here and in a child; the names that were asked for in each measurement."""
    asked, measure = [], fastest.measure

    def measuring(config, forms, child):
        asked.append([form.name for form in forms])
        return measure(config, forms, child)

    monkeypatch.setattr(fastest, "measure", measuring)
    monkeypatch.setattr(fastest, "run_child", lambda config, forms: [seconds[form.runtime] for form in forms])
    monkeypatch.setattr(fastest, "form_seconds", lambda config, dtype, _: seconds["torch" if dtype == "fp32" else dtype])
    return asked


def findings_file() -> Path:
    return cpu.cache_dir() / f"cpu-{cpu.fingerprint()}.json"


# ---------------------------------------------------------------- real children


def test_every_form_is_timed(model):
    forms = forms_of(model, reduced=True)
    assert [form.name for form in forms if form.dtype != "bf16"] == ["torch fp32", "torch int8", "openvino fp32"]
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    seconds = fastest.measure(CONFIG, forms, fastest.run_child)
    assert list(seconds) == [*(form.name for form in forms), TOOK] and all(0 < s < 60 for s in seconds.values())
    assert seconds[TOOK] > sum(seconds[form.name] for form in forms)
    assert torch.equal(torch.get_rng_state(), drawn)  # random weights of the measurement are nobody else's business
    assert all(0 < s < 10 for s in fastest.run_child(CONFIG, forms))  # a child times any of them


def test_forms_of_torch_need_no_other_interpreter(monkeypatch):
    monkeypatch.setattr(fastest, "run_child", lambda *asked: pytest.fail("started"))
    assert set(ranked(CONFIG, [PLAIN, INT8])) == {PLAIN, INT8}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_of_the_process_computes_whatever_threads_it_had(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.randn(512, 512) @ torch.randn(512, 512)  # starts the threads
        assert fastest.harmless() == (sys.platform == "linux") and torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_copy_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(fastest, "try_layers", lambda: time.sleep(60))
    monkeypatch.setattr(fastest, "COPY_SECONDS", 0.1)
    assert not fastest.harmless()


def test_a_runtime_that_kills_its_process_is_out_and_those_behind_it_are_still_timed(model, tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "openvino.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    forms = [*reversed(forms_of(model))]
    assert [form.runtime for form in forms] == ["openvino", "torch"]
    assert ranked(CONFIG, forms) == [PLAIN]
    stored = json.loads(findings_file().read_text())[MEASURED + shape_of(CONFIG)]
    assert stored["openvino fp32"] is None and stored["torch fp32"] > 0
    monkeypatch.setattr(fastest, "run_child", lambda *asked: pytest.fail("measured again"))
    assert load(model, "cpu", "exact").dtype == "fp32 engine"


def test_products_that_kill_the_process_are_not_taken(tmp_path, monkeypatch):
    """The instruction traps in a copy of the process and in a child: nothing but the signal tells so."""
    monkeypatch.setattr(Int8Linear, "integer_product", lambda *product: os.kill(os.getpid(), signal.SIGILL))
    assert not fastest.harmless()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def trap(frame, event, arg):\n"
        "    if frame.f_code.co_name == 'integer_product': os.kill(os.getpid(), signal.SIGILL)\n"
        "if any('fastest_trial' in word for word in sys.orig_argv): sys.setprofile(trap)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert fastest.run_child(CONFIG, [INT8]) == []
    assert ranked(CONFIG, [INT8, PLAIN]) == [PLAIN]


def test_a_runtime_that_is_not_installed_is_no_form(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert forms_of(model) == [PLAIN] and load(model, "cpu", "exact").dtype == "fp32 engine"


def test_a_runtime_that_fails_in_the_child_is_out(model, tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "openvino.py").write_text("raise ImportError('half installed')\n")
    monkeypatch.syspath_prepend(tmp_path / "fake")
    assert ranked(CONFIG, forms_of(model)) == [PLAIN]


def test_an_interpreter_that_does_not_start_leaves_torch(model, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert ranked(CONFIG, forms_of(model)) == [PLAIN]
    assert {form.runtime for form in ranked(override(CONFIG, {"model.depth": 2}), forms_of(model, reduced=True))} == {"torch"}


# ---------------------------------------------------------------- the choice


def test_the_fastest_form_with_the_same_tokens_is_taken(model, monkeypatch):
    with_seconds(monkeypatch, torch=1.0, openvino=0.5, int8=0.1, bf16=0.2)
    chosen, plain = load(model, "cpu", "exact"), load(model, "cpu")
    assert chosen.dtype == "openvino fp32" and chosen.form.folder.is_relative_to(cpu.cache_dir())
    assert_same_tokens(chosen.sample(3, steps=4), plain.sample(3, steps=4))
    assert load(model, "cpu", "auto").dtype.startswith("int8 engine")


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({"torch": 1.0, "openvino": 0.97, "int8": 0.9}, "torch fp32"),
        ({"torch": 1.0, "openvino": 0.8 / CLEARLY, "int8": 0.75}, "openvino fp32"),
        ({"torch": 1.0, "openvino": 2.0, "int8": 0.9 / WORTH_TOKENS}, "torch int8"),
    ],
)
def test_another_runtime_and_other_tokens_must_be_worth_it(seconds, wanted, monkeypatch, tmp_path):
    with_seconds(monkeypatch, **seconds)
    assert ranked(CONFIG, [PLAIN, INT8, Form("openvino", "fp32", tmp_path)])[0].name == wanted


def test_a_form_that_no_longer_opens_gives_way_to_the_next(model, monkeypatch):
    with_seconds(monkeypatch, torch=1.0, openvino=0.5)
    (cpu.cache_dir() / "exports").joinpath(*forms_of(model)[1].folder.parts[-2:], "denoise.bin").write_bytes(b"damaged")
    assert load(model, "cpu", "exact").dtype == "fp32 engine"


def test_an_export_of_other_weights_is_not_taken(model, tmp_path):
    parts = read_model(model)
    assert len(available_forms(parts, False)) == 2
    with torch.no_grad():
        parts.method.lm_head.bias[0] += 1
    assert available_forms(parts, False) == [PLAIN]
    changed = replace(parts.config, model=replace(parts.config.model, decode_residual=False))
    before = weights_key(parts.method)
    parts.method.config = changed
    assert weights_key(parts.method) != before


def test_an_export_in_the_folder_of_a_run_is_found(model, tmp_path):
    parts = replace(read_model(model), origin=tmp_path / "run")
    write_exported(parts, "onnx", tmp_path / "run" / "fast")
    assert [form.name for form in available_forms(parts, False)] == ["torch fp32", "onnxruntime fp32", "openvino fp32"]
    (tmp_path / "run" / "fast" / EXPORT_FILE).write_text("{")
    assert [form.name for form in available_forms(parts, False)] == ["torch fp32", "openvino fp32"]


def test_one_form_needs_no_measurement(monkeypatch):
    monkeypatch.setattr(fastest, "run_child", lambda *asked: pytest.fail("measured"))
    assert load(device="cpu", dtype="exact").dtype == "fp32 engine" and not findings_file().exists()
    assert available_forms(read_model(bundled_folder()), True, "cuda") == [PLAIN]


# ---------------------------------------------------------------- the cache


def test_a_choice_is_measured_once_per_machine_and_size(monkeypatch):
    asked = with_seconds(monkeypatch, torch=1.0, int8=0.5)
    assert [ranked(CONFIG, [PLAIN, INT8])[0] for _ in range(2)] == [INT8, INT8] and len(asked) == 1
    ranked(override(CONFIG, {"model.depth": 2}), [PLAIN, INT8])
    monkeypatch.setattr(cpu, "cpu_facts", lambda: ("another CPU", frozenset()))
    ranked(CONFIG, [PLAIN, INT8])
    assert len(asked) == 3


def test_a_new_form_is_measured_together_with_the_others(monkeypatch, tmp_path):
    asked = with_seconds(monkeypatch, torch=1.0, int8=0.5, openvino=0.1)
    ranked(CONFIG, [PLAIN, INT8])
    ranked(CONFIG, [PLAIN, Form("openvino", "fp32", tmp_path)])
    assert asked == [["torch fp32", "torch int8"], ["torch fp32", "openvino fp32"]]


@pytest.mark.parametrize("value", ["", "{", '{"NAME": 3}', '{"NAME": {"torch fp32": "fast", "torch int8": 1.0}}',
                                   '{"NAME": {"torch fp32": -1.0, "torch int8": 1.0}}', "\0" * 100_000])  # fmt: skip
def test_a_damaged_cache_is_measured_anew(value, monkeypatch):
    asked = with_seconds(monkeypatch, torch=1.0, int8=0.5)
    findings_file().parent.mkdir()
    findings_file().write_text(value.replace("NAME", MEASURED + shape_of(CONFIG)))
    assert ranked(CONFIG, [PLAIN, INT8]) == [INT8, PLAIN] and len(asked) == 1
    stored = json.loads(findings_file().read_text())[MEASURED + shape_of(CONFIG)]
    assert stored == {"torch fp32": 1.0, "torch int8": 0.5, TOOK: stored[TOOK]}


# ---------------------------------------------------------------- the command line


def test_generate_names_the_form_and_what_it_costs_in_tokens(model, monkeypatch, capsys):
    with_seconds(monkeypatch, torch=1.0, openvino=0.5, int8=0.1, bf16=0.2)
    words = ["generate", str(model), "-n", "2", "--device", "cpu", "--tokens"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "Sampling with openvino fp32" in said and "of the tokens" not in said
    assert main([*words, "--dtype", "auto"]) == 0
    said = capsys.readouterr().err
    assert "Sampling with torch int8" in said and "int8 against fp32: " in said and "of the tokens" in said


def test_the_doctor_shows_what_was_measured(monkeypatch, capsys):
    with_seconds(monkeypatch, torch=1.0, int8=0.5, bf16=2.0)
    ranked(CONFIG, [PLAIN, INT8])
    assert main(["doctor"]) == 0
    lines = [re.sub(r"in \d+\.\d s", "in 0.1 s", line) for line in capsys.readouterr().out.splitlines()]
    assert "Bundled model: generate takes torch fp32, generate --dtype auto takes torch int8" in lines
    assert f"  {shape_of(CONFIG)}: torch fp32 1.00x, torch int8 2.00x (measured in 0.1 s)" in lines


def test_only_other_runtimes_have_a_place_in_the_cache(model, capsys):
    assert main(["export", str(model)]) == 2 and "--out" in capsys.readouterr().err
    assert main(["export", str(model), "--format", "openvino"]) == 1 and "already exists" in capsys.readouterr().err
