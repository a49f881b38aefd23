"""Models and texts that the scripts take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jpeg_dlm import Model
from jpeg_dlm.util.errors import DataError


def add_inputs(parser: argparse.ArgumentParser, n: int = 256) -> argparse.ArgumentParser:
    """Add the arguments for models and texts."""
    parser.add_argument("models", nargs="*", default=["bundled"], metavar="MODEL", help="model folders or runs")
    parser.add_argument("--texts", type=Path, required=True, help=".jsonl file of records with a text")
    parser.add_argument("-n", type=int, default=n, help="texts")
    return parser


def read_texts(args: argparse.Namespace, model: Model) -> list[str]:
    """Return the first n texts that fit into a block of the model and whose words it knows."""
    texts: list[str] = []
    for line in args.texts.read_text("utf-8").splitlines():
        text = json.loads(line)["text"]
        try:
            fits = len(model.tokenizer.known_ids(text)) <= model.layout.payload
        except DataError:  # a word that the model does not know
            continue
        texts += [text] if fits else []
        if len(texts) == args.n:
            break
    return texts
