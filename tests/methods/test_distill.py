"""Distillation: targets against closed forms, a fresh student against its teacher, and a student's life in files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from micro import micro_model

from jpeg_dlm.api import load
from jpeg_dlm.cli.main import main
from jpeg_dlm.config import validate
from jpeg_dlm.flow.path import make_grid
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.distill import NESTED, Distill, jump_target
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method, for_method
from jpeg_dlm.options import override
from jpeg_dlm.presets import preset
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.files import load_tensors, sha256_file
from jpeg_dlm.util.rng import RowNoise

B, L, VOCAB = 6, 12, 300


def teacher_method(**options: object) -> JpegDlm:
    method = micro_model(**options)
    method.compressor.load_state_dict(method.target.state_dict())
    return method


def student_of(teacher: JpegDlm, **options: object) -> Distill:
    config = override(Distill.adapt(teacher.config, "distill"), {"train.init": "teacher"})
    config = validate(override(config, {name.replace("__", "."): value for name, value in options.items()}))
    student = build_method(config, teacher.encoder)
    assert isinstance(student, Distill)
    student.start_from(teacher, [])
    return student


def batch() -> Batch:
    return Batch(torch.randint(0, VOCAB, (B, L), generator=torch.Generator().manual_seed(3)))


def noise(step: int = 0) -> RowNoise:
    return RowNoise(0, range(B), step)


# ---------------------------------------------------------------- the target


def euler(predict, z: torch.Tensor, times: list[float]) -> torch.Tensor:
    """Solve dz/dt = (x(z, t) - z) / (1 - t)."""
    for t, u in pairwise(times):
        z = z + (u - t) * (predict(z, t) - z) / (1 - t)
    return z


def test_one_euler_step_to_the_target_arrives_where_the_teacher_did():
    """For the linear field x(z, t) = a z + c: the step with the target's prediction ends in the state of many steps."""
    z_s, (t_s, t_t) = torch.tensor([[0.3, -1.2, 2.0]], dtype=torch.float64), (0.25, 0.75)
    sub_times = [t_s, 0.3, 0.45, 0.5, 0.7, t_t]
    z_t = euler(lambda z, t: 0.4 * z + 0.1, z_s, sub_times)
    target = jump_target(z_s, z_t, torch.tensor([t_s], dtype=torch.float64), torch.tensor([t_t], dtype=torch.float64))
    assert torch.allclose(euler(lambda z, t: target, z_s, [t_s, t_t]), z_t, atol=1e-12)


def test_the_teacher_steps_like_the_sampler_row_by_row():
    student = student_of(teacher_method(), sampler__steps=4, objective__sub_steps=3)
    times, first = student.sub_times(noise())
    m = student.config.model
    z, w = noise().normal("z", m.latent_len, m.latent_dim), torch.full((B,), 3.0)
    s = noise().normal("s", m.latent_len, m.latent_dim)
    found = student.by_teacher(z, s, w, times, first)
    assert len(first.unique()) > 1
    for row, place in enumerate(first.tolist()):
        past = s[row : row + 1]

        def predict(z: torch.Tensor, t: float) -> torch.Tensor:
            nonlocal past
            past = student.teacher(z, torch.tensor([t]), past, w[:1])
            return past

        expected = euler(predict, z[row : row + 1], times[place : place + 4].tolist())
        assert torch.allclose(found[row : row + 1], expected, atol=1e-5)


@pytest.mark.parametrize("kind", NESTED)
def test_the_students_times_are_among_the_teachers(kind):
    g = torch.Generator()
    fine, coarse = make_grid(kind, 24, -1.5, 0.8, g), make_grid(kind, 8, -1.5, 0.8, g)
    assert torch.allclose(fine[::3], coarse, atol=1e-6)


# ---------------------------------------------------------------- a fresh student


@pytest.mark.parametrize("shared", [True, False])
def test_a_fresh_student_writes_what_its_teacher_writes(shared):
    teacher = teacher_method(model__shared=shared)
    student = student_of(teacher).eval()
    logits = sampled_logits(teacher)
    assert sampled_logits(student).equal(logits)
    assert sampled_logits(student_of(student).eval()).equal(logits)
    sampler = replace(teacher.config.sampler, steps=5)
    assert student.sample(sampler, noise()).equal(teacher.sample(sampler, noise()))
    assert student.encode(batch()).equal(teacher.encode(batch()))


@torch.no_grad()
def sampled_logits(method: JpegDlm) -> torch.Tensor:
    w, z = torch.full((B,), 3.0), noise().normal("sample", *method.latent_shape)
    z = euler(lambda z, t: method.denoise(z, t, None, 3.0), z, [0.0, 0.3, 0.6, 1.0])
    return method.project(method.decompressor(method.unstandardize(method.decode_latents(z, w))))


