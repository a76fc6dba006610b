"""What a suite is: a paper's table as data. The sets that are its columns, its methods, and its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ragcache.errors import ConfigError, check_choice
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.methods import MethodSpec
from ragcache_eval.sources import QuestionLine

Cut = Callable[[str], Sequence[str]]
"""Cuts a long text into passages."""
Form = Callable[[Mapping[str, Any], str, Cut], QuestionLine | None]
"""Reads a row of a set: its fields, where it stands, and how to cut. None for a row that asks nothing."""


@dataclass(frozen=True)
class Column:
    """name: in --data and in file names; title: what the paper calls it; unit: what it writes for a score of 1"""

    name: str
    title: str
    unit: float = 100.0


@dataclass(frozen=True)
class Download:
    """The arguments of `datasets.load_dataset`."""

    path: str
    config: str | None = None
    split: str = "train"
    data_files: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class QuestionSet(Column):
    """A column whose questions are asked here: generated, or rows of a file or of the hub.

    metric:     of set_metrics.METRICS
    max_tokens: longest answer
    asked:      what the model is told behind the passages, with {question} in it; "": the bare question
    generated:  a source of `load_cases` with {length} and {passage} in it, in place of all that follows
    form:       reads a row
    files:      names that its file may have in a directory, without their endings
    download:   None: there is no public copy in this form
    by_hand:    where a person gets the file, for messages
    questions:  the first so many rows, where the paper takes no more
    filled:     passages of other questions are added up to the length asked for (RULER)
    """

    metric: str
    max_tokens: int
    asked: str = ""
    generated: str = ""
    form: Form | None = None
    files: tuple[str, ...] = ()
    download: Download | None = None
    by_hand: str = ""
    questions: int | None = None
    filled: bool = False

    @property
    def question_format(self) -> str | None:
        """For `prompt_format`: what is asked says it all, or the model's own format."""
        return "{question}" if self.asked else None

    def ask(self, case: Case) -> Case:
        """The case with this set's words and metric."""
        question = self.asked.replace("{question}", case.question) if self.asked else case.question
        return replace(case, question=question, metric=self.metric)


