"""Geometry of the latents of some texts: effective rank, smallest deviation, distance from N(0, I).

python research/geometry.py --texts captions/heldout.jsonl [MODEL ...]
"""

from __future__ import annotations

import argparse

from inputs import add_inputs, read_texts

from jpeg_dlm import load
from jpeg_dlm.methods.latent_geometry import measure

COLUMNS = {
    "rank": "effective rank / D",
    "std_min": "smallest deviation",
    "text": "variance due to text",
    "sigreg": "SIGReg distance",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = add_inputs(parser).parse_args()
    print(f"| model | {' | '.join(COLUMNS.values())} |\n|{'---|' * (1 + len(COLUMNS))}")
    for name in args.models:
        model = load(name)
        geometry = measure(model.encode(read_texts(args, model)))
        print(f"| {name} | {' | '.join(f'{geometry[key]:.3f}' for key in COLUMNS)} |")


if __name__ == "__main__":
    main()