def test_nothing_is_to_be_learned_where_the_teacher_takes_one_step():
    student = student_of(teacher_method(), objective__sub_steps=1)
    assert float(student.losses(batch(), noise())["jump"].detach()) < 1e-10
    assert float(student_of(teacher_method(), objective__sub_steps=4).losses(batch(), noise())["jump"].detach()) > 1e-6


def test_training_lowers_the_loss_and_moves_the_denoising_network_alone():
    teacher = teacher_method()
    kept = {name: t.clone() for name, t in teacher.state_dict().items()}
    student = student_of(teacher, sampler__steps=1, objective__sub_steps=8).train()
    before = {name: t.clone() for name, t in student.state_dict().items()}
    [group] = student.parameter_groups()
    optimizer = torch.optim.Adam(group.parameters.values(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = student.total_loss(student(batch(), noise()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        student.after_step(0, 60)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    changed = {name for name, t in student.state_dict().items() if not t.equal(before[name])}
    assert changed and all(name.startswith("dit.") for name in changed)
    assert all(t.equal(kept[name]) for name, t in teacher.state_dict().items())


def test_refusals_say_what_to_do():
    config = override(Distill.adapt(teacher_method().config, "distill"), {"train.init": "teacher"})
    for options, sentence in (
        ({"train.init": ""}, "--teacher"),
        ({"sampler.grid": "random"}, "uniform or quantile"),
        ({"sampler.solver": "sde"}, "euler"),
        ({"model.shared": True}, "--model.shared false"),
    ):
        with pytest.raises(UsageError, match=sentence):
            validate(override(config, options))
    ar = for_method(preset("smoke"), "ar")
    with pytest.raises(UsageError):
        Distill.adapt(ar, "distill")
    with pytest.raises(UsageError):
        build_method(config).start_from(build_method(override(ar, {"data.vocab_size": VOCAB})), [])


# ---------------------------------------------------------------- by command


@pytest.fixture
def teacher_run(micro_folders, tmp_path: Path) -> Path:
    return shutil.copytree(micro_folders.run(), tmp_path / "teacher")


def words(teacher: Path, out: Path, *extra: str) -> list[str]:
    sizes = ["--train.steps", "6", "--train.save-every", "2", "--sampler.steps", "2", "--objective.sub-steps", "2"]
    where = ["--teacher", str(teacher), "--out", str(out), "--quiet", "--device", "cpu", "--threads", "1"]
    return ["train", "--method", "distill", *where, *sizes, *extra]


def tensors(run: Path, step: int = 6) -> dict[str, str]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {name: sha256_file(folder / f"{name}.safetensors") for name in ("model", "ema", "optimizer")}


def test_a_student_trains_resumes_exactly_is_exported_and_writes(teacher_run, corpus_file, tmp_path, monkeypatch):
    untouched = tensors(teacher_run, 12)
    data = ["--data", str(corpus_file)]
    assert main(words(teacher_run, tmp_path / "straight", *data)) == 0
    assert tensors(teacher_run, 12) == untouched

    from jpeg_dlm.training.trainer import Trainer

    save = Trainer.save

    def save_and_fail(trainer: Trainer, log=None) -> None:
        save(trainer, log)
        if trainer.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", save_and_fail)
        assert main(words(teacher_run, tmp_path / "cut", *data)) == 130
    hidden = teacher_run.rename(teacher_run.with_name("away"))  # a student that was begun needs its teacher no more
    try:
        (hidden / "encoder").rename(tmp_path / "encoder")
        resumed = ["train", "--resume", "--out", str(tmp_path / "cut"), "--quiet", "--device", "cpu", "--threads", "1"]
        assert main([*resumed, "--encoder.name", str(tmp_path / "encoder")]) == 0
        (tmp_path / "encoder").rename(hidden / "encoder")
    finally:
        hidden.rename(teacher_run)
    assert tensors(tmp_path / "cut") == tensors(tmp_path / "straight")

    assert main(["export", str(tmp_path / "straight"), "--out", str(tmp_path / "model")]) == 0
    assert not any(name.startswith("teacher.") for name in load_tensors(tmp_path / "model" / "model.safetensors"))
    assert str(teacher_run.parent) not in (tmp_path / "model" / "config.json").read_text()
    run, model, teacher = (load(path, "cpu") for path in (tmp_path / "straight", tmp_path / "model", teacher_run))
    assert run.config.sampler.evaluations(L) == 3
    assert run.generate(4) == model.generate(4) and run.tokenizer.fingerprint == teacher.tokenizer.fingerprint
    assert model.encode(["The farmer"]).equal(teacher.encode(["The farmer"]))
