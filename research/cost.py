"""Parameters and operations of sampling one text, as the rate falls and texts grow, by counting on shapes.

python research/cost.py --preset lm1b --lengths 128,512,2048 --rates 1,0.5,0.25,0.125
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from jpeg_dlm.config import Config
from jpeg_dlm.cost.flops import build_weightless, parameter_parts, sampling_macs
from jpeg_dlm.methods.registry import for_method
from jpeg_dlm.presets import preset


def sized(base: Config, token_len: int, rate: float) -> Config:
    """Return the config with texts of another length and another rate."""
    latent_len = max(1, round(rate * token_len))
    return replace(base, data=replace(base.data, token_len=token_len), model=replace(base.model, latent_len=latent_len))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="lm1b")
    parser.add_argument("--lengths", default="128,512,2048", help="tokens of a text")
    parser.add_argument("--rates", default="1,0.5,0.25,0.125", help="compression rates of JPEG-DLM")
    args = parser.parse_args()
    base = preset(args.preset)
    print("| tokens | system | parameters | evaluations | operations |\n|---|---|---|---|---|")
    for length in map(int, args.lengths.split(",")):
        systems = {f"JPEG-DLM, r = {rate:g}": sized(base, length, rate) for rate in map(float, args.rates.split(","))}
        systems |= {"ELF": for_method(sized(base, length, 1.0), "elf"), "AR": for_method(sized(base, length, 1.0), "ar")}
        for title, config in systems.items():
            macs, parameters = sampling_macs(config), parameter_parts(build_weightless(config))["total"]
            cells = [f"{parameters / 1e6:.1f} M", str(config.sampler.evaluations(length)), f"{macs / 1e9:,.1f} G"]
            print(f"| {length} | {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
