"""Losses, accuracy and latent geometry on held-out text during training."""

from __future__ import annotations

import torch

from jpeg_dlm.methods.base import Trainable
from jpeg_dlm.methods.latent_geometry import latent_measures
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.data import batch_of
from jpeg_dlm.training.metrics import HELDOUT
from jpeg_dlm.util.distributed import Ranks, all_mean
from jpeg_dlm.util.rng import RowNoise

MOST_ROWS, BATCH = 512, 128  # held-out rows, and rows at a time over all processes (assumed)


@torch.no_grad()
def heldout_losses(method: Trainable, blocks: Blocks, ranks: Ranks, context_blocks: int = 0) -> dict[str, float]:
    """Return mean losses over the first held-out rows with fixed noise, and token accuracy if the method reconstructs text.

    For methods with latents, also measure their geometry and their decoding under noise, on the first batch alone. Every
    process takes an equal share of each batch, so up to `world - 1` rows at the end are skipped.
    """
    totals: dict[str, float] = {}
    device, world = ranks.device, ranks.world
    n, batch = min(MOST_ROWS, len(blocks)) // world * world, max(1, BATCH // world) * world
    was_training = method.training
    method.eval()
    for start in range(0, n, batch):
        rows = range(start, min(start + batch, n))[ranks.rank :: world]
        b = batch_of(blocks, rows, device, context_blocks)
        noise = RowNoise(0, rows, 0, device, n)
        values = {k: float(v) for k, v in method.losses(b, noise).items()}
        accuracy = method.reconstruction(b)
        if accuracy is not None:
            values["accuracy"] = float(accuracy)
        for name, value in values.items():
            totals[HELDOUT + name] = totals.get(HELDOUT + name, 0.0) + value * len(rows) * world / n
        measured = start == 0 and len(rows) * world > 1 and method.learns_latents  # one text has no variance
        if measured and (model := method.latent_model()):
            totals |= latent_measures(model, b, noise)
    method.train(was_training)
    if world == 1 or not totals:
        return totals
    means = all_mean(torch.tensor(list(totals.values()), dtype=torch.float64, device=device))
    return dict(zip(totals, means.tolist(), strict=True))
