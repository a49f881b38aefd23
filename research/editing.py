"""Share of tokens that texts keep in their places when their latents get noise and are written anew.

python research/editing.py --texts captions/heldout.jsonl -n 48 [MODEL ...]
"""

from __future__ import annotations

import argparse

from inputs import add_inputs, read_texts

from jpeg_dlm import load

NOISES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args = add_inputs(parser, n=48).parse_args()
    print(f"| model | {' | '.join(f'noise {noise:g}' for noise in NOISES)} |\n|{'---|' * (1 + len(NOISES))}")
    for name in args.models:
        model = load(name)
        ids = {text: model.tokenizer.known_ids(text) for text in read_texts(args, model)}
        shares = []
        for noise in NOISES:
            edits = [model.tokenizer.encode(model.edit(text, noise=noise, seed=i)[0]) for i, text in enumerate(ids)]
            kept = sum(a == b for x, y in zip(ids.values(), edits, strict=True) for a, b in zip(x, y, strict=False))
            shares.append(kept / sum(map(len, ids.values())))
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
