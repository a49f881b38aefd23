"""Undo the spacing of the One Billion Word Benchmark (LM1B)."""

from __future__ import annotations

import re

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r" (?='(?:s|S|m|M|d|D|t|T|ll|LL|re|RE|ve|VE)\b)", ""),  # it 's, don 't
        (r" (?=(?:n't|N'T)\b)", ""),
        (r"(?<=\ws) ' (?=[a-z])", "' "),  # the players ' union
        (r" (?=[.,;:!?%)\]}](?:\s|$|[\"'.,;:!?)]))", ""),
        (r"(?<=[(\[{$£€#]) ", ""),
        (r"(?<=\d)(?:: | / )(?=\d)", lambda m: m[0].strip()),  # 10 : 30 (the first space is already removed) and 3 / 4
        (r"(?<=\S) @-@ (?=\S)", "-"),
    ]
]


def detokenize_lm1b(text: str) -> str:
    """Undo the Penn-Treebank-like spacing of the One Billion Word Benchmark, line by line."""
    return "\n".join(_detokenize_line(line) for line in text.split("\n"))


def _detokenize_line(line: str) -> str:
    line = _pair_quotes(line)
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line


def _pair_quotes(line: str) -> str:
    """Attach stand-alone quotes to the word they quote: `` opens, '' closes, and " opens and closes in turn."""
    words: list[str] = []
    opened = lean = False  # lean: the next word follows an opening quote without a space
    for word in line.split():
        if word == "''" or (word == '"' and opened):
            words[-1:] = [words[-1] + '"'] if words else ['"']
            opened = lean = False
        elif word in ('"', "``"):
            words.append('"')
            opened = lean = True
        elif lean:
            words[-1] += word
            lean = False
        else:
            words.append(word)
    return " ".join(words)
