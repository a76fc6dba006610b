"""Rows of training data as token ids: the ids that the engine would build.

Prefix and suffix come from `ragcache.prompt.prompt_format`; a passage is tokenised alone, as a chunk is, and ends with
a newline. The answer is the text that the chat template puts after the start of the assistant's turn: its text and
the token that ends the turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.errors import ConfigError
from ragcache.ingest.chunk_tokenizer import ChunkTokenizer
from ragcache.prompt import PromptFormat, as_text, encode_rendered, encode_text, prompt_format
from ragcache_train.train_batches import Ask, EncodedRow
from ragcache_train.train_options import EncodingOptions
from ragcache_train.train_rows import BadLine, ChatMessage, DataRow


class RowEncoder:
    """Encodes rows. Raises ConfigError if the tokenizer has no end of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: EncodingOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self._chunks = ChunkTokenizer(tokenizer)
        self._form: AnswerForm = answer_form(tokenizer)
        self._formats: dict[tuple[str | None, str | None], PromptFormat] = {}
        self._encoders = {
            "qa": self._qa,
            "chat": self._chat,
            "summary": self._summary,
            "instruction": self._instruction,
            "text": self._text,
        }

    def encode(self, row: DataRow) -> EncodedRow | BadLine:
        """Return the row's ids, or the reason if it does not fit.

        Raises ConfigError if an answer alone is longer than the context.
        """
        encoded = self._encoders[row.kind](row)
        limit = self.options.max_tokens
        longest = max(len(ask.answer) for ask in encoded.asks)
        if longest > limit:
            raise ConfigError(
                f"{row.where}: an answer has {longest} tokens and the context takes {limit}; "
                "shorten the answer or train with more max_tokens"
            )
        context = len(encoded.prefix) + sum(len(chunk) for chunk in encoded.chunks)
        tokens = context + max(len(ask.suffix) + len(ask.answer) for ask in encoded.asks)
        if tokens > limit:
            return BadLine(row.where, f"it has {tokens} tokens and the longest sequence is {limit}")
        return encoded

    def _format(self, system: str | None, question_format: str | None) -> PromptFormat:
        key = (self.options.system if system is None else system, question_format)
        if key not in self._formats:
            self._formats[key] = prompt_format(self.tokenizer, system=key[0], question_format=question_format)
        return self._formats[key]

    def _ask(self, rendered: str, answer: str) -> Ask:
        return Ask(encode_rendered(self.tokenizer, rendered), self._form.ids(self.tokenizer, answer))

    def _suffix(self, form: PromptFormat, question: str) -> str:
        return form.suffix_text(as_text(self.tokenizer, question))

    def _qa(self, row: DataRow) -> EncodedRow:
        form = self._format(row.system, self.options.question_format)
        chunks = self._chunks.encode([passage_text(text) for text in row.passages])
        asks = [self._ask(self._suffix(form, asked.question.strip()), asked.answer) for asked in row.asked]
        return EncodedRow(row.kind, row.where, form.prefix_ids, chunks, asks, None, row.shuffle)

    def _summary(self, row: DataRow) -> EncodedRow:
        """Return the text in segments of equal length, each read alone; cut at the end if it does not fit."""
        form = self._format(row.system, self.options.question_format)
        (asked,) = row.asked
        ask = self._ask(self._suffix(form, asked.question), asked.answer)
        (ids,) = self._chunks.encode([passage_text(row.passages[0])])
        room = self.options.max_tokens - len(form.prefix_ids) - len(ask.suffix) - len(ask.answer)
        size = self.options.segment_tokens
        segments = [ids[start : start + size] for start in range(0, min(len(ids), max(room, 1)), size)]
        segments[-1] = segments[-1][: max(room, 1) - size * (len(segments) - 1)]
        return EncodedRow(row.kind, row.where, form.prefix_ids, segments, [ask], True, False)

    def _chat(self, row: DataRow) -> EncodedRow:
        """Return a conversation with its earlier turns as chunks; the oldest are left out if they do not fit."""
        system = self.options.system if row.system is None else row.system
        *earlier, question, answer = row.messages
        rendered = render_turns(self.tokenizer, system, earlier, question.content)
        prefix = encode_rendered(self.tokenizer, rendered.head)
        if rendered.bos is not None:
            prefix = [rendered.bos, *prefix]
        ask = self._ask(rendered.tail, answer.content)
        chunks = [encode_rendered(self.tokenizer, turn) for turn in rendered.turns]
        room = self.options.max_tokens - len(prefix) - len(ask.suffix) - len(ask.answer)
        while chunks and sum(len(chunk) for chunk in chunks) > room:
            chunks.pop(0)
        return EncodedRow(row.kind, row.where, prefix, chunks, [ask], True, False)

    def _instruction(self, row: DataRow) -> EncodedRow:
        form = self._format(row.system, "{question}")
        (asked,) = row.asked
        ask = self._ask(self._suffix(form, asked.question), asked.answer)
        return EncodedRow(row.kind, row.where, form.prefix_ids, [], [ask], False, False)

    def _text(self, row: DataRow) -> EncodedRow:
        """Return a row of plain language modelling: every token but the first is learned."""
        bos = [] if self.tokenizer.bos_token_id is None else [int(self.tokenizer.bos_token_id)]
        ids = [*bos, *self._chunks.encode([row.text])[0]][: self.options.max_tokens]
        if self.options.blocks and len(text := ids[len(bos) :]) > 2 * self.options.segment_tokens:
            *chunks, rest = _cut(text, self.options.segment_tokens, self.options.blocks)
            return EncodedRow(row.kind, row.where, bos, chunks, [Ask(rest[:1], rest[1:])], None, False)
        if len(ids) < 2:
            ids.append(self._form.end_id)
        return EncodedRow(row.kind, row.where, [], [], [Ask(ids[:1], ids[1:])], False, False)


