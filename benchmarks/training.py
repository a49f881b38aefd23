"""What one shared pass for both branches, and logits in chunks, buy in a training step.

python benchmarks/training.py
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from timing import interleaved, table

from jpeg_dlm.config import Config
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.methods.jpeg_dlm import JpegDlm
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise


class TwoPasses(JpegDlm):
    """The straightforward step: one pass of the network for each branch."""

    def both_branches(self, z_c, z_t, t, s, w):
        return self.decode_latents(z_c, w), self.dit(z_t, t, s, w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = preset(args.preset)
    chunked = replace(config, objective=replace(config.objective, ce_chunk=512))
    contestants = {
        "two passes": step(TwoPasses(config), config, args.batch),
        "one pass": step(build_method(config), config, args.batch),
        "one pass, logits in chunks of 512": step(build_method(chunked), chunked, args.batch),
    }
    print(
        table(
            f"Forward and backward, {args.preset} sizes, batch {args.batch}", interleaved(contestants, args.rounds), args.batch
        )
    )


def step(method, config: Config, batch: int):
    shape = (batch, config.data.token_len)
    tokens = torch.randint(0, config.data.vocab_size, shape)
    data = Batch(tokens, None, torch.randn(*shape, config.encoder.feature_dim))

    def act() -> None:
        method.zero_grad()
        method.total_loss(method.losses(data, RowNoise(0, range(batch)))).backward()

    return act


if __name__ == "__main__":
    main()
