"""Askers and writers of a soak: threads over one store, through the server and directly."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import OpenAI

import ragcache as rc
from benchmarks.soak_checks import ANSWERED, CANCELLED, FAILED, OPEN, PASSING, STAYING, Asked, Deleted, write_line
from ragcache.errors import CancelledError, StoreBusyError
from ragcache_eval.registry import DataSplit, answerable_questions, draw_world, write_document

MAX_TOKENS = 48
TIMEOUT_S = 120.0
# Of the questions that are streamed, those that are given up after their first piece.
CANCELLED_SHARE = 0.3
STREAMED_SHARE = 0.5
KINDS = {STAYING: 0.6, PASSING: 0.25, OPEN: 0.15}
MAX_CHANGED = 3
JOINED = 6
TURNS = 3


class Question(NamedTuple):
    """filter: of the documents that it is put to; None: all documents."""

    kind: str
    number: int
    text: str
    k: int
    filter: dict[str, Any] | None


class Corpus(NamedTuple):
    """staying, passing: documents; the passing ones get another id each time. questions: by kind."""

    staying: list[rc.Document]
    passing: list[rc.Document]
    questions: dict[str, list[Question]]


def draw_corpus(staying: int, passing: int, questions: int, seed: int) -> Corpus:
    """Draw a corpus of the bundled model's registry, in words and names that it has not seen.

    Every fourth passing document repeats a staying document, so that they share blocks; every fifth is long enough
    to be cut.
    """
    rng = random.Random(f"soak/{seed}")
    world = draw_world(rng, DataSplit.HELD_OUT, staying + passing)
    written = {name: write_document(rng, entity) for name, entity in world.entities.items()}
    names = list(written)
    stay, others = names[:staying], names[staying : staying + passing]
    asked = answerable_questions(rng, world, written.values(), DataSplit.HELD_OUT)
    rng.shuffle(asked)
    over_staying = [one for one in asked if set(one.gold) <= set(stay)][:questions]
    kept = [rc.Document(name, written[name].text, {"stays": True, "text": -1}, written[name].title) for name in stay]
    documents, about = [], []
    for number, name in enumerate(others):
        parts = [stay[number % staying]] if number % 4 == 3 else [name]
        parts += rng.sample(others, JOINED - 1) if number % 5 == 4 else []
        document = rc.Document(
            f"passing-{number:03d}", "\n\n".join(written[part].text for part in parts),
            {"stays": False, "text": number}, written[parts[0]].title,
        )  # fmt: skip
        documents.append(document)
        about.append(next(one.text for one in asked if one.gold == (parts[0],)))
    return Corpus(
        kept,
        documents,
        {
            STAYING: [Question(STAYING, n, one.text, 4, {"stays": True}) for n, one in enumerate(over_staying)],
            PASSING: [Question(PASSING, n, text, 4, {"text": n}) for n, text in enumerate(about)],
            OPEN: [Question(OPEN, n, text, 6, None) for n, text in enumerate(about)],
        },
    )


class Journal:
    """Records of a run on disk, so that the run itself holds none in memory; and its clock."""

    def __init__(self, directory: Path) -> None:
        self.asked_path, self.deleted_path = directory / "asked.jsonl", directory / "deleted.jsonl"
        self._asked = self.asked_path.open("w", encoding="utf-8")
        self._deleted = self.deleted_path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self.questions = self.failures = self.added = self.deleted = self.busy = 0
        self.failed_changes: list[str] = []

    def now(self) -> float:
        return time.monotonic() - self._started

    def note(self, asked: Asked) -> None:
        with self._lock:
            self.questions += 1
            self.failures += asked.outcome == FAILED
            write_line(self._asked, asked)

    def note_deleted(self, ids: Sequence[str], at: float) -> None:
        with self._lock:
            self.deleted += len(ids)
            for id in ids:
                write_line(self._deleted, Deleted(id, at))

    def count(self, *, added: int = 0, busy: int = 0) -> None:
        with self._lock:
            self.added += added
            self.busy += busy

    def note_failed_change(self, what: str) -> None:
        with self._lock:
            self.failed_changes.append(what)

    def close(self) -> None:
        self._asked.close()
        self._deleted.close()


@dataclass
class Heard:
    """What came of a question so far."""

    text: str = ""
    sources: tuple[str, ...] = ()
    ttft_s: float | None = None


class Door(ABC):
    """A way into the knowledge base."""

    via: str

    @abstractmethod
    def ask(self, question: Question, method: str, heard: Heard) -> None:
        """Ask for the whole answer at once."""

    @abstractmethod
    def stream(self, question: Question, method: str, heard: Heard, *, give_up: bool) -> bool:
        """Ask for the answer piece by piece; with give_up, hang up after the first. Returns whether it was given up."""

    @abstractmethod
    def add(self, documents: Sequence[rc.Document]) -> None:
        """Add documents. Raises StoreBusyError, and RuntimeError if some were not stored."""

    @abstractmethod
    def delete(self, id: str) -> None:
        """Delete a document. Raises StoreBusyError."""

    @abstractmethod
    def tier_bytes(self) -> int:
        """Return the bytes that its tiers above the disk hold."""


@dataclass
class EngineDoor(Door):
    """The engine of this process."""

    kb: rc.RagCache
    via: str = "engine"

    def ask(self, question: Question, method: str, heard: Heard) -> None:
        self._take(self.kb.chat(*self._asked(question), **self._options(question, method)), heard)

    def stream(self, question: Question, method: str, heard: Heard, *, give_up: bool) -> bool:
        cancelled = threading.Event()
        options = {**self._options(question, method), "cancelled": cancelled}
        try:
            for event in self.kb.stream_chat(*self._asked(question), **options):
                if isinstance(event, rc.Sources):
                    heard.sources = tuple(hit.chunk.document_id for hit in event.hits)
                elif isinstance(event, rc.Token):
                    heard.text += event.text
                    if give_up:
                        cancelled.set()
                else:
                    self._take(event.answer, heard)
        except CancelledError:
            return True
        return False

    def add(self, documents: Sequence[rc.Document]) -> None:
        report = self.kb.ingest(documents)
        if report.failed:
            raise RuntimeError(f"not stored: {report.failed}")

    def delete(self, id: str) -> None:
        self.kb.delete(id)

    def tier_bytes(self) -> int:
        return _volatile(self.kb.info().bytes_by_tier)

    def _asked(self, question: Question) -> tuple[list[dict[str, str]]]:
        return ([{"role": "user", "content": question.text}],)

    def _options(self, question: Question, method: str) -> dict[str, Any]:
        sampling = rc.Sampling(max_tokens=MAX_TOKENS)
        return {"k": question.k, "filter": question.filter, "method": method, "sampling": sampling}

    def _take(self, answer: rc.Answer, heard: Heard) -> None:
        heard.text = answer.text
        heard.sources = tuple(hit.chunk.document_id for hit in answer.hits)
        heard.ttft_s = answer.timings.ttft_s


class ServerDoor(Door):
    """OpenAI's client, and plain HTTP for documents. Nothing is tried again in silence."""

    via = "server"

    def __init__(self, url: str, model: str) -> None:
        # Not by way of a proxy that the environment may name.
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self._model = model
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=self._http)

    def ask(self, question: Question, method: str, heard: Heard) -> None:
        answer = self._client.chat.completions.create(**self._request(question, method))
        heard.text = answer.choices[0].message.content or ""
        self._take(answer.ragcache, heard)  # type: ignore[attr-defined]

    def stream(self, question: Question, method: str, heard: Heard, *, give_up: bool) -> bool:
        stream = self._client.chat.completions.create(**self._request(question, method), stream=True)
        try:
            for chunk in stream:
                self._take(getattr(chunk, "ragcache", None) or {}, heard)
                heard.text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if give_up and heard.text:
                    return True
        finally:
            stream.close()
        return False

    def add(self, documents: Sequence[rc.Document]) -> None:
        listed = [
            {"id": one.id, "text": one.text, "metadata": dict(one.metadata), "title": one.title} for one in documents
        ]
        report = self._checked(self._http.post("/v1/documents", json={"documents": listed}))
        if report["failed"]:
            raise RuntimeError(f"not stored: {report['failed']}")

    def delete(self, id: str) -> None:
        self._checked(self._http.delete(f"/v1/documents/{id}"))

    def tier_bytes(self) -> int:
        return _volatile(self._checked(self._http.get("/v1/store"))["bytes_by_tier"])

    def close(self) -> None:
        self._client.close()

    def _request(self, question: Question, method: str) -> dict[str, Any]:
        asked = {"k": question.k, "filter": question.filter, "method": method}
        extension = {name: value for name, value in asked.items() if value is not None}
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": MAX_TOKENS,
            "extra_body": {"ragcache": extension},
        }

    def _take(self, said: dict[str, Any], heard: Heard) -> None:
        if said.get("sources") is not None:
            heard.sources = tuple(source["document_id"] for source in said["sources"])
        if said.get("timings"):
            heard.ttft_s = said["timings"]["ttft_s"]

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code == 409:
            raise StoreBusyError(response.text)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found


