"""Distillation: a student replaces several steps of its teacher with one (ELF).

The teacher is a trained JPEG-DLM, or a student with more steps. Over an interval [t_s, t_t] of the student's grid, the
teacher moves from z_s to z_t in sub-steps, and the student learns the single prediction that leads there in one step,
x = z_s + (1 - t_s)/(t_t - t_s) (z_t - z_s). Only the denoising network is trained. Codec, token projection, statistics and
decode branch are the teacher's, so a student is a JPEG-DLM with separate networks for its two branches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Checks, Config, TrainConfig, opt
from jpeg_dlm.flow.path import SC_PROB, interpolate, make_grid, per_row
from jpeg_dlm.methods.base import Batch, Trainable, copy_tensors
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.jpeg_dlm_config import GROUPS, JpegDlmModel, JpegDlmObjective, SamplerConfig
from jpeg_dlm.nn.dit import DiT
from jpeg_dlm.util.errors import UsageError
from jpeg_dlm.util.rng import RowNoise

NESTED = ("uniform", "quantile")  # grids in which every m-th time forms the grid with m times fewer steps


@dataclass(frozen=True)
class DistillObjective(JpegDlmObjective):
    """Options of distillation; sampler.steps is the number of the student's steps."""

    sub_steps: int = opt(4, "teacher steps per student step (ELF: 4 to 64)", ge=1, le=1024)

    def checks(self, config: Config) -> Checks:
        nested = config.sampler.grid in NESTED and config.sampler.solver == "euler"
        return [
            *super().checks(config),
            (bool(config.train.init), "a student needs a trained model: name it with --teacher"),
            (not config.model.context_blocks, "a student writes without context: choose a teacher with model.context_blocks 0"),
            (not config.model.shared, "a student needs --model.shared false, as its decode branch is the teacher's"),
            (nested, f"a student needs --sampler.solver euler and --sampler.grid {' or '.join(NESTED)}"),
        ]


def jump_target(z_s: Tensor, z_t: Tensor, t_s: Tensor, t_t: Tensor) -> Tensor:
    """Return the clean prediction at (z_s, t_s) whose straight path passes through z_t at t_t (ELF)."""
    return z_s + per_row((1 - t_s) / (t_t - t_s), z_s) * (z_t - z_s)


class Distill(JpegDlm):
    """The student. It holds its teacher's network while it trains, which is not saved in a model folder."""

    title = "JPEG-DLM, distilled"
    groups = {**GROUPS, "objective": DistillObjective}
    config: Config[JpegDlmModel, DistillObjective, SamplerConfig]

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__(config, encoder)
        self.teacher = DiT(config.model)
        trained = {id(p) for p in self.dit.parameters() if p.requires_grad}
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        self.loss_weights = {"jump": 1.0}

    @classmethod
    def adapt(cls, base: Config, name: str) -> Config:
        """Return the config of a student with 4 steps, and a tenth of the teacher's optimizer steps and rate (assumed)."""
        if not isinstance(base.objective, JpegDlmObjective):
            raise UsageError(f"A student needs a teacher of jpeg-dlm, not of {base.method}.")
        plain = {f.name: getattr(base.objective, f.name) for f in fields(JpegDlmObjective)}
        s: SamplerConfig = base.sampler
        sampler = replace(s, steps=4, solver="euler", grid=s.grid if s.grid in NESTED else "quantile")
        t: TrainConfig = base.train
        train = replace(t, steps=max(1, t.steps // 10), lr=t.lr / 10, schedule="constant", warmup=0, ema_warmup=True)
        model, objective = replace(base.model, shared=False), DistillObjective(**plain)
        return replace(base, method=name, train=train, sampler=sampler, model=model, objective=objective)

    def start_from(self, stage: Trainable, batches: Iterable[Batch]) -> None:
        """Initialize the student with the weights of its teacher."""
        if not isinstance(stage, JpegDlm):
            raise UsageError(f"A student needs a teacher of jpeg-dlm, not of {stage.title}.")
        branches = {"dit.": stage.dit, "predictor.": stage.predictor or stage.dit}
        tensors = {name: t for name, t in stage.export_state().items() if not name.startswith(tuple(branches))}
        for prefix, network in branches.items():
            tensors |= {prefix + name: t for name, t in network.state_dict().items()}
        copy_tensors(self.export_state(), tensors, "the teacher")
        self.compressor.load_state_dict(self.target.state_dict())
        self.teacher.load_state_dict(stage.dit.state_dict())

    # ------------------------------------------------------------ training

    def after_step(self, step: int, total: int) -> None:
        """Do nothing: the target compressor is frozen too."""

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        z_1 = self.target_latents(self.features(batch), batch.mask_BL)
        times, first = self.sub_times(noise)
        t_s, t_t = times[first], times[first + self.config.objective.sub_steps]
        z_s = interpolate(z_1, noise.normal("latent", *z_1.shape[1:]), t_s)
        w = torch.full_like(t_s, self.config.sampler.w)
        s = self.earlier_prediction(z_s, t_s, w, noise)
        z_t = self.by_teacher(z_s, s, w, times, first)
        return {"jump": F.mse_loss(self.dit(z_s, t_s, s, w), jump_target(z_s, z_t, t_s, t_t))}

    def sub_times(self, noise: RowNoise) -> tuple[Tensor, Tensor]:
        """Return the teacher's grid and the index in it of each row's t_s, a uniformly drawn time of the student's grid."""
        s, sub_steps = self.config.sampler, self.config.objective.sub_steps
        times = make_grid(s.grid, s.steps * sub_steps, s.grid_mean, s.grid_std, noise.shared("grid"))
        interval = (noise.uniform("interval") * s.steps).long()
        return times.to(interval.device), interval * sub_steps

    @torch.no_grad()
    def earlier_prediction(self, z_s: Tensor, t_s: Tensor, w: Tensor, noise: RowNoise) -> Tensor:
        """Return the self-conditioning input: zeros at t = 0 and in some other rows, else the teacher's prediction."""
        none = (t_s == 0) | (noise.uniform("self_condition") >= SC_PROB)
        return self.teacher(z_s, t_s, None, w) * per_row(~none, z_s)

    @torch.no_grad()
    def by_teacher(self, z: Tensor, s: Tensor, w: Tensor, times: Tensor, first: Tensor) -> Tensor:
        """Return z_t after the teacher's Euler steps over each row's interval, each conditioned on the previous prediction."""
        for m in range(self.config.objective.sub_steps):
            t, u = times[first + m], times[first + m + 1]
            s = self.teacher(z, t, s, w)
            z = z + per_row((u - t) / (1 - t), z) * (s - z)
        return z

    def export_state(self) -> dict[str, Tensor]:
        return {name: t for name, t in super().export_state().items() if not name.startswith("teacher.")}
