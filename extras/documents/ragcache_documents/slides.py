"""Slides, as markitdown numbers them in comments."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragcache.store.places import Place

_SLIDE = re.compile(r"^<!-- Slide number: (\d+) -->$\s*", re.MULTILINE)


def slide_places(text: str) -> Iterator[Place]:
    """Yield the places of the slides. A comment's own place has no fields, because it may end the previous passage."""
    number = 0
    for mark in _SLIDE.finditer(text):
        if int(mark[1]) == number + 1:  # any other mark was written on a slide
            number += 1
            yield Place(mark.start(), {})
            if mark.end() < len(text):
                yield Place(mark.end(), {"slide": number})
