"""The words of a text: one rule of cutting for both databases, applied to texts and questions alike."""

from __future__ import annotations

import re
import unicodedata

# Letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese. An index of words holds
# what they made of its texts: other letters here take another name of the index.
LETTERS = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U00020000-\U0003ffff"
)
MARKS = r"\u0300-\u036f"
PUNCTUATION = (
    r"\u0021-\u002f\u003a-\u0040\u005b-\u0060\u007b-\u00a9\u00ab-\u00b4\u00b6-\u00b9\u00bb-\u00bf"
    r"\u2010-\u206f\u3000-\u303f"
)
_LETTER, _MARK, _PUNCTUATION = (re.compile(f"([{found}])") for found in (LETTERS, MARKS, PUNCTUATION))
SPACED = "ragcache_spaced"
"""Name of `spaced` in SQL."""


def cut(text: str) -> str:
    """Write a text as the index of words and its questions have it: letters of any width alike (NFKC) and without
    accents, and a space in place of each punctuation mark, by which databases' own parsers would join words."""
    bare = _MARK.sub("", unicodedata.normalize("NFKD", text))
    return _PUNCTUATION.sub(" ", unicodedata.normalize("NFKC", bare))


def spaced(text: str) -> str:
    """`cut`, with a space around each letter of a script that puts none between words."""
    return _LETTER.sub(r" \1 ", cut(text))
