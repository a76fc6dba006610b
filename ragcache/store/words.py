"""The words of a text, cut by the same rule for both databases, for texts and for questions."""

from __future__ import annotations

import re
import unicodedata

# Letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese. The text index
# depends on this list: a change to it needs a new name for the index.
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
    """Normalize a text for the index and for questions: letters of any width alike (NFKC) and without accents, and a
    space for each punctuation mark that the databases' own parsers would treat as part of a word."""
    bare = _MARK.sub("", unicodedata.normalize("NFKD", text))
    return _PUNCTUATION.sub(" ", unicodedata.normalize("NFKC", bare))


def spaced(text: str) -> str:
    """Return the `cut` text with a space around each letter of a script without spaces between words."""
    return _LETTER.sub(r" \1 ", cut(text))