def _volatile(bytes_by_tier: Mapping[str, int]) -> int:
    return sum(held for tier, held in bytes_by_tier.items() if tier != "disk")


@dataclass
class Pace:
    """Waits between two actions, of `mean_s` on average, and when to stop."""

    mean_s: float
    stop: threading.Event

    def wait(self, rng: random.Random) -> bool:
        """Wait. Returns whether to continue."""
        return not self.stop.wait(rng.uniform(0.5, 1.5) * self.mean_s)


@dataclass
class Asker:
    """A user. changing: numbers of the passing documents changed lately, the last at the end."""

    number: int
    door: Door
    corpus: Corpus
    methods: Sequence[str]
    journal: Journal
    changing: Recent
    seed: int

    def run(self, pace: Pace) -> None:
        rng = random.Random(f"{self.seed}/{self.number}")
        while pace.wait(rng):
            self.ask_one(rng)

    def ask_one(self, rng: random.Random) -> None:
        question, method = self._choose(rng), rng.choice(self.methods)
        streamed = rng.random() < STREAMED_SHARE
        give_up = streamed and rng.random() < CANCELLED_SHARE
        heard, error, outcome = Heard(), "", ANSWERED
        sent_at = self.journal.now()
        try:
            if not streamed:
                self.door.ask(question, method, heard)
            elif self.door.stream(question, method, heard, give_up=give_up):
                outcome = CANCELLED
        except Exception as problem:  # whatever it is: it is counted, and the run goes on
            outcome, error = FAILED, f"{type(problem).__name__}: {problem}"
        took_s = self.journal.now() - sent_at
        told = (heard.ttft_s, heard.text, heard.sources, error)
        whom = (self.number, self.door.via, question.kind, question.number, method)
        self.journal.note(Asked(*whom, streamed, outcome, sent_at, took_s, *told))

    def _choose(self, rng: random.Random) -> Question:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        own = self.corpus.questions[kind]
        lately = self.changing.numbers()
        # Mostly documents that are being changed: a question during the removal is the case to test.
        if kind != STAYING and lately and rng.random() < 0.7:
            return own[rng.choice(lately)]
        return rng.choice(own)


