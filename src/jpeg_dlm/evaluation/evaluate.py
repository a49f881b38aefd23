"""Generated text beside real and word-shuffled text of the same length, under one scorer; and what the codec keeps.

A perplexity alone says little: it falls with repetition and depends on the scorer. So every figure comes with entropy, and
with the same scorer's figures for the held-out text (what to reach) and its shuffled words (what grammar is worth).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jpeg_dlm import __version__
from jpeg_dlm.api import Model
from jpeg_dlm.config import to_dict
from jpeg_dlm.errors import DataError
from jpeg_dlm.evaluation.scoring import Scorer
from jpeg_dlm.evaluation.text_metrics import (
    TextScore,
    bootstrap_interval,
    distinct_n,
    gen_ppl,
    repetition_rate,
    shuffle_words,
    unigram_entropy,
)
from jpeg_dlm.methods.base import Batch
from jpeg_dlm.rng import generator
from jpeg_dlm.sampling.sampler import device_of
from jpeg_dlm.text.blocks import Blocks
from jpeg_dlm.training.console import Console

MAX_TOKENS = 1024  # released: the scorer reads at most this many tokens of a text


@dataclass(frozen=True)
class TextFigures:
    """What one set of texts scores."""

    texts: int
    skipped: int
    tokens: int
    gen_ppl: float
    gen_ppl_low: float
    gen_ppl_high: float
    entropy: float
    distinct_2: float
    repetition_4: float


def figures(scores: list[TextScore]) -> TextFigures:
    """Perplexity with its 95% bootstrap interval over texts, entropy in nats, and signs of repetition."""
    ids = [score.token_ids for score in scores]
    low, high = bootstrap_interval(scores, gen_ppl)
    return TextFigures(
        texts=len(scores), skipped=sum(s.skipped for s in scores), tokens=sum(s.n_tokens for s in scores),
        gen_ppl=gen_ppl(scores), gen_ppl_low=low, gen_ppl_high=high, entropy=unigram_entropy(ids),
        distinct_2=distinct_n(ids, 2), repetition_4=repetition_rate(ids),
    )  # fmt: skip


def real_texts(model: Model, heldout: Blocks, n: int) -> list[str]:
    """The first n held-out blocks as text: the same length in tokens as what the model writes."""
    if len(heldout) == 0:
        raise DataError("There is no held-out text: prepare more of it.")
    return model.to_text(heldout.rows(list(range(min(n, len(heldout))))))


def reconstruction(model: Model, heldout: Blocks, n: int, batch: int = 64) -> float:
    """Share of held-out tokens that come back through the codec."""
    codec = model.codec
    codec.encoder = model.encoder
    n, kept = min(n, len(heldout)), 0.0
    for start in range(0, n, batch):
        tokens = heldout.rows(list(range(start, min(start + batch, n)))).to(device_of(codec))
        kept += float(codec.reconstruction(Batch(tokens, heldout.mask(tokens)), model.config.sampler.w)) * len(tokens)
    return kept / n


def evaluate(
    model: Model, heldout: Blocks, scorer: Scorer, n: int, seed: int, console: Console, **sampler: Any
) -> dict[str, Any]:
    """One table: generated, real, shuffled; how far generated has come from shuffled to real; and the reconstruction."""
    console.say(f"Generating {n} texts ...")
    generated = model.generate(n, seed=seed, **sampler)
    real = real_texts(model, heldout, n)
    g = generator(seed, "shuffle")
    sets = {"generated": generated, "real": real, "shuffled": [shuffle_words(text, g) for text in real]}
    found = {}
    for name, texts in sets.items():
        with console.progress(f"Scoring {name} text", "texts") as progress:
            found[name] = figures(scorer.nll(texts, MAX_TOKENS, progress=progress))
    way = math.log(found["shuffled"].gen_ppl / found["generated"].gen_ppl)
    way /= math.log(found["shuffled"].gen_ppl / found["real"].gen_ppl)
    return {
        "figures": {name: asdict(value) for name, value in found.items()},
        "way_from_shuffled_to_real": way,
        "entropy_gap": found["generated"].entropy - found["real"].entropy,
        "reconstruction": reconstruction(model, heldout, 4 * n),
        "scorer": scorer.name,
        "scorer_hash": scorer.hash,
        "seed": seed,
        "sampler": to_dict(model.config.sampler) | sampler,
        "version": __version__,
        "config": to_dict(model.config),
        "samples": generated[:16],
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rate = result["config"]["model"]["latent_len"] / result["config"]["data"]["token_len"]
    lines = [
        f"| text | Gen-PPL ({result['scorer']}) | 95% interval | entropy (nats) | distinct-2 | repeated 4-grams |",
        "|---|---|---|---|---|---|",
    ]
    for name, f in result["figures"].items():
        lines.append(
            f"| {name} ({f['texts']}) | {f['gen_ppl']:.1f} | {f['gen_ppl_low']:.1f} to {f['gen_ppl_high']:.1f} "
            f"| {f['entropy']:.3f} | {f['distinct_2']:.3f} | {f['repetition_4']:.3f} |"
        )
    return "\n".join([
        *lines, "",
        f"Way from shuffled to real text, in log perplexity: {result['way_from_shuffled_to_real']:.2f}. "
        f"Entropy minus real text's: {result['entropy_gap']:+.3f} nats. "
        f"Held-out tokens reconstructed at r = {rate:g}: {100 * result['reconstruction']:.1f}%.",
    ])  # fmt: skip
