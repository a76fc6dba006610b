"""Questions by name ("nq10", "registry:hops=2,passages=8", "pages:kind=leaning"), or a file of JSON lines."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError, check_least
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.haystack import CountTokens, NeedleSettings, needle_cases
from ragcache_eval.metrics import BM25
from ragcache_eval.registry import PagesSettings, RegistrySettings, pages_cases, registry_cases
from ragcache_eval.ruler import RulerSettings, ruler_cases
from ragcache_eval.settings import check_setting, make, split_settings

GENERATED = ("registry", "pages", "needle", "ruler")


def load_cases(
    source: str, count_tokens: CountTokens, *, directory: Path | None = None, limit: int | None = None
) -> list[Case]:
    """The cases of a source.

    source:       a file; the name of a set in `directory`; or one of GENERATED; with settings behind ":"
    count_tokens: tokens of a text, for generators that fill a context of a given length
    limit:        questions to take; of generators with several cells, questions a cell

    Raises ConfigError naming what there is, the setting that is wrong, or the line that is no question.
    """
    path = Path(source)
    if path.is_file():
        return [entry.case for entry in read_entries(path)[:limit]]
    name, _, tail = source.partition(":")
    given = split_settings(tail)
    if name == "registry":
        return registry_cases(make(RegistrySettings, given, name), limit)
    if name == "pages":
        return pages_cases(make(PagesSettings, given, name), limit)
    if name == "needle":
        return needle_cases(make(NeedleSettings, given, name), count_tokens, limit)
    if name == "ruler":
        return ruler_cases(make(RulerSettings, given, name), count_tokens, limit)
    if directory is None:
        raise ConfigError(
            f"{source!r} is neither a file nor one of {', '.join(GENERATED)}; name a directory of sets (--data-dir)"
        )
    return public_cases(name, directory, make(PublicSettings, given, name), limit)


# Questions as JSON lines, a user's own or a public set's; plain or gzip.


@dataclass(frozen=True)
class QuestionLine:
    """A line: the case as it stands, and what the set says about it."""

    case: Case
    meta: Mapping[str, Any]


def read_entries(path: Path) -> list[QuestionLine]:
    """Raises ConfigError naming the file or the line that is no question, and why."""
    entries: list[QuestionLine] = []
    seen: dict[str, str] = {}
    for fields, where in read_objects(path):
        entry = read_entry(fields, where)
        if entry.case.id in seen:
            raise ConfigError(f"{where}: id {entry.case.id!r} stands in {seen[entry.case.id]} too; ids must differ")
        seen[entry.case.id] = where
        entries.append(entry)
    if not entries:
        raise ConfigError(f"{path}: there is no question in it")
    return entries


def read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Every line's object and where it stands. Raises ConfigError."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                where = f"{path.name}, line {number}"
                if line.strip():
                    yield _object(line, where), where
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: not a JSON object")
    return value


def read_entry(fields: Mapping[str, Any], where: str) -> QuestionLine:
    """One line's object. Raises ConfigError."""
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{where}: there is no question; give it a text 'question'")
    meta = fields.get("meta") or {}
    if not isinstance(meta, dict):
        raise ConfigError(f"{where}: 'meta' is not an object")
    documents = fields.get("documents", fields.get("passages", []))
    if not isinstance(documents, list):
        raise ConfigError(f"{where}: 'documents' is not a list of passages")
    passages = tuple(_passage(document, where) for document in documents)
    name = str(fields.get("id") or where)
    return QuestionLine(Case(name, question.strip(), passages, _answers(fields, where), cell=_cell(meta)), meta)


def _passage(document: Any, where: str) -> CasePassage:
    fields = {"text": document} if isinstance(document, str) else document
    text = fields.get("text") if isinstance(fields, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: a passage has no text; give each as a text or as an object with 'text'")
    is_gold = fields.get("is_gold")
    return CasePassage(text, str(fields.get("title") or ""), is_gold if isinstance(is_gold, bool) else None)


def _answers(fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    given = fields.get("answers", fields.get("answer", []))
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError(f"{where}: 'answers' is not a list of texts")
    return tuple(answer for answer in answers if answer.strip())


def _cell(meta: Mapping[str, Any]) -> dict[str, str | int]:
    hops = meta.get("hops")
    return {"hops": hops} if isinstance(hops, int) else {}


# Public question sets by name, from a directory of JSON lines.


ENDINGS = (".questions.jsonl.gz", ".questions.jsonl", ".jsonl.gz", ".jsonl")
DISTRACTORS = ("near", "random")
CORPUS_PASSAGES = 10


@dataclass(frozen=True)
class PublicSettings:
    """How a set is read.

    split:       folder of the questions below the directory
    positions:   where the gold passage goes: "each" place, one after another (those that the set names, if
                 any), "0/4/9", or "given" to leave the order alone; "" is "each" for sets that name positions and
                 "given" for others
    passages:    passages a question, gold ones included; 0: all that the set brings, and 10 of a corpus
    joined:      so many passages in a row are read as one, each below its title
    distractors: of a corpus set, the others: "near" the question by BM25, or "random"
    seed:        of random distractors and of the order of corpus passages
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
    """Names of the question sets that a directory holds."""
    files = {path.name for folder in _folders(directory, split) if folder.is_dir() for path in folder.iterdir()}
    found = {name.removesuffix(ending) for name in files for ending in ENDINGS if name.endswith(ending)}
    return sorted(name for name in found if not name.endswith(".questions"))


def public_cases(name: str, directory: Path, settings: PublicSettings, limit: int | None = None) -> list[Case]:
    """The first `limit` questions of a set, each at every position asked for.

    Raises ConfigError naming the sets that there are.
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
    """The case with `count` of its passages: gold ones first, all in their own order."""
    ranked = sorted(range(len(case.passages)), key=lambda rank: case.passages[rank].is_gold is not True)
    return replace(case, passages=tuple(case.passages[rank] for rank in sorted(ranked[: count or None])))


def _joined(case: Case, count: int) -> Case:
    """The case with each `count` passages in a row as one: the same text, in longer passages."""
    if count == 1:
        return case
    groups = [case.passages[first : first + count] for first in range(0, len(case.passages), count)]
    gold = [max((one.is_gold for one in group), key=bool) for group in groups]
    texts = ["".join(one.rendered() for one in group) for group in groups]
    return replace(case, passages=tuple(CasePassage(text, "", has) for text, has in zip(texts, gold, strict=True)))


class _Corpus:
    """Passages by id, and a ranking of them that is made when first wanted."""

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
        """The case with its gold passages and distractors, in an order drawn for its id."""
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
    """The case with its gold passage at each of `positions`, as PublicSettings names them."""
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
