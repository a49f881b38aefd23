"""Scoring protocols as data: the choices in which published code differs; figures of different protocols are not comparable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Protocol:
    """The defaults are those of `default`."""

    name: str
    bos: bool = False  # prepend a beginning token, so that the first token is scored; otherwise it is context only
    text: Literal["plain", "specials", "ids"] = "plain"  # input of the scorer: text, text with special tokens, raw ids
    lower: bool = False  # convert generated and real texts to lower case first
    scored: Literal["all", "eos", "non_eos"] = "all"  # every token; all but repeated end tokens; no end tokens
    aggregate: Literal["corpus", "sequence"] = "corpus"  # exp(total nll / total tokens), or mean perplexity of texts
    entropy: Literal["scorer", "model"] = "scorer"  # unigram entropy over the scorer's or the model's own token ids
    max_tokens: int = 1024  # most scored tokens of a text; 0 is the model's own length
    stride: int = 0  # step between windows for texts longer than the scorer's context; 0 cuts them to one window
    batch_rule: int = 0  # texts beyond the last full batch of this size are dropped; 0 keeps all
    mauve_tokens: int = 0  # tokens of both sides used for MAUVE; 0 is 75% of the shorter median length
    kmeans: Literal["mean", "first"] = "mean"  # MAUVE: mean over k-means seeds 42 to 46, or that of 42 (released)
    whole: bool = True  # texts of files: real ones are not cut to the generated lengths, and MAUVE takes all that is scored
    n: int = 256  # texts per seed unless -n is given
    seeds: int = 1  # seeds unless --seeds is given


_PAPER: dict[str, Any] = {"kmeans": "first", "whole": False, "n": 1024, "seeds": 5}
# Upstream drops an incomplete last batch of 8, cuts to the model's length and pads with the end token.
_MDLM: dict[str, Any] = {
    "text": "specials",
    "scored": "eos",
    "entropy": "model",
    "max_tokens": 0,
    "batch_rule": 8,
    **_PAPER,
}

PROTOCOLS: dict[str, Protocol] = {
    p.name: p
    for p in (
        Protocol("default"),
        Protocol("lm1b", mauve_tokens=96, **_PAPER),
        # The paper (appendix on evaluation) lower-cases ELF's LM1B texts because its reference is uncased. Real text here may
        # have capitals, so both sides are lower-cased, which leaves an uncased reference unchanged.
        Protocol("lm1b-lower", lower=True, mauve_tokens=96, **_PAPER),
        Protocol("owt1024", bos=True, mauve_tokens=768, **_PAPER),
        Protocol("owt128", bos=True, mauve_tokens=96, **_PAPER),  # assumed: scored like owt1024
        Protocol("mdlm", **_MDLM),
        Protocol("duo", **_MDLM),
        Protocol("bd3lms", text="specials", scored="non_eos", max_tokens=0, stride=512, **_PAPER),
        Protocol("sedd", text="ids", aggregate="sequence", **_PAPER),
    )
}
