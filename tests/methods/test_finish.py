"""Finishing trains the flow branch alone, and the result is a JPEG-DLM with the same codec."""

from pathlib import Path

import pytest
import torch
from test_jpeg_dlm import B, batch, build, moved, noise, tiny, with_statistics

from jpeg_dlm.config import validate
from jpeg_dlm.errors import UsageError
from jpeg_dlm.methods.finish import Finish
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.rng import RowNoise


def finished(**options) -> tuple[torch.nn.Module, Finish]:
    teacher = with_statistics(build(**options)).eval()
    config = validate(Finish.student_config(teacher.config, Path("teacher"), None, None))
    method = build_method(config, teacher.encoder)
    assert isinstance(method, Finish)
    method.start_from(teacher, [])
    return teacher, method.train()


@pytest.mark.parametrize("shared", [True, False])
def test_it_begins_as_the_model_it_finishes_and_moves_its_network_alone(shared):
    teacher, method = finished(model__shared=shared)
    sampler = teacher.config.sampler
    assert torch.equal(method.eval().sample(sampler, RowNoise(0, range(3))), teacher.sample(sampler, RowNoise(0, range(3))))
    method.train()
    terms = method.losses(batch(), noise())
    decode_network = "dit" if shared else "predictor"
    assert {name: moved(method, loss) for name, loss in terms.items()} == {
        "flow": {"dit"}, "jep": {decode_network}, "ce": {decode_network},
    }  # fmt: skip
    before = {n: p.clone() for n, p in method.state_dict().items()}
    optimizer = torch.optim.SGD([p for g in method.parameter_groups() for p in g.parameters.values()], 0.1)
    method.zero_grad()
    method.total_loss(method.losses(batch(), noise())).backward()
    optimizer.step()
    method.after_step(0, 10)
    changed = {n.split(".")[0] for n, p in method.state_dict().items() if not torch.equal(p, before[n])}
    assert changed == {"dit"} | {decode_network}


def test_the_flow_loss_is_that_of_joint_training_on_the_same_latents():
    teacher, method = finished()
    draws = method.config.objective.flow_draws
    assert draws == 2 * teacher.config.objective.flow_draws
    joint = with_statistics(build(objective__flow_draws=draws))
    joint.load_state_dict(teacher.state_dict())
    assert method.losses(batch(), noise(step=50))["flow"].item() == pytest.approx(
        joint.losses(batch(), noise(step=50))["flow"].item(), rel=1e-5
    )


def test_the_frozen_codec_sees_no_dropout():
    _, method = finished(model__dropout=0.5)
    assert method.training and method.dit.training
    assert not any(m.training for name in ("compressor", "target", "decompressor") for m in getattr(method, name).modules())
    assert torch.equal(method.encode(batch()), method.eval().encode(batch()))


def test_few_rows_go_through_the_decode_branch():
    _, method = finished()
    assert [method.decode_rows(n) for n in (1, 8, 64)] == [1, 1, 8] and B // 8 == 0


def test_what_it_cannot_start_from_is_refused():
    with pytest.raises(UsageError, match="--teacher"):
        Finish.adapt(tiny(), "finish")