class Recent:
    """The last few passing documents that were added or deleted."""

    def __init__(self, most: int = 12) -> None:
        self._numbers: list[int] = []
        self._most = most
        self._lock = threading.Lock()

    def push(self, number: int) -> None:
        with self._lock:
            self._numbers = [*self._numbers, number][-self._most :]

    def numbers(self) -> list[int]:
        with self._lock:
            return list(self._numbers)


@dataclass
class Changer:
    """Adds and deletes its share of the passing documents; about half of these are there at any time.

    living: number of a document -> the id that it has this time
    """

    door: Door
    documents: dict[int, rc.Document]
    journal: Journal
    changing: Recent
    seed: str
    living: dict[int, str] = field(default_factory=dict)
    lives: int = 0

    def run(self, pace: Pace) -> None:
        rng = random.Random(self.seed)
        while pace.wait(rng):
            self.change(rng)

    def change(self, rng: random.Random) -> None:
        if len(self.living) > rng.uniform(0.3, 0.7) * len(self.documents):
            number = rng.choice(sorted(self.living))
            with self._counted("delete", [number]):
                self.remove(number)
            return
        absent = sorted(set(self.documents) - set(self.living))
        numbers = rng.sample(absent, min(len(absent), rng.randint(1, MAX_CHANGED)))
        with self._counted("add", numbers):
            self.add(numbers)

    def add(self, numbers: Sequence[int]) -> None:
        self.lives += 1
        ids = {number: f"{self.documents[number].id}-{self.lives:05d}" for number in numbers}
        for number in numbers:
            self.changing.push(number)
        self.door.add([replace(self.documents[number], id=id) for number, id in ids.items()])
        self.living |= ids
        self.journal.count(added=len(ids))

    def remove(self, number: int) -> None:
        self.changing.push(number)
        self.door.delete(self.living[number])
        at = self.journal.now()
        self.journal.note_deleted([self.living.pop(number)], at)

    def remove_all(self) -> None:
        """Remove all at the end of the run: a turn each, or a few while another writer is busy."""
        for number in [*self.living] * TURNS:
            if number in self.living:
                with self._counted("delete", [number]):
                    self.remove(number)

    @contextmanager
    def _counted(self, what: str, numbers: Sequence[int]) -> Iterator[None]:
        """Another writer is no error: the next turn tries again."""
        try:
            yield
        except StoreBusyError:
            self.journal.count(busy=1)
        except Exception as problem:
            self.journal.note_failed_change(f"{what} {numbers}: {type(problem).__name__}: {problem}")
