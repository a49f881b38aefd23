"""A method sharded over two processes trains as on one, and its checkpoints are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import STEPS, largest_difference, launch, prepare_blocks, steps_of, train, train_with_two, weights

from jpeg_dlm.files import load_tensors
from jpeg_dlm.folders.checkpoint import verify_run
from jpeg_dlm.machine.dist import Ranks
from jpeg_dlm.training.parts import divided_like, local, whole, whole_from
from jpeg_dlm.training.sharding import clip_grad_norm, divided, gathered, is_sharded, repeated_layers

SHARDED: dict[str, Any] = {"train__sharding": "fsdp"}
METHODS = ["jpeg-dlm", "elf", "langflow", "cosmos"]  # target network; Muon; single-number parameters; two stages


def job(method: str, blocks: Path, run: Path, until: int = STEPS, **changes: object) -> dict:
    return {"method": method, "blocks": str(blocks), "run": str(run), "until": until, "changes": changes}


def test_without_processes_nothing_is_sharded(corpus_file, tmp_path):
    blocks = prepare_blocks(corpus_file, tmp_path / "blocks")
    trainer = train(job("jpeg-dlm", blocks, tmp_path / "run", until=1, **SHARDED), Ranks())
    assert not is_sharded(trainer.method) and trainer.finished_method() is trainer.method
    names = {id(m): name for name, m in trainer.method.named_modules()}
    layers = [names[id(layer)] for layer in repeated_layers(trainer.method)]
    assert layers == ["compressor.layers.0", "target.layers.0", "dit.blocks.0", "dit.blocks.1", "decompressor.layers.0"]


def test_whole_tensors_are_their_own_parts():
    x = torch.randn(3, requires_grad=True)
    assert local(x) is x and whole(x) is x and divided_like(x, x) is x and whole_from(x, x) is x
    assert divided({"a": x, "b": x}, {"a": x}) == {"a": x, "b": x}
    copy = gathered({"a": x}, keep=True)["a"]
    assert torch.equal(copy, x) and copy.data_ptr() != x.data_ptr() and gathered({"a": x}, keep=False) == {}
    x.grad = torch.tensor([3.0, 4.0, 12.0])
    assert clip_grad_norm([x], 6.5).item() == pytest.approx(13.0)
    assert x.grad.tolist() == pytest.approx([1.5, 2.0, 6.0], rel=1e-5)


@pytest.mark.slow
def test_sharded_runs_train_the_same(corpus_file, tmp_path):
    """Losses, norms, weights and averages as with DDP, half of the state each, and checkpoints for any way of going on."""
    blocks = prepare_blocks(corpus_file, tmp_path / "blocks")
    jobs = []
    for method in METHODS:
        jobs += [job(method, blocks, tmp_path / method / "ddp"), job(method, blocks, tmp_path / method / "fsdp", **SHARDED)]
    mixed = tmp_path / "jpeg-dlm"  # each goes on with the other's checkpoint
    jobs += [job("jpeg-dlm", blocks, mixed / "ddp-fsdp", 3), job("jpeg-dlm", blocks, mixed / "ddp-fsdp", **SHARDED)]
    jobs += [job("jpeg-dlm", blocks, mixed / "fsdp-ddp", 3, **SHARDED), job("jpeg-dlm", blocks, mixed / "fsdp-ddp")]
    jobs += [job("elf", blocks, tmp_path / "elf" / "both", 3, **SHARDED), job("elf", blocks, tmp_path / "elf" / "both")]
    jobs += [job("jpeg-dlm", blocks, mixed / "layers", train__checkpoint_layers=True, train__accumulation=2, **SHARDED)]
    jobs += [job("jpeg-dlm", blocks, mixed / "no-layers", train__accumulation=2)]
    jobs += [job("jpeg-dlm", blocks, mixed / "fsdp-one", 3, **SHARDED)]
    train_with_two(jobs, tmp_path / "jobs.json")
    for method in METHODS:
        ddp, fsdp = steps_of(tmp_path / method / "ddp"), steps_of(tmp_path / method / "fsdp")
        assert fsdp["sharded"] and not ddp["sharded"]
        for a, b in zip(ddp["stats"], fsdp["stats"], strict=True):
            assert b == pytest.approx(a, abs=1e-5, rel=1e-5)
        assert largest_difference(weights(tmp_path / method / "ddp"), weights(tmp_path / method / "fsdp")) < 1e-5
        assert fsdp["evaluated"] == pytest.approx(ddp["evaluated"], abs=1e-3)
        for kind, held in fsdp["part"].items():
            assert ddp["part"][kind] / 2 <= held < 0.52 * ddp["part"][kind], (method, kind)
        for name in ("model", "ema", "optimizer"):
            ours, theirs = (
                load_tensors(tmp_path / method / way / "checkpoints" / f"step-{STEPS:08d}" / f"{name}.safetensors")
                for way in ("fsdp", "ddp")
            )
            assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
            for key, value in theirs.items():
                assert torch.allclose(ours[key], value, rtol=1e-4, atol=1e-5), (method, key)
    whole_run = weights(mixed / "ddp")
    train(job("jpeg-dlm", blocks, mixed / "fsdp-one"), Ranks())
    for way in ("ddp-fsdp", "fsdp-ddp", "fsdp-one"):
        assert largest_difference(whole_run, weights(mixed / way)) < 1e-5, way
        assert [report.error for report in verify_run(mixed / way)] == [None, None]
    assert largest_difference(weights(tmp_path / "elf" / "ddp"), weights(tmp_path / "elf" / "both")) < 1e-5
    assert largest_difference(weights(mixed / "no-layers"), weights(mixed / "layers")) < 1e-5


@pytest.mark.slow
def test_a_sharded_run_from_text_to_samples(corpus_file, tmp_path):
    from conftest import micro_flags

    flags = micro_flags(train__steps=4, train__batch=4, train__eval_every=2, train__save_every=2, encoder__kind="random")
    where = ["--data", str(corpus_file), "--out", str(tmp_path / "run"), "--quiet", "--device", "cpu", "--threads", "1"]
    words = ["train", "--preset", "smoke", *where, *flags, "--train.sharding", "fsdp"]
    done = launch("-m", "jpeg_dlm.cli.main", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 2
    assert [report.error for report in verify_run(tmp_path / "run")] == [None, None]
