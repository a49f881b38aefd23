"""Effect of reduced precision on the bundled model's texts: unchanged tokens, Gen-PPL and entropy.

python benchmarks/run.py price               # 96 texts of each mode
python benchmarks/run.py price --short
"""

from __future__ import annotations

from torch import Tensor

from jpeg_dlm.api import Model, load
from jpeg_dlm.results.table import markdown_table
from jpeg_dlm.sampling.linear import DTYPES
from jpeg_dlm.scorers.language_models import build_scorer
from jpeg_dlm.scorers.scoring import Scorer
from jpeg_dlm.text.text_metrics import perplexity, unigram_entropy

PLAIN = "plain fp32"


def measure(short: bool = False) -> dict:
    """Sample the same numbered texts of the same seed in every mode and score them."""
    n = 8 if short else 96
    model, scorer = load(), build_scorer("smollm2")
    exact = model.sample(n)
    rows = [row(PLAIN, model, scorer, exact, exact)]
    rows += [row(f"engine {dtype}", model, scorer, model.accelerate(dtype).sample(n), exact) for dtype in DTYPES]
    cells = [
        [r["mode"], f"{r['agreement']:.2%}", f"{r['same_texts']:.0%}", f"{r['ppl']:.2f}", f"{r['entropy']:.3f}"] for r in rows
    ]
    heading = ["mode", "same tokens", "same texts", f"Gen-PPL ({scorer.name})", "entropy (nats)"]
    label = model.config.sampler.label()
    return {
        "title": "Numerical price of reduced precision",
        "markdown": f"{n} texts of the bundled model, {label}, seed 0.\n\n" + markdown_table(heading, cells) + "\n",
        "rows": rows,
        "ratios": {f"{r['mode']} Gen-PPL, inverse": rows[0]["ppl"] / r["ppl"] for r in rows[1:]},
    }


def row(mode: str, model: Model, scorer: Scorer, tokens: Tensor, exact: Tensor) -> dict:
    scores = scorer.nll(model.to_text(tokens))
    same = tokens == exact
    return {
        "mode": mode,
        "agreement": same.float().mean().item(),
        "same_texts": same.all(1).float().mean().item(),
        "ppl": perplexity(scores),
        "entropy": unigram_entropy(score.token_ids for score in scores),
    }
