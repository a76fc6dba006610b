"""Public question sets by name, from a directory of JSON lines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragcache.errors import ConfigError, check_least
from ragcache_eval.bm25 import BM25
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.question_files import QuestionLine, read_entries, read_objects
from ragcache_eval.settings import check_setting

ENDINGS = (".questions.jsonl.gz", ".questions.jsonl", ".jsonl.gz", ".jsonl")
DISTRACTORS = ("near", "random")
CORPUS_PASSAGES = 10


@dataclass(frozen=True)
class PublicSettings:
    """How a set is read.

    split:       folder of the questions below the directory
    positions:   positions of the gold passage, each of which makes a case: "0/4/9", "each" for all positions (those
                 that the set names, if it names any), or "given" to leave the order alone; "" is "each" for sets that
                 name positions and "given" for others
    passages:    passages per question, gold passages included; 0: all that the set gives, or 10 from a corpus
    joined:      number of consecutive passages that are joined into one, each below its title
    distractors: how a set with a corpus gets its other passages: "near" the question by BM25, or "random"
    seed:        seed of random distractors and of the order of passages from a corpus
    """

    split: str = "dev"
    positions: str = ""
    passages: int = 0
    joined: int = 1
    distractors: str = "near"
    seed: int = 0

    def __post_init__(self) -> None:
        check_setting("distractors", self.distractors, DISTRACTORS)
        check_least("joined", self.joined, 1)
        if self.passages < 0:
            raise ConfigError(f"passages={self.passages} is no number of passages; choose 1 or more, or 0 for all")


def public_names(directory: Path, split: str = "dev") -> list[str]:
    """Return the names of the question sets in a directory."""
    files = {path.name for folder in _folders(directory, split) if folder.is_dir() for path in folder.iterdir()}
    found = {name.removesuffix(ending) for name in files for ending in ENDINGS if name.endswith(ending)}
    return sorted(name for name in found if not name.endswith(".questions"))


def public_cases(name: str, directory: Path, settings: PublicSettings, limit: int | None = None) -> list[Case]:
    """Return the first `limit` questions of a set, each at every requested position.

    Raises ConfigError, which names the available sets, if there is no such set.
    """
    entries = read_entries(_find(name, directory, settings.split))[:limit]
    filled = _from_corpus(entries, directory, settings)
    return [_joined(case, settings.joined) for entry in filled for case in at_positions(entry, settings.positions)]


def _folders(directory: Path, split: str) -> tuple[Path, Path]:
    return directory / split, directory


def _find(name: str, directory: Path, split: str) -> Path:
    for folder in _folders(directory, split):
        for ending in ENDINGS:
            if (folder / f"{name}{ending}").is_file():
                return folder / f"{name}{ending}"
    known = ", ".join(public_names(directory, split))
    raise ConfigError(f"{directory} has no question set {name!r}; it has {known or 'none'}")


def _from_corpus(entries: Sequence[QuestionLine], directory: Path, settings: PublicSettings) -> Iterator[QuestionLine]:
    corpora: dict[str, _Corpus] = {}
    for entry in entries:
        if entry.case.passages:
            yield replace(entry, case=_fewer(entry.case, settings.passages))
            continue
        name = entry.meta.get("corpus")
        if not isinstance(name, str) or not entry.meta.get("gold_ids"):
            raise ConfigError(f"{entry.case.id}: no passages, and no meta.corpus with meta.gold_ids to take them from")
        if name not in corpora:
            corpora[name] = _Corpus.read(name, directory)
        yield replace(entry, case=corpora[name].fill(entry, settings))


def _fewer(case: Case, count: int) -> Case:
    """Return the case with `count` of its passages: gold passages first, all in their own order."""
    ranked = sorted(range(len(case.passages)), key=lambda rank: case.passages[rank].is_gold is not True)
    return replace(case, passages=tuple(case.passages[rank] for rank in sorted(ranked[: count or None])))


def _joined(case: Case, count: int) -> Case:
    """Return the case with each `count` passages in a row joined: the same text, in longer passages."""
    if count == 1:
        return case
    groups = [case.passages[first : first + count] for first in range(0, len(case.passages), count)]
    gold = [max((one.is_gold for one in group), key=bool) for group in groups]
    texts = ["".join(one.rendered() for one in group) for group in groups]
    return replace(case, passages=tuple(CasePassage(text, "", has) for text, has in zip(texts, gold, strict=True)))


class _Corpus:
    """Passages by id, and their ranking, which is computed on first use."""

    def __init__(self, name: str, passages: Mapping[str, CasePassage]) -> None:
        self.name = name
        self.passages = passages
        self.ids = list(passages)
        self._ranking: BM25 | None = None

    @classmethod
    def read(cls, name: str, directory: Path) -> _Corpus:
        for folder in (directory / "corpus", directory):
            for ending in (".jsonl.gz", ".jsonl"):
                if (path := folder / f"{name}{ending}").is_file():
                    return cls(name, dict(_rows(path)))
        raise ConfigError(f"{directory} has no corpus {name!r}; put it at {directory / 'corpus' / name}.jsonl.gz")

    def fill(self, entry: QuestionLine, settings: PublicSettings) -> Case:
        """Return the case with its gold passages and distractors, in an order drawn for its id."""
        gold = [str(one) for one in entry.meta["gold_ids"]]
        absent = [one for one in gold if one not in self.passages]
        if absent:
            raise ConfigError(f"{entry.case.id}: corpus {self.name} has no passage {absent[0]!r}")
        rng = random.Random(f"{settings.seed}/{entry.case.id}")
        others = self._others(entry.case.question, rng, settings)
        count = settings.passages or CORPUS_PASSAGES
        gold = gold[:count]
        chosen = [*gold, *[one for one in others if one not in entry.meta["gold_ids"]][: count - len(gold)]]
        rng.shuffle(chosen)
        passages = tuple(self.passages[one]._replace(is_gold=one in gold) for one in chosen)
        return replace(entry.case, passages=passages)

    def _others(self, question: str, rng: random.Random, settings: PublicSettings) -> list[str]:
        if settings.distractors == "random":
            return rng.sample(self.ids, len(self.ids))
        if self._ranking is None:
            self._ranking = BM25([f"{p.title} {p.text}" for p in self.passages.values()])
        return [self.ids[place] for place in self._ranking.ranked(question)]


def _rows(path: Path) -> Iterator[tuple[str, CasePassage]]:
    for fields, where in read_objects(path):
        if not isinstance(fields.get("text"), str) or "id" not in fields:
            raise ConfigError(f"{where}: a corpus row has 'id' and a text 'text'")
        yield str(fields["id"]), CasePassage(fields["text"], str(fields.get("title") or ""))


def at_positions(entry: QuestionLine, positions: str) -> list[Case]:
    """Return the case with its gold passage at each of `positions`, as PublicSettings names them."""
    stated = entry.meta.get("gold_positions")
    if positions == "given" or (not positions and not stated):
        return [entry.case]
    if positions in ("", "each"):
        there = range(len(entry.case.passages))
        places = [int(place) for place in stated if int(place) in there] if stated else list(there)
    else:
        places = _numbers(positions)
    return [entry.case.with_gold_at(place) for place in places]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split("/")]
    except ValueError as error:
        raise ConfigError(f"positions={text} is unknown; write each, given, or numbers like 0/4/9") from error
