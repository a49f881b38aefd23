"""Latents of some texts: their geometry, the tokens that come back from noisy ones, and the tokens that edited texts keep.

python research/latents.py geometry --texts captions/heldout.jsonl [MODEL ...]
python research/latents.py decodability --texts captions/heldout.jsonl [MODEL ...]
python research/latents.py editing --texts captions/heldout.jsonl -n 48 [MODEL ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from jpeg_dlm import Model, load
from jpeg_dlm.methods.latent_geometry import measure
from jpeg_dlm.util.errors import DataError

COLUMNS = {
    "rank": "effective rank / D",
    "std_min": "smallest deviation",
    "text": "variance due to text",
    "sigreg": "SIGReg distance",
}
TIMES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
NOISES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


def read_texts(path: Path, n: int, model: Model) -> list[str]:
    """Return the first n texts that fit into a block of the model and whose words it knows."""
    texts: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        text = json.loads(line)["text"]
        try:
            fits = len(model.tokenizer.known_ids(text)) <= model.layout.payload
        except DataError:  # a word that the model does not know
            continue
        texts += [text] if fits else []
        if len(texts) == n:
            break
    return texts


def kept(model: Model, texts: Sequence[str], others: Sequence[str]) -> str:
    """Return the share of tokens of texts that others have in the same places."""
    ids, other_ids = [model.tokenizer.known_ids(text) for text in texts], [model.tokenizer.encode(text) for text in others]
    right = sum(a == b for x, y in zip(ids, other_ids, strict=True) for a, b in zip(x, y, strict=False))
    return f"{right / sum(map(len, ids)):.1%}"


def geometry(model: Model, texts: list[str]) -> dict[str, str]:
    """Return effective rank, smallest deviation and distance from N(0, I)."""
    measured = measure(model.encode(texts))
    return {heading: f"{measured[key]:.3f}" for key, heading in COLUMNS.items()}


def decodability(model: Model, texts: list[str]) -> dict[str, str]:
    """Return the share of tokens that come back from latents mixed with noise, t z + (1 - t) eps."""
    z_BND = model.encode(texts)
    eps_BND = torch.randn(z_BND.shape, generator=torch.Generator().manual_seed(0)).to(z_BND)
    return {f"t = {t:g}": kept(model, texts, model.decode(t * z_BND + (1 - t) * eps_BND)) for t in TIMES}


def editing(model: Model, texts: list[str]) -> dict[str, str]:
    """Return the share of tokens that texts keep when their latents get noise and are written anew."""
    edits = {noise: [model.edit(text, noise=noise, seed=i)[0] for i, text in enumerate(texts)] for noise in NOISES}
    return {f"noise {noise:g}": kept(model, texts, edited) for noise, edited in edits.items()}


def main() -> None:
    analyses = {analysis.__name__: analysis for analysis in (geometry, decodability, editing)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("analysis", choices=analyses)
    parser.add_argument("models", nargs="*", default=["bundled"], metavar="MODEL", help="model folders or runs")
    parser.add_argument("--texts", type=Path, required=True, help=".jsonl file of records with a text")
    parser.add_argument("-n", type=int, default=256, help="texts")
    args = parser.parse_args()
    for i, name in enumerate(args.models):
        model = load(name)
        cells = analyses[args.analysis](model, read_texts(args.texts, args.n, model))
        if i == 0:
            print(f"| model | {' | '.join(cells)} |\n|{'---|' * (1 + len(cells))}")
        print(f"| {name} | {' | '.join(cells.values())} |", flush=True)


if __name__ == "__main__":
    main()
