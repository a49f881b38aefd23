"""Share of tokens that come back from latents mixed with noise, t z + (1 - t) eps.

python research/decodability.py --texts captions/heldout.jsonl [MODEL ...]
"""

from __future__ import annotations

import argparse

import torch
from inputs import add_inputs, read_texts

from jpeg_dlm import load

TIMES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = add_inputs(parser).parse_args()
    print(f"| model | {' | '.join(f't = {t:g}' for t in TIMES)} |\n|{'---|' * (1 + len(TIMES))}")
    for name in args.models:
        model = load(name)
        texts = read_texts(args, model)
        z_BND = model.encode(texts)
        eps_BND = torch.randn(z_BND.shape, generator=torch.Generator().manual_seed(0)).to(z_BND)
        ids = [model.tokenizer.known_ids(text) for text in texts]
        shares = []
        for t in TIMES:
            decoded = [model.tokenizer.encode(text) for text in model.decode(t * z_BND + (1 - t) * eps_BND)]
            right = sum(a == b for x, y in zip(ids, decoded, strict=True) for a, b in zip(x, y, strict=False))
            shares.append(right / sum(map(len, ids)))
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
