"""Copy prepared pairs and replace the training targets by what a model writes for their sources.

A source has many right targets, and a model that decides all tokens at once mixes them. Those of one teacher agree with each
other (sequence-level knowledge distillation, usual for non-autoregressive translation). Held-out pairs stay as they are. A
target that has no end keeps its original.

python research/teacher_targets.py runs/ar runs/translate/data --out pairs-ar --temperature 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch

import jpeg_dlm
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.util.console import Console
from jpeg_dlm.util.files import write_atomic, write_sealed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="model folder or run")
    parser.add_argument("pairs", type=Path, help="folder of jpeg-dlm prepare")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    model, blocks = jpeg_dlm.load(args.teacher), Blocks(args.pairs)
    everything = np.arange(len(blocks))
    rows, sources = blocks.rows(everything).numpy(), blocks.sources(everything).numpy()
    unique, inverse = np.unique(sources, axis=0, return_inverse=True)
    order = np.argsort((unique != blocks.pad_id).sum(1), kind="stable")  # sources of one length share batches
    written = np.empty((len(unique), blocks.token_len), rows.dtype)
    with Console().progress("Writing targets", "sources") as progress:
        for start in range(0, len(unique), args.batch):
            part = order[start : start + args.batch]
            chosen = torch.from_numpy(unique[part])
            written[part] = model.sample(len(part), source=chosen, batch=args.batch, temperature=args.temperature).numpy()
            progress(start + len(part), len(unique))
    ended = (written == blocks.index["eos_id"]).any(1)[inverse]
    targets = np.where(ended[:, None], written[inverse], rows)
    same = (targets == rows).all(1).mean()
    print(f"{ended.mean():.1%} of {len(rows):,} targets are the teacher's; {same:.1%} are the original.")

    args.out.mkdir(parents=True)
    for name in ("tokenizer.json", "heldout.jsonl", *(shard["file"] for shard in blocks.index["splits"]["heldout"]["shards"])):
        shutil.copy(args.pairs / name, args.out / name)
    raw = np.concatenate([sources, targets], 1).astype(blocks.index["dtype"]).tobytes()
    write_atomic(args.out / "train-00000.bin", raw)
    shard = {"file": "train-00000.bin", "rows": len(rows), "sha256": hashlib.sha256(raw).hexdigest()}
    index = dict(blocks.index, source=f"{blocks.index['source']}, targets of a teacher")
    index["splits"] = dict(index["splits"], train=dict(index["splits"]["train"], shards=[shard]))
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    write_sealed(args.out, ["tokenizer.json", "heldout.jsonl"], "index.json", text)


if __name__ == "__main__":
    main()
