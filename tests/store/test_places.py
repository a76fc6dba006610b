"""Which page, slide, sheet and rows a passage is from, against looking at every character of it."""

import random

import pytest

from ragcache.errors import MetadataError
from ragcache.store.places import Place, PlaceIndex, check_places, edited, place_text


@pytest.mark.parametrize("seed", range(20))
def test_a_passage_spans_the_places_of_its_characters(seed):
    """Passages in any order, as overlap makes them."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab \n") for _ in range(300)) + "end"
    starts = sorted(rng.sample(range(1, 300), 8))
    places = [
        Place(start, {"page": rank // 2} if rank % 3 else {}, rank % 2 * 10 * rank) for rank, start in enumerate(starts)
    ]
    held: list[dict[str, int]] = [{} for _ in text]
    for place, end in zip(places, [*starts[1:], len(text)], strict=True):
        for at in range(place.start, end):
            row = {"row": place.row + text.count("\n", place.start, at)} if place.row else {}
            held[at] = {**place.fields, **row}
    index = PlaceIndex(text, places)
    for _ in range(40):
        start, end = sorted(rng.sample(range(len(text) + 1), 2))
        if not text[start:end].strip():
            continue
        wanted: dict[str, int] = {}
        begin, stop = end - len(text[start:end].lstrip()), start + len(text[start:end].rstrip())
        for key in ("page", "row"):
            if seen := [of[key] for of in held[begin:stop] if key in of]:
                wanted |= {key: seen[0]} | ({f"last_{key}": seen[-1]} if seen[-1] != seen[0] else {})
        assert index.between(start, end) == wanted


def test_places_move_with_the_characters_before_them():
    text, places = edited(
        "\ufb01n\u00adal\ud800",
        [Place(0, {}), Place(1, {}), Place(4, {})],
        lambda part: part.translate({0xFB01: "fi", 0xAD: None}),
    )
    assert [text[place.start :] for place in places] == ["final\ud800", "nal\ud800", "l\ud800"]


@pytest.mark.parametrize("starts", [(-1,), (0, 0), (2, 1), (4,)])
def test_places_outside_the_text_are_refused(starts):
    with pytest.raises(MetadataError, match="rising offsets"):
        check_places("a.pdf", "abc", [Place(start, {}) for start in starts])


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"page": 2, "page_label": "3"}, "p. 3"),
        ({"page": 2, "page_label": "iii", "last_page": 4, "last_page_label": "v", "headings": ["A"]}, "pp. iii\u2013v"),
        ({"slide": 4}, "slide 4"),
        ({"sheet": "Q1", "row": 2, "last_row": 14}, "sheet Q1, rows 2\u201314"),
        ({"sheet": "Q1", "last_sheet": "Q2", "row": 2, "last_row": 3}, "sheets Q1\u2013Q2"),
        ({"headings": ["Travel", "Hotels", "Prices"]}, "Hotels \u203a Prices"),
        ({"headings": ["Travel"]}, ""),
        ({"page": 3, "sheet": 7, "slide": True, "headings": "no list"}, ""),  # somebody's own fields
        ({"headings": [1]}, ""),
    ],
)
def test_a_place_in_words(metadata, text):
    assert place_text(metadata, "Travel") == text
