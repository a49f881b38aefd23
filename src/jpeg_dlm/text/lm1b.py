"""Undo the spacing of the One Billion Word Benchmark (LM1B) as the field does, flaws included."""

from __future__ import annotations

import re

# Patterns and replacements in Duo's order, which matters: a match takes the spaces around it from the matches after it. Thus
# "victims ' families" and unpaired quotes keep their spaces, as in the paper's training text and references.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
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
]


def detokenize_lm1b(text: str) -> str:
    """Undo the Penn-Treebank-like spacing of the One Billion Word Benchmark, line by line, by the rules of MDLM and Duo."""
    return "\n".join(map(_detokenize_line, text.split("\n")))


def _detokenize_line(line: str) -> str:
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line
