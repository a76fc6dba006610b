"""Conversations that keep the passages of their earlier turns."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.engine.conversation import Conversation, Given, Said, Slot
from ragcache.errors import PromptError
from ragcache.kv.block_key import digest
from ragcache.prompt import Part, Passages, Text, encode_rendered, encode_text
from ragcache.retrieval.retriever import Hit
from ragcache.store.documents import DocumentStore

REMEMBERED_TURNS = 16384
SPACES = ("\u2581", "\u0120")


@dataclass(frozen=True)
class History:
    """Everything read before this turn's passages in a conversation: texts, and groups of passages, in order.

    again: passages of this turn that earlier turns have, too
    stays: number of parts at the beginning whose passages are never dropped: those of system messages
    """

    parts: tuple[Text | tuple[Hit, ...], ...]
    again: tuple[Hit, ...] = ()
    stays: int = 0

    @property
    def hits(self) -> list[Hit]:
        return [hit for part in self.parts if not isinstance(part, Text) for hit in part]

    def prompt_parts(self) -> list[Part]:
        return [
            part if isinstance(part, Text) else Passages(tuple(tuple(hit.chunk.token_ids) for hit in part))
            for part in self.parts
        ]

    def without_oldest(self) -> History | None:
        """Return the history without the passages of the oldest turn that has any, or None if no turn has any."""
        for place, part in enumerate(self.parts):
            if place >= self.stays and not isinstance(part, Text):
                return replace(self, parts=self.parts[:place] + self.parts[place + 1 :])
        return None

    def knowing(self, hits: Sequence[Hit]) -> tuple[History, list[Hit]]:
        """Split the hits into those that this history holds already and new hits.

        Returns this history with the former as `again`, and the new hits.
        """
        held = {tuple(hit.chunk.token_ids) for hit in self.hits}
        again = tuple(hit for hit in hits if tuple(hit.chunk.token_ids) in held)
        return replace(self, again=again), [hit for hit in hits if tuple(hit.chunk.token_ids) not in held]


class KeptTurn(NamedTuple):
    """An answer and its sources: (vector id, score) of each passage, and the answer's ids."""

    passages: tuple[tuple[int, float], ...]
    answer_ids: tuple[int, ...]


@dataclass(eq=False, repr=False)
class ConversationCache:
    """Passages and ids of answers, keyed by the conversation up to each answer. Holds no text. Thread-safe.

    The key covers the salt of the view, the filter that passages were found under, and the texts of the turns: a caller
    who knows these could have found the same passages. The oldest entries are dropped.
    """

    _documents: DocumentStore
    _salt: str
    _turns: OrderedDict[str, KeptTurn] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def remember(self, key: str, turn: KeptTurn) -> None:
        with self._lock:
            self._turns[key] = turn
            self._turns.move_to_end(key)
            while len(self._turns) > REMEMBERED_TURNS:
                self._turns.popitem(last=False)

    def find(self, key: str) -> KeptTurn | None:
        with self._lock:
            if key in self._turns:
                self._turns.move_to_end(key)
            return self._turns.get(key)

    def hits(self, turn: KeptTurn) -> list[Hit]:
        """Return the turn's passages that are still in the store."""
        scores = dict(turn.passages)
        return [
            Hit(chunk, scores[chunk.vector_id], chunk.handle)
            for chunk in self._documents.chunks_by_vector_ids(id for id, _ in turn.passages)
        ]

    def keys(self, turns: Sequence[tuple[str, str]], where: Mapping[str, Any] | None, system: str | None) -> list[str]:
        """Return a key for each (role, text), for the conversation up to and including that turn."""
        keys: list[str] = []
        for role, text in turns:
            before = keys[-1] if keys else [self._salt, system, dict(where) if where else None]
            keys.append(digest([before, role, text.strip()]))
        return keys


