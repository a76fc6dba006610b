"""Questions made from passages, for users without questions: complete a sentence, given its first half."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ragcache.errors import ConfigError
from ragcache.ingest.sentences import split_sentences
from ragcache_eval.case import Case, CasePassage

MIN_WORDS, MAX_WORDS = 8, 40
QUESTION = 'How does this sentence of the text above go on? "{start} ..."'


def completion_cases(
    texts: Sequence[str],
    *,
    questions: int,
    passages: int,
    seed: int = 0,
    behind: Sequence[tuple[str, ...]] | None = None,
) -> list[Case]:
    """Return cases over the given chunk texts, each of which asks to complete a sentence of a chunk.

    A case's passages are this chunk and other chunks, in an order drawn by `seed`; all chunks if there are fewer than
    `passages`. The same texts and seed give the same cases. Raises ConfigError if no chunk has a sentence of 8 to 40
    words.

    behind: for each chunk, the texts that precede it when it is encoded; None: no texts
    """
    rng = random.Random(f"completion/{seed}")
    places = [place for place, text in enumerate(texts) if next(_usable(text), None)]
    if not places:
        raise ConfigError(f"none of {len(texts)} passages has a sentence to ask about; give questions of your own")
    rng.shuffle(places)
    cases = []
    for number in range(questions):
        place = places[number % len(places)]
        words = rng.choice(list(_usable(texts[place]))).split()
        others = [other for other in range(len(texts)) if other != place]
        chosen = [place, *rng.sample(others, min(passages - 1, len(others)))]
        rng.shuffle(chosen)
        start, rest = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
        near = ((),) * len(texts) if behind is None else behind
        found = tuple(CasePassage(texts[one], is_gold=one == place, behind=near[one]) for one in chosen)
        cases.append(Case(f"completion-{number:04d}", QUESTION.format(start=start), found, (rest,)))
    return cases


def _usable(text: str) -> Iterator[str]:
    """Yield sentences without a line break that are neither short nor long."""
    for sentence in split_sentences(text):
        if "\n" not in sentence.strip() and MIN_WORDS <= len(sentence.split()) <= MAX_WORDS:
            yield sentence.strip()