class PaperRow(NamedTuple):
    """scores: in the order of the suite's columns, in the paper's units; the last columns may have none"""

    model: str
    method: str
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Suite:
    """A paper's table.

    table:   where it stands
    methods: as `parse_methods` reads them; those that the model cannot use are left out, and named
    names:   the paper's methods by label or name of ours, or by name and link tokens, as in "link K=5"
    average: whether the mean over the columns says anything
    note:    what is not as in the paper
    """

    name: str
    table: str
    columns: tuple[Column, ...]
    methods: tuple[str, ...] = ()
    rows: tuple[PaperRow, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    average: bool = False
    note: str = ""

    def chosen(self, names: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these names, all where there are none. Raises ConfigError for a name that is not there."""
        for name in names:
            check_choice(f"--data of suite {self.name}", name, [column.name for column in self.columns])
        return tuple(column for column in self.columns if not names or column.name in names)

    def paper_rows(self, spec: MethodSpec, link_tokens: int = 0) -> list[PaperRow]:
        """What the paper has for a method of ours. link_tokens: that it runs behind each passage"""
        keys = (spec.label, f"{spec.name} K={link_tokens}", spec.name)
        theirs = next((self.names[key] for key in keys if key in self.names), ())
        return [row for row in self.rows if row.method in theirs]


# The forms that public sets have, row by row, as cases.


RETRIEVED = 10
EXAMPLES_AT_ONCE = 2000  # characters of short examples that make one passage


def sentences(row: Mapping[str, Any], where: str, _cut: Cut) -> QuestionLine:
    """HotpotQA and 2WikiMultiHopQA: a context of titles with their sentences, as a table or as pairs, or JSON of it."""
    texts = _pairs(_field(row, "context", where), "title", "sentences", where)
    gold = {title for title, _ in _pairs(row.get("supporting_facts") or [], "title", "sent_id", where)}
    passages = [CasePassage(" ".join(map(str.strip, found)), title, title in gold) for title, found in texts]
    return _line(row, where, row.get("question"), passages, [row.get("answer")])


def paragraphs(row: Mapping[str, Any], where: str, _cut: Cut) -> QuestionLine | None:
    """MuSiQue; questions that its paragraphs do not answer are left out."""
    if row.get("answerable") is False:
        return None
    found = _field(row, "paragraphs", where)
    passages = [CasePassage(p["paragraph_text"], p.get("title", ""), bool(p.get("is_supporting"))) for p in found]
    return _line(row, where, row.get("question"), passages, [row.get("answer"), *(row.get("answer_aliases") or [])])


def retrieved(row: Mapping[str, Any], where: str, _cut: Cut) -> QuestionLine:
    """Lost in the Middle's NQ and FiD's TriviaQA: the first ten retrieved passages. Where one is known to be gold it
    is asked for at every position."""
    found = _field(row, "ctxs", where)[:RETRIEVED]
    passages = [CasePassage(c["text"], c.get("title", ""), c.get("isgold")) for c in found]
    positions = list(range(len(passages))) if sum(p.is_gold is True for p in passages) == 1 else None
    return _line(row, where, row.get("question"), passages, row.get("answers") or [], gold_positions=positions)


def paragraph(row: Mapping[str, Any], where: str, _cut: Cut) -> QuestionLine | None:
    """SQuAD 2.0: one paragraph of an article; questions that it does not answer are left out."""
    answers = _field(row, "answers", where).get("text") or []
    if not len(answers):
        return None
    passages = [CasePassage(_field(row, "context", where), is_gold=True)]
    return _line(row, where, row.get("question"), passages, answers, article=row.get("title"))


def longbench(at: str = "", *, together: bool = False) -> Form:
    """LongBench: one long context, cut into its passages or examples.

    at:       a regular expression where each begins; what it matches is left out. Without one, and where a context has
              no such place, the context is cut by length
    together: short ones are put together
    """

    def read(row: Mapping[str, Any], where: str, cut: Cut) -> QuestionLine:
        context = _field(row, "context", where)
        pieces = [piece for piece in re.split(at, context, flags=re.M) if piece.strip()] if at else []
        texts = _joined(pieces) if together else pieces
        passages = [CasePassage(text.strip("\n")) for text in (texts if len(texts) > 1 else cut(context))]
        question = str(row.get("input") or "").strip() or "-"  # a summary is asked for by the set's own words
        return _line(row, where, question, passages, row.get("answers") or [], row.get("all_classes") or [])

    return read


def _joined(pieces: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for piece in pieces:
        if joined and len(joined[-1]) + len(piece) <= EXAMPLES_AT_ONCE:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _line(
    row: Mapping[str, Any],
    where: str,
    question: Any,
    passages: Sequence[CasePassage],
    answers: Sequence[Any],
    classes: Sequence[str] = (),
    **meta: Any,
) -> QuestionLine:
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f"{where}: there is no question in it; is it another set's file?")
    golden = tuple(answer for answer in answers if isinstance(answer, str) and answer.strip())
    if not golden or not all(isinstance(passage.text, str) for passage in passages):
        raise ConfigError(f"{where}: it has no answers, or passages that are no texts; is it another set's file?")
    kept = tuple(passage for passage in passages if passage.text.strip())
    name = str(row.get("id") or row.get("_id") or where)
    return QuestionLine(Case(name, question.strip(), kept, golden, classes=tuple(classes)), meta)


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise ConfigError(f"{where}: it has no {name!r}; is it another set's file?")
    return row[name]


def _pairs(value: Any, first: str, second: str, where: str) -> list[tuple[str, Any]]:
    """Pairs of a table with two columns, of a list of pairs, or of either written as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        rows = zip(found[first], found[second], strict=True) if isinstance(found, Mapping) else found
        return [(str(title), other) for title, other in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where}: no pairs of {first} and {second} in it ({error}); is it another set's file?"
        ) from error
