"""A finishing stage: train only the denoising network further, with the codec frozen.

Once tokens decode well, this stage trains the flow alone: all rows go through the denoise branch, and a few through the
decode branch, which the shared network would forget otherwise. Not in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from jpeg_dlm.config import Checks, Config, opt
from jpeg_dlm.errors import UsageError
from jpeg_dlm.flow.sampler_config import SamplerConfig
from jpeg_dlm.methods.base import Batch, Trainable, copy_tensors
from jpeg_dlm.methods.distill import Student, StudentObjective, continued
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.jpeg_dlm_config import JpegDlmModel
from jpeg_dlm.rng import RowNoise


@dataclass(frozen=True)
class FinishObjective(StudentObjective):
    """The objective of the trained model, and the share of rows for its decode branch."""

    decode_share: float = opt(0.125, "share of a batch's rows that train the decode branch (assumed)")

    def checks(self, config: Config) -> Checks:
        valid = 0 < self.decode_share <= 1
        return [*super().checks(config), (valid, "objective.decode_share must lie above 0 and not above 1")]


class Finish(Student):
    """JPEG-DLM in which only the DiT is trained; the result is a JPEG-DLM of the same layout."""

    title = "JPEG-DLM, finished"
    groups = {"model": JpegDlmModel, "objective": FinishObjective, "sampler": SamplerConfig}

    def __init__(self, config: Config, encoder: nn.Module | None = None) -> None:
        super().__init__(config, encoder)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith(("dit.", "predictor.")))
        self.loss_weights = {name: weight for name, weight in self.loss_weights.items() if name in ("jep", "flow", "ce")}

    @classmethod
    def student_config(cls, teacher: Config, path: Path, tokenizer: Path | None, encoder: Path | None) -> Config:
        """Use the teacher's number of steps and twice its noise draws, as a draw costs a third of a joint row (measured)."""
        config = continued(teacher, path, tokenizer, encoder, "finish", FinishObjective)
        return replace(config, objective=replace(config.objective, flow_draws=2 * config.objective.flow_draws))

    def start_from(self, stage: Trainable, batches: Iterable[Batch]) -> None:
        """Initialize from the trained model."""
        if not isinstance(stage, JpegDlm):
            raise UsageError(f"Finishing continues from a model of jpeg-dlm, not of {stage.title}.")
        copy_tensors(self.export_state(), stage.export_state(), "the trained model")
        self.compressor.load_state_dict(self.target.state_dict())

    def losses(self, batch: Batch, noise: RowNoise) -> dict[str, Tensor]:
        h = self.features(batch)
        z_tgt = self.target_latents(h, batch.mask_BL)  # without a step, so the statistics do not change
        few = batch.first(self.decode_rows(len(h)))
        n = len(few.tokens_BL)
        z_c = self.standardize(self.compressor(self.corrupted(h, noise)[:n], few.mask_BL))
        noisy = self.noisy_embeddings(z_tgt, batch, noise)
        zhat_tgt, zhat_1 = self.both_branches(z_c, noisy)
        return {
            "jep": F.mse_loss(zhat_tgt, z_tgt[:n]),
            "flow": self.flow_loss(zhat_1, self.flow_target(noisy, zhat_1), noisy.t),
            "ce": self.reader.loss(self.decompressed(zhat_tgt), few),
        }

    def decode_rows(self, rows: int) -> int:
        """Return the number of rows in a batch that go through the decode branch."""
        return max(1, round(rows * self.config.objective.decode_share))