@dataclass(eq=False, repr=False)
class ConversationContext:
    """A conversation, before its next answer."""

    _conversation: Conversation
    _memory: ConversationCache
    _tokenizer: PreTrainedTokenizerBase
    _where: Mapping[str, Any] | None
    _system: str | None

    def __post_init__(self) -> None:
        self._turns = [(turn.role, turn.said) for turn in self._conversation.turns]
        self._keys = self._memory.keys(self._turns, self._where, self._system)
        self._answers, answer = dict[int, int | None](), None  # the next assistant's turn, by turn
        for rank in reversed(range(len(self._turns))):
            self._answers[rank] = answer
            answer = rank if self._turns[rank][0] == "assistant" else answer

    def read(
        self, pieces: Sequence[str | Slot | Said], hits_by_turn: Mapping[int, Sequence[Hit]]
    ) -> tuple[History, list[int]]:
        """Return everything before this turn's passages, and the ids after them.

        pieces: the rendered conversation, from `Conversation.in_pieces`
        hits_by_turn: passages that turns contain themselves, by the turn's rank

        Raises PromptError if no turn has a place for passages.
        """
        last = max((place for place, piece in enumerate(pieces) if isinstance(piece, Slot)), default=None)
        if last is None:
            raise PromptError("there is no user message; end the conversation with a question")
        once, seen = dict[int, list[Hit]](), set[tuple[int, ...]]()
        # A passage is read once, in the first turn that has it; later turns leave it out.
        for turn, hits in sorted(hits_by_turn.items()):
            once[turn] = [hit for hit in hits if tuple(hit.chunk.token_ids) not in seen]
            seen |= {tuple(hit.chunk.token_ids) for hit in hits}
        parts, stays, standing = list[Text | tuple[Hit, ...]](), 0, set(self._conversation.standing)
        for piece in self._without_double_space(pieces[:last]):
            if (part := self._part(piece, once)) not in (Text(()), ()):
                parts.append(part)
            if isinstance(piece, Slot) and piece.turn in standing:
                stays = len(parts)
        behind = (self._part(piece, hits_by_turn) for piece in pieces[last + 1 :])
        suffix_ids = [id for part in behind if isinstance(part, Text) for id in part.ids]
        return History(tuple(parts), stays=stays), suffix_ids

    def _without_double_space(self, pieces: Sequence[str | Slot | Said]) -> Iterator[str | Slot | Said]:
        """Yield the pieces without a template's space in front of an answer that begins with its own space.

        The prompt then continues from the same text that the answer was read after, and equals the template's output.
        """
        for piece, behind in zip(pieces, [*pieces[1:], None], strict=True):
            known = self._memory.find(self._keys[behind.turn]) if isinstance(behind, Said) else None
            if isinstance(piece, str) and known and known.answer_ids:
                piece = piece.removesuffix(_leading_space(self._tokenizer, known.answer_ids))
            if piece != "":
                yield piece

    def _part(self, piece: str | Slot | Said, hits_by_turn: Mapping[int, Sequence[Hit]]) -> Text | tuple[Hit, ...]:
        if isinstance(piece, str):
            return Text(tuple(encode_rendered(self._tokenizer, piece)))
        if isinstance(piece, Said):
            known = self._memory.find(self._keys[piece.turn])
            return Text(known.answer_ids if known else tuple(encode_text(self._tokenizer, self._turns[piece.turn][1])))
        if piece.turn in hits_by_turn:
            return tuple(hits_by_turn[piece.turn])
        answer = self._answers[piece.turn]
        known = None if answer is None else self._memory.find(self._keys[answer])
        return () if known is None else tuple(self._memory.hits(known))

    def remember(self, hits: Sequence[Hit], answer: str, answer_ids: Sequence[int]) -> None:
        """Save the answer to the last turn for the next turn; if it continues the last message, save both together."""
        before = self._turns
        if self._conversation.continues:
            before, answer = before[:-1], before[-1][1] + answer
            answer_ids = encode_text(self._tokenizer, answer)
        key = self._memory.keys([*before, ("assistant", answer)], self._where, self._system)[-1]
        passages = tuple((hit.chunk.vector_id, hit.score) for hit in hits if hit.chunk.is_stored)
        self._memory.remember(key, KeptTurn(passages, tuple(answer_ids)))


def _leading_space(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the white space that begins the tokens' text.

    Some decoders leave the first space out; the token itself shows it, spelled as in SentencePiece or in byte-level
    BPE.
    """
    text = str(tokenizer.decode(ids))
    written = str(tokenizer.convert_ids_to_tokens(ids[0]))
    return text[: len(text) - len(text.lstrip())] or (" " if written[:1] in SPACES else "")


def inline_passages(conversation: Conversation) -> dict[int, list[Given]]:
    """Return the passages that turns contain themselves, by turn."""
    return {
        rank: [part for part in turn.parts if not isinstance(part, str)]
        for rank, turn in conversation.read
        if turn.has_passages
    }
