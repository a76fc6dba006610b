"""The forms that public sets have, row by row, as cases."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragcache.errors import ConfigError
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.question_files import QuestionLine
from ragcache_eval.suites.base import Cut, Form

RETRIEVED = 10
EXAMPLES_AT_ONCE = 2000  # characters of short examples that make a passage


def sentences(row: Mapping[str, Any], where: str, _cut: Cut) -> QuestionLine:
    """Read HotpotQA and 2WikiMultiHopQA: a context of titles with sentences, as a table, pairs, or JSON of either."""
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
    """Read Lost in the Middle's NQ and FiD's TriviaQA: the first ten retrieved passages.

    A single known gold passage is placed at every position.
    """
    found = _field(row, "ctxs", where)[:RETRIEVED]
    passages = [CasePassage(c["text"], c.get("title", ""), c.get("isgold")) for c in found]
    positions = list(range(len(passages))) if sum(p.is_gold is True for p in passages) == 1 else None
    return _line(row, where, row.get("question"), passages, row.get("answers") or [], gold_positions=positions)


def longbench(at: str = "", *, together: bool = False) -> Form:
    """Return the form of LongBench: a single long context, cut into its passages or examples.

    at:       a regular expression that matches where each begins; the match is left out. Without it, or if a context
              has no match, the context is cut by length
    together: short ones are joined
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
    """Return pairs of a table with two columns, of a list of pairs, or of either written as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        rows = zip(found[first], found[second], strict=True) if isinstance(found, Mapping) else found
        return [(str(title), other) for title, other in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{where}: no pairs of {first} and {second} in it ({error}); is it another set's file?"
        ) from error
