"""How texts are scored, as data: a protocol is a few named choices, and every figure carries the protocol's name.

The choices are those in which published code differs; two figures under different ones do not compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jpeg_dlm.errors import UsageError


def choice(default: Any, help: str) -> Any:
    """A field with its default and what it means."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Protocol:
    """The defaults are those of `default`."""

    name: str
    bos: bool = choice(False, "a beginning token in front, so that the first token counts; else it is context only")
    text: Literal["plain", "specials", "ids"] = choice("plain", "what is scored: text, text with special tokens, raw ids")
    lower: bool = choice(False, "generated and real texts are put into lower case first")
    scored: Literal["all", "eos", "non_eos"] = choice("all", "every token; all but the second and later ends; no ends")
    aggregate: Literal["corpus", "sequence"] = choice("corpus", "exp(all nll / all tokens), or mean over texts of their own")
    entropy: Literal["scorer", "model"] = choice("scorer", "unigram entropy over the scorer's or the model's own token ids")
    max_tokens: int = choice(1024, "tokens of a text that count at most; 0 is the model's own length")
    stride: int = choice(0, "a text longer than the scorer's window is read in windows so far apart; 0 cuts it to one window")
    batch_rule: int = choice(0, "texts beyond the last full batch of this size are dropped; 0 keeps all")
    mauve_tokens: int = choice(0, "both sides are cut to so many tokens for MAUVE; 0 is 75% of the shorter median length")
    n: int = choice(256, "texts per seed unless -n is given")
    seeds: int = choice(1, "seeds unless --seeds is given")


_PAPER: dict[str, Any] = {"n": 1024, "seeds": 5}
# Upstream drops an incomplete last batch of 8, cuts to the model's length and pads with the end token.
_MDLM: dict[str, Any] = {
    "text": "specials", "scored": "eos", "entropy": "model", "max_tokens": 0, "batch_rule": 8, **_PAPER,
}  # fmt: skip

PROTOCOLS: dict[str, Protocol] = {
    p.name: p
    for p in (
        Protocol("default"),
        Protocol("lm1b", mauve_tokens=96, **_PAPER),
        # The paper (appendix on evaluation) puts ELF's LM1B texts into lower case, as its reference is uncased. Real text here
        # may have capitals, so both sides are put into lower case, which changes no uncased reference.
        Protocol("lm1b-lower", lower=True, mauve_tokens=96, **_PAPER),
        Protocol("owt1024", bos=True, mauve_tokens=768, **_PAPER),
        Protocol("owt128", bos=True, mauve_tokens=96, **_PAPER),  # assumed: scored as the other OpenWebText set-up
        Protocol("mdlm", **_MDLM),
        Protocol("duo", **_MDLM),
        Protocol("bd3lms", text="specials", scored="non_eos", max_tokens=0, stride=512, **_PAPER),
        Protocol("sedd", text="ids", aggregate="sequence", **_PAPER),
    )
}


def protocol(name: str) -> Protocol:
    """A protocol by name."""
    if name not in PROTOCOLS:
        raise UsageError(f"Unknown protocol '{name}': choose one of {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]
