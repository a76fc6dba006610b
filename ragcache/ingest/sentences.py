"""Ends of sentences, found by a small set of rules and without a model.

A sentence ends after . ! ? … (and closing quotes or brackets) if white space follows and the next character is not a
lower-case letter. A full stop after an abbreviation, a single initial ("J. K. Rowling") or a heading's number ("3. ")
does not end a sentence. 。！？ end a sentence without white space.
"""

from __future__ import annotations

import re
from itertools import pairwise

# Words that often end a sentence too ("no.", "sun.", "ed.") are left out: a wrong cut costs less than a missed end.
ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "dr", "prof", "rev", "hon", "sr", "jr", "st", "mt", "ft", "col", "capt", "lt", "sgt", "gov"}
    | {"vs", "etc", "cf", "al", "ca", "approx", "dept", "est", "fig", "figs", "eq", "eqs", "vol", "vols", "pp", "sec"}
    | {"e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "b.c", "a.d", "inc", "ltd", "corp", "nos", "eds", "sen", "rep"}
    | {"jan", "feb", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "mon", "tue", "wed", "thu", "fri"}
)

# Possessive, and matching only from the first mark of a run, to take linear time on a million full stops.
_LATIN_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?=\s)")
_CJK_END = re.compile(r"[。！？]++[」』”’）]*+")
_SPACE = re.compile(r"\s*+")
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]*\Z")


def split_sentences(text: str) -> list[str]:
    """Return the sentences in order, each with the white space after it, so that joined they are `text`.

    Blank lines end a sentence.
    """
    cuts = sorted({0, *_ends(text), len(text)})
    return [text[start:end] for start, end in pairwise(cuts)]


def _ends(text: str) -> list[int]:
    ends = [match.end() for match in _CJK_END.finditer(text)]
    ends += [match.end() for match in re.finditer(r"\n[ \t]*\n", text)]
    ends += [match.end() for match in _LATIN_END.finditer(text) if _is_end(text, match)]
    cuts = [0]
    for end in sorted(ends):
        if end > cuts[-1]:  # else it lies in white space already skipped: a million blank lines take linear time
            cuts.append(_skip_space(text, end))
    return cuts


def _is_end(text: str, match: re.Match[str]) -> bool:
    following = _skip_space(text, match.end())
    if following < len(text) and text[following].islower():
        return False
    if match.group()[0] != "." or len(match.group().rstrip("\"'”’»)]")) > 1:
        return True
    # No abbreviation is longer than this window, and without it a text without spaces would be scanned repeatedly.
    before = _LAST_WORD.search(text[max(0, match.start() - 24) : match.start()])
    word = before.group() if before else ""
    if len(word) == 1 and word.isupper():
        return False  # an initial
    if word.isdigit() and _starts_line(text, match.start() - len(word)):
        return False  # "3. Results"
    return word.lower() not in ABBREVIATIONS


def _starts_line(text: str, position: int) -> bool:
    return text[:position].rpartition("\n")[2].strip() == "" if position < 200 else text[position - 1] == "\n"


def _skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]