def _cut(ids: Sequence[int], size: int, most: int) -> list[Sequence[int]]:
    """Cut a text into pieces of half to one and a half times `size` tokens.

    The last piece is the text after `most` pieces, or has at least two tokens. The cuts depend on the ids alone.
    """
    rng, start, pieces = random.Random(sum(ids)), 0, list[Sequence[int]]()
    while len(pieces) < most and len(ids) - start > size:
        stop = min(start + max(1, round(size * rng.uniform(0.5, 1.5))), len(ids) - 2)
        pieces.append(ids[start:stop])
        start = stop
    return [*pieces, ids[start : start + 2 * size]]


def passage_text(text: str) -> str:
    """Return the text cleaned as the chunker does: no blank lines around it, and a newline at its end."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines) + "\n"


QUESTION_MARK, ANSWER_MARK = "\ue000ragcache-question\ue000", "\ue000ragcache-answer\ue000"


class AnswerForm(NamedTuple):
    """How an answer follows its prompt.

    before:     text between the prompt's end and the answer
    end_id:     the token that ends the answer
    adds_space: whether the tokenizer itself puts a space before a text
    """

    before: str
    end_id: int
    adds_space: bool

    def ids(self, tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
        before = self.before.removesuffix(" ") if self.adds_space else self.before
        return [*encode_rendered(tokenizer, before + as_text(tokenizer, answer.strip())), self.end_id]


class Turns(NamedTuple):
    """A conversation in pieces for `encode_rendered`. bos: an id before the head, if no template writes it."""

    bos: int | None
    head: str
    turns: list[str]
    tail: str


def answer_form(tokenizer: PreTrainedTokenizerBase) -> AnswerForm:
    """Return the form of an answer. Raises ConfigError if neither template nor tokenizer defines how an answer ends."""
    before, after = _around_answer(tokenizer)
    found = encode_rendered(tokenizer, after)[:1] if after else []
    end_id = found[0] if found and found[0] in tokenizer.all_special_ids else tokenizer.eos_token_id
    if end_id is None:
        raise ConfigError("the tokenizer has no end-of-text token, so no answer could end; set its eos_token")
    pieces = tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "a")[:1])
    return AnswerForm(before, int(end_id), bool(pieces) and pieces[0][:1] in ("▁", "Ġ"))


def _around_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text that the template writes before and after an answer, after the start of the assistant's turn."""
    tail = prompt_format(tokenizer).tail
    fallback = ("" if tail[-1:].isspace() else " ", "")
    if tokenizer.chat_template is None:
        return fallback
    question = {"role": "user", "content": QUESTION_MARK}
    start = _render(tokenizer, [question], start_answer=True)
    whole = _render(tokenizer, [question, {"role": "assistant", "content": ANSWER_MARK}])
    if start is None or whole is None or not whole.startswith(start) or ANSWER_MARK not in whole:
        return fallback  # the template writes more into a finished turn, such as an empty thought
    before, after = whole[len(start) :].split(ANSWER_MARK, 1)
    return before, after.lstrip()


def render_turns(
    tokenizer: PreTrainedTokenizerBase, system: str | None, earlier: Sequence[ChatMessage], question: str
) -> Turns:
    """Return a conversation split before the first user turn, after each answer, and before the last answer.

    A template whose finished turns depend on later turns cannot be cut; the turns are then written as without a
    template.
    """
    form = prompt_format(tokenizer, system=system, question_format="{question}")
    question = as_text(tokenizer, question)
    earlier = [message._replace(content=as_text(tokenizer, message.content)) for message in earlier]
    system = as_text(tokenizer, system) if system else None
    cut = _cut_template(tokenizer, system, earlier, question) if tokenizer.chat_template is not None else None
    if cut is not None:
        return cut
    pairs = zip(earlier[::2], earlier[1::2], strict=True)
    turns = [f"{user.content}\n{assistant.content}\n" for user, assistant in pairs]
    head = f"{system}\n" if system else ""
    if tokenizer.chat_template is None:
        bos = None if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)
        return Turns(bos, head, turns, form.suffix_text(question))
    return Turns(None, tokenizer.decode(list(form.prefix_ids)), turns, form.suffix_text(question))


def _cut_template(
    tokenizer: PreTrainedTokenizerBase, system: str | None, earlier: Sequence[ChatMessage], question: str
) -> Turns | None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    first = len(messages)
    messages += [message._asdict() for message in earlier] + [{"role": "user", "content": question}]
    ends = [_render(tokenizer, messages[:count]) for count in range(first + 2, len(messages), 2)]
    whole = _render(tokenizer, messages, start_answer=True)
    head = _render(tokenizer, messages[:first]) if first else None
    bos = tokenizer.bos_token or ""
    starts = [head if head is not None else bos if whole is not None and whole.startswith(bos) else "", *ends]
    if whole is None or any(text is None for text in starts):
        return None
    texts = [*(text for text in starts if text is not None), whole]
    if any(not after.startswith(before) for before, after in pairwise(texts)):
        return None
    pieces = [after[len(before) :] for before, after in pairwise(texts)]
    return Turns(None, texts[0], pieces[:-1], pieces[-1])


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, start_answer: bool = False
) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=start_answer)
    except Exception:  # of any class: the template refuses such a conversation
        return None
    return text
