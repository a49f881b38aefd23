"""Clean the text of named corpora: the spacing of LM1B and others, and sentences about pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator

from jpeg_dlm.text.tokenizer import collapse

# ---------------------------------------------------------------- the One Billion Word Benchmark (LM1B) and its like

# Patterns and replacements in Duo's order, which matters: a match takes the spaces around it from the matches after it. Thus
# "victims ' families" and unpaired quotes keep their spaces, as in the paper's training text and references.
_LM1B = [
    (r"(https?) : / / ", r"\1://"),
    (r" '(?=\w)", "'"),  # it 's
    (r" (\w+) \. ", r" \1. "),
    (r" (\w+) \.$", r" \1."),
    (r" \? ", "? "),
    (r" \?$", "?"),
    (r" ! ", "! "),
    (r" !$", "!"),
    (r" , ", ", "),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" / ", "/"),
    (r'" ([^"]+) "', r'"\1"'),
    (r"' ([^']+) '", r"'\1'"),
    (r"\( ([^()]+) \)", r"(\1)"),
    (r"\[ ([^\[\]]+) \]", r"[\1]"),
    (r"([$£]) ", r"\1"),
]
# Of WikiText's files, with @ around marks within numbers and words; PTB has lost its numbers (N) and rare words.
_WIKITEXT = [
    (r"s '", "s'"),
    *((rf" @{mark}@ ", mark) for mark in "-,"),
    (r" @\.@ ", "."),
    *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    *((rf"{re.escape(a)}\s*([^{re.escape(b)}]*?)\s*{re.escape(b)}", rf"{a}\1{b}") for a, b in ("()", "[]", "{}", '""', "''")),
    *(("= " * (n - 1) + "=", "=" * n) for n in (4, 3, 2)),
    (r" ° ", "°"),
    (r" ?\n ?", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
]
_PTB = [
    (r" 's", "'s"),
    (r"s ' ", "s' "),
    (r" n't", "n't"),
    (r" \n ", "\n"),
    (r"\\/", "/"),
    (r" N(?= )", " 1"),
    (r"([$#]) 1", r"\g<1>1"),
    (r"<unk>", "?"),
]


def _replaced(text: str, rules: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def detokenize_lm1b(text: str) -> str:
    """Undo the Penn-Treebank-like spacing of the One Billion Word Benchmark, line by line, by the rules of MDLM and Duo."""
    return "\n".join(_replaced(line, _LM1B) for line in text.split("\n"))


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "lm1b": detokenize_lm1b,
    "wikitext": lambda text: _replaced(text, _WIKITEXT),
    "ptb": lambda text: _replaced(text, _PTB),
    "lambada": lambda text: text and "\n" + re.sub("[“”]", '"', text).strip(),
    "papers": lambda text: detokenize_lm1b(_replaced(text, _WIKITEXT)),
}


# ---------------------------------------------------------------- the Stanford Natural Language Inference corpus (SNLI)

# A record pairs the caption of a picture (`sentence1`) with a sentence that an annotator wrote about it (`sentence2`).
WORDS = range(4, 14)  # these sentences fit rows of 16 to 24 tokens and are 86% of the corpus (measured)
# Only common characters and at least one lowercase letter: excludes sentences in capitals or with stray symbols.
_PLAIN = re.compile(r"(?=.*[a-z])[A-Za-z0-9 .,!?'\"-]+")
_BEFORE_MARK = re.compile(r" (?=[.,!?])")
_NOT_WORD = re.compile(r"[^a-z0-9 ]")


def captions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of SNLI records, normalized by `sentence`, once if they differ only in case and punctuation."""
    seen: set[str] = set()
    for line in lines:
        record = json.loads(line)
        for text in (record["sentence1"], record["sentence2"]):
            caption = sentence(text)
            key = _NOT_WORD.sub("", caption.lower())
            if caption and key not in seen:
                seen.add(key)
                yield caption


def sentence(text: str) -> str:
    """Return `text` capitalized and with a final period, or "" when it is too short, too long or has odd characters."""
    text = _BEFORE_MARK.sub("", collapse(text)).rstrip(" ,;:/\\`>-")
    if len(text.split()) not in WORDS or not _PLAIN.fullmatch(text):
        return ""
    end = "" if text.rstrip('"')[-1:] in ".!?" else "."
    return text[0].upper() + text[1:] + end
