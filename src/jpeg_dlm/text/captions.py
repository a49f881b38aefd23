"""Short sentences about pictures from the Stanford Natural Language Inference corpus (SNLI), each once.

A record pairs the caption of a picture (`sentence1`) with a sentence that an annotator wrote about it (`sentence2`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from jpeg_dlm.text.tokenizer import collapse

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
            found = sentence(text)
            key = _NOT_WORD.sub("", found.lower())
            if found and key not in seen:
                seen.add(key)
                yield found


def sentence(text: str) -> str:
    """Return `text` capitalized and with a final period, or "" when it is too short, too long or has odd characters."""
    text = _BEFORE_MARK.sub("", collapse(text)).rstrip(" ,;:/\\`>-")
    if len(text.split()) not in WORDS or not _PLAIN.fullmatch(text):
        return ""
    end = "" if text.rstrip('"')[-1:] in ".!?" else "."
    return text[0].upper() + text[1:] + end
