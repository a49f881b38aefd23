"""What latent-length compression buys when sampling: the same networks with N = L latents and with fewer.

python benchmarks/sampling.py            # the sizes of the bundled model, a minute on two cores
python benchmarks/sampling.py --preset lm1b --batch 4 --steps 4
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from timing import interleaved, table

from jpeg_dlm.config import Config
from jpeg_dlm.methods.registry import build_method
from jpeg_dlm.presets import preset
from jpeg_dlm.rng import RowNoise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = preset(args.preset)
    contestants = {}
    for rate in (1.0, 0.5, 0.25, 0.125):
        latents = max(1, round(rate * config.data.token_len))
        contestants[f"r = {rate:g} ({latents} latents)"] = sampler(
            replace(config, model=replace(config.model, latent_len=latents)), args.batch, args.steps
        )
    seconds = interleaved(contestants, args.rounds)
    print(
        table(
            f"Sampling, {args.preset} sizes, random weights, batch {args.batch}, {args.steps} Euler steps", seconds, args.batch
        )
    )


def sampler(config: Config, batch: int, steps: int):
    method = build_method(config).eval()
    options = replace(config.sampler, steps=steps)
    return lambda: method.sample(options, RowNoise(0, range(batch)))


if __name__ == "__main__":
    main()
