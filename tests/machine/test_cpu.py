"""Reduced precision on a CPU that crashes on it, simulated by child processes that kill themselves; the choice of `auto`."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import micro_flags

import jpeg_dlm
from jpeg_dlm.cli.main import main
from jpeg_dlm.config_io import from_dict, override, to_dict
from jpeg_dlm.errors import UsageError
from jpeg_dlm.export import cpu_trial
from jpeg_dlm.machine import cpu
from jpeg_dlm.machine.console import Console
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset
from jpeg_dlm.sampling import speeds as fast
from jpeg_dlm.sampling.engine import accelerated
from jpeg_dlm.training.run import with_settled_precision

FAST_BF16, SLOW_BF16 = {"fp32": 100.0, "bf16": 190.0, "int8": 400.0}, {"fp32": 100.0, "bf16": 56.0, "int8": 90.0}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No test sees what this machine knows already; what a test imposes ends with it."""
    monkeypatch.setenv("JPEG_DLM_CACHE", str(tmp_path / "cache"))
    for name in (cpu.VARIABLE, cpu.OLD_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    cpu.make_safe.cache_clear()
    yield
    cpu.make_safe.cache_clear()


@pytest.fixture
def trapping(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A CPU that reports AMX and kills whatever is not limited to 512 bits without it; the trials it saw."""
    seen = []

    def child(runtime: cpu.Runtime, limit: str) -> int:
        seen.append((runtime, limit))
        kills = limit not in cpu.NARROWER[2:]
        code = f"import os, signal; {kills} and os.kill(os.getpid(), signal.SIGILL)"
        return subprocess.run([sys.executable, "-S", "-c", code], check=False).returncode

    monkeypatch.setattr(cpu, "reports_amx", lambda: True)
    monkeypatch.setattr(cpu, "run_child", child)
    monkeypatch.setattr(cpu, "effective_isa", lambda: "")
    return seen


# ---------------------------------------------------------------- what is safe


def test_the_widest_instructions_with_which_a_child_lives_are_kept(trapping, capsys):
    assert cpu.make_safe() == "AVX512_CORE_BF16" == os.environ["ONEDNN_MAX_CPU_ISA"]
    assert trapping == [("torch", limit) for limit in ("", "AVX512_CORE_AMX", "AVX512_CORE_FP16", "AVX512_CORE_BF16")]
    cpu.make_safe()
    told = capsys.readouterr()
    assert told.err.count("ONEDNN_MAX_CPU_ISA is set to AVX512_CORE_BF16") == 1 and told.out == ""


def test_the_next_process_knows(trapping, monkeypatch):
    cpu.make_safe()
    trapping.clear()
    cpu.make_safe.cache_clear()
    monkeypatch.delenv(cpu.VARIABLE)
    assert cpu.make_safe() == "AVX512_CORE_BF16" and not trapping
    monkeypatch.delenv(cpu.VARIABLE)
    cpu.recall_limit()
    assert os.environ[cpu.VARIABLE] == "AVX512_CORE_BF16"


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"limit of torch": "AVX9000"}', '{"limit of torch": 7}', "\0" * 100_000])
def test_a_damaged_cache_is_found_anew(trapping, damage):
    file = cpu.cache_dir() / f"cpu-{cpu.fingerprint()}.json"
    file.parent.mkdir()
    file.write_text(damage)
    cpu.recall_limit()
    assert not cpu.instruction_limit()
    assert cpu.make_safe() == "AVX512_CORE_BF16" and len(trapping) == 4
    os.environ.pop(cpu.VARIABLE)  # the findings are of a process without it
    assert json.loads(file.read_text())["limit of torch"] == "AVX512_CORE_BF16"


def test_a_cache_that_cannot_be_written_costs_only_time(trapping):
    cpu.cache_dir().write_text("a file where a folder should be")
    assert cpu.make_safe() == "AVX512_CORE_BF16"


def test_findings_are_of_one_machine(monkeypatch):
    before = cpu.fingerprint()
    monkeypatch.setattr(cpu.platform, "release", lambda: "another kernel")
    other_kernel = cpu.fingerprint()
    monkeypatch.setattr(cpu, "cpu_facts", lambda: ("another CPU", frozenset({"amx_tile"})))
    assert len({before, other_kernel, cpu.fingerprint()}) == 3


def test_a_limit_of_the_user_is_left_alone(trapping, monkeypatch):
    monkeypatch.setenv(cpu.VARIABLE, "AVX2")
    assert cpu.make_safe() == "AVX2" and not trapping


def test_it_is_free_without_amx_and_in_full_precision(trapping, monkeypatch):
    accelerated(jpeg_dlm.load(device="cpu").codec, "fp32")
    assert not trapping
    monkeypatch.setattr(cpu, "reports_amx", lambda: False)
    accelerated(jpeg_dlm.load(device="cpu").codec, "int8")
    assert not trapping and not cpu.cache_dir().exists()


def test_importing_and_loading_try_nothing():
    code = "import subprocess; subprocess.run = None; import jpeg_dlm.machine.cpu, jpeg_dlm; jpeg_dlm.load(device='cpu')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cpu_that_kills_everything_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(cpu, "reports_amx", lambda: True)
    monkeypatch.setattr(cpu, "run_child", lambda runtime, limit: -signal.SIGILL)
    with pytest.raises(UsageError, match="kill the process on this CPU: use fp32"):
        cpu.make_safe()
    with pytest.raises(UsageError, match="onnxruntime kills the process"):
        cpu.make_safe("onnxruntime")


def test_an_error_of_python_limits_nothing(monkeypatch):
    assert cpu.widest("openvino", lambda runtime, limit: 1) == ""


def test_a_limit_that_comes_too_late_is_told(trapping, monkeypatch):
    monkeypatch.setattr(cpu, "effective_isa", lambda: "Intel AVX-512 and Intel AMX")
    with pytest.raises(UsageError, match="start the program again"):
        cpu.make_safe()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's names for x86 instructions")
@pytest.mark.parametrize("late", [False, True])
def test_torch_takes_a_limit_before_its_first_use_only(late):
    code = (
        "import os, torch; from jpeg_dlm.machine.cpu import effective_isa\n"
        f"if {late}: torch.ops.mkldnn._is_mkldnn_bf16_supported()\n"
        "os.environ['ONEDNN_MAX_CPU_ISA'] = 'SSE41'; print(effective_isa())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ("SSE4.1" in done.stdout) is not late and len(done.stdout.splitlines()) == 1


def test_a_whole_process_on_a_trapping_cpu(tmp_path):
    """The real child, in which every product without a limit is replaced by what the CPU would do."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'jpeg_dlm.export.cpu_trial' in sys.orig_argv and 'ONEDNN_MAX_CPU_ISA' not in os.environ:\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
    )
    code = (
        "from jpeg_dlm import load\nfrom jpeg_dlm.machine import cpu\n"
        "cpu.reports_amx, cpu.NARROWER = lambda: True, ('AVX2',)\ncpu.LADDERS['torch'] = ('AVX2',)\n"
        "model = load(device='cpu', dtype='int8')\nprint(model.dtype, model.sample(1, steps=1).shape[0])"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.stdout == "int8 engine (ONEDNN_MAX_CPU_ISA=AVX2) 1\n"
    assert "kills programs that use it (torch): ONEDNN_MAX_CPU_ISA is set to AVX2." in done.stderr


def test_flags_are_read_as_linux_writes_them(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A CPU: 3\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert cpu.cpu_facts(path) == ("A CPU: 3", {"fpu", "amx_tile"})
    assert cpu.cpu_facts(tmp_path / "none")[1] == frozenset()


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_network_that_other_runtimes_are_tried_with(runtime, monkeypatch):
    pytest.importorskip(runtime)
    from jpeg_dlm.export import interface

    seen = []
    run = interface.Opened.__init__

    def spy(self, act, shapes):
        run(self, lambda arrays: seen.append(act(arrays)) or seen[-1], shapes)

    monkeypatch.setattr(interface.Opened, "__init__", spy)
    cpu_trial.try_file(runtime)
    np.testing.assert_allclose(seen[0], np.full((64, 64), 64.0 * 64.0 * 128))  # rows of h are 128 / 2, summed over 128


def test_torch_survives_its_own_trial():
    cpu_trial.try_torch()


# ---------------------------------------------------------------- what is fast


def test_speeds_are_measured_once(monkeypatch):
    found, threads = fast.speeds(), torch.get_num_threads()
    assert found.keys() == {"fp32", "bf16", "int8"} and min(found.values()) > 0 and torch.get_num_threads() == threads
    monkeypatch.setattr(fast, "measure_speeds", lambda: pytest.fail("measured again"))
    assert fast.speeds() == found


@pytest.mark.parametrize(
    ("asked", "device", "speeds", "wanted"),
    [
        ("auto", "cuda", None, "bf16"), ("auto", "mps", None, "fp32"), ("auto", "cpu", FAST_BF16, "bf16"),
        ("auto", "cpu", SLOW_BF16, "fp32"), ("bf16", "cpu", SLOW_BF16, "bf16"), ("fp32", "cuda", None, "fp32"),
    ],
)  # fmt: skip
def test_auto_takes_the_papers_type_on_cuda_and_the_faster_on_a_cpu(asked, device, speeds, wanted, monkeypatch):
    monkeypatch.setattr(fast, "speeds", lambda: speeds)
    assert fast.training_precision(asked, device) == wanted


def settled(config, run: Path, speeds, monkeypatch):
    monkeypatch.setattr(fast, "speeds", lambda: speeds)
    return with_settled_precision(config, run, Ranks(), Console()).train.precision


def test_a_run_keeps_the_type_it_began_with(tmp_path, monkeypatch):
    auto = preset("lm1b")
    assert auto.train.precision == "auto"
    assert settled(auto, tmp_path, FAST_BF16, monkeypatch) == "bf16"
    (tmp_path / "config.json").write_text(json.dumps(to_dict(override(auto, {"train.precision": "bf16"}))))
    assert settled(auto, tmp_path, SLOW_BF16, monkeypatch) == "bf16"  # another machine


def test_a_slower_type_is_taken_with_one_line_on_its_cost(tmp_path, monkeypatch, capsys):
    config = override(preset("lm1b"), {"train.precision": "bf16"})
    assert settled(config, tmp_path, FAST_BF16, monkeypatch) == "bf16" and not capsys.readouterr().err
    assert settled(config, tmp_path, SLOW_BF16, monkeypatch) == "bf16"
    assert capsys.readouterr().err.startswith("bf16 products run at 0.56x the speed of fp32 on this CPU (measured).")


def test_a_run_records_the_type_that_auto_chose(corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "speeds", lambda: SLOW_BF16)
    flags = micro_flags(train__precision="auto", train__steps=1, train__encoder_steps=1, train__eval_every=0)
    run = tmp_path / "run"
    command = ["train", "--preset", "smoke", "--data", str(corpus_file), "--out", str(run), "--quiet", "--device", "cpu"]
    assert main([*command, *flags]) == 0
    configs = [run / "config.json", *run.glob("**/checkpoints/*/state.json")]
    said = [json.loads(path.read_text()) for path in configs]
    assert len(said) == 3 and {values.get("config", values)["train"]["precision"] for values in said} == {"fp32"}
    assert from_dict(said[0]).train.precision == "fp32"


# ---------------------------------------------------------------- sampling


def test_exact_writes_the_tokens_of_full_precision():
    exact, plain = jpeg_dlm.load(device="cpu", dtype="exact"), jpeg_dlm.load(device="cpu")
    assert exact.dtype == "fp32 engine" and plain.dtype == "float32"
    assert torch.equal(exact.sample(4, steps=8), plain.sample(4, steps=8))


@pytest.mark.parametrize("dtype", ["exact", "auto"])
def test_a_choice_leaves_other_systems_as_they_are(tmp_path, dtype):
    from jpeg_dlm.folders.model_folder import ModelParts, write_model
    from jpeg_dlm.methods.registry import build_method

    sizes = {"data.vocab_size": 40, "data.token_len": 8, "model.hidden": 16, "model.heads": 2, "model.depth": 1}
    config = override(for_method(preset("smoke"), "mdlm"), sizes)
    folder = write_model(ModelParts(build_method(config), config, tmp_path, None, None), tmp_path / "model")
    assert jpeg_dlm.load(folder, "cpu", dtype).dtype == "float32"


@pytest.mark.parametrize(("speeds", "told"), [(SLOW_BF16, True), (FAST_BF16, False)])
def test_generating_in_a_slower_type_tells_its_cost(speeds, told, monkeypatch, capsys):
    monkeypatch.setattr(fast, "speeds", lambda: speeds)
    assert main(["generate", "-n", "1", "--steps", "1", "--device", "cpu", "--dtype", "int8"]) == 0
    assert ("int8 products run at 0.90x the speed of fp32" in capsys.readouterr().err) is told


def test_generating_in_a_type_that_the_cpu_lacks_tells_so(monkeypatch, capsys):
    monkeypatch.setattr("jpeg_dlm.sampling.linear.computes_in_bf16", lambda device: False)
    assert main(["generate", "-n", "1", "--steps", "1", "--device", "cpu", "--dtype", "bf16"]) == 0
    assert "weights are rounded to bf16 and multiplied in fp32" in capsys.readouterr().err


def test_the_doctor_names_the_limit(trapping, monkeypatch, capsys):
    monkeypatch.setattr(fast, "speeds", lambda: cpu.make_safe() and SLOW_BF16)
    assert main(["doctor"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CPU: "))
    assert "bf16 0.56x, int8 0.90x" in line and "auto is fp32; instructions limited to AVX512_CORE_BF16" in line
