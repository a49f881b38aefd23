"""A method sharded over two processes trains as on one, and its checkpoints are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import train_words
from small_runs import STEPS, largest_difference, launch, prepare_blocks, steps_of, train, train_with_two, weights

from jpeg_dlm.cli.main import main
from jpeg_dlm.training.sharding import clip_grad_norm
from jpeg_dlm.util.distributed import Ranks
from jpeg_dlm.util.files import load_tensors

CLOSE, CLOSE_MUON = 1e-5, 1e-3  # torch's Muon orthogonalizes in bf16, of whose last bit a step of 1e-3 shows
SHARDED: dict[str, Any] = {"train__sharding": "fsdp"}
METHODS = ["jpeg-dlm", "elf", "langflow", "cosmos"]  # target network; Muon; single-number parameters; two stages


def job(method: str, blocks: Path, run: Path, until: int = STEPS, **changes: object) -> dict:
    return {"method": method, "blocks": str(blocks), "run": str(run), "until": until, "changes": changes}


def test_gradients_are_clipped_to_a_norm():
    x = torch.randn(3, requires_grad=True)
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
    jobs += [job("jpeg-dlm", blocks, mixed / "layers", train__checkpoint_layers=True, train__accumulation=2, **SHARDED)]
    jobs += [job("jpeg-dlm", blocks, mixed / "no-layers", train__accumulation=2)]
    jobs += [job("jpeg-dlm", blocks, mixed / "fsdp-one", 3, **SHARDED)]
    train_with_two(jobs, tmp_path / "jobs.json")
    for method in METHODS:
        ddp, fsdp = steps_of(tmp_path / method / "ddp"), steps_of(tmp_path / method / "fsdp")
        assert fsdp["sharded"] and not ddp["sharded"]
        for a, b in zip(ddp["stats"], fsdp["stats"], strict=True):
            assert b == pytest.approx(a, abs=1e-5, rel=1e-5)
        close = CLOSE_MUON if method == "elf" else CLOSE
        assert largest_difference(weights(tmp_path / method / "ddp"), weights(tmp_path / method / "fsdp")) < close
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
                assert torch.allclose(ours[key], value, rtol=1e-4, atol=close), (method, key)
    whole_run = weights(mixed / "ddp")
    train(job("jpeg-dlm", blocks, mixed / "fsdp-one"), Ranks())
    for way in ("ddp-fsdp", "fsdp-ddp", "fsdp-one"):
        assert largest_difference(whole_run, weights(mixed / way)) < 1e-5, way
        assert main(["verify", str(mixed / way)]) == 0
    assert largest_difference(weights(mixed / "no-layers"), weights(mixed / "layers")) < 1e-5


@pytest.mark.slow
def test_a_sharded_run_from_text_to_samples(corpus_file, tmp_path):
    sizes = {"train__batch": 4, "train__eval_every": 2, "train__save_every": 2}
    done = launch("-m", "jpeg_dlm", *train_words("jpeg-dlm", corpus_file, tmp_path / "run", **sizes, **SHARDED))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 2
    assert main(["verify", str(tmp_path / "run")]) == 0
