"""Rows of training data as token ids: the ids that the engine would build.

Prefix and suffix come from `ragcache.prompt.prompt_format`; a passage is tokenised alone, as a chunk is, and ends with
one newline. The answer is what the chat template puts after the start of the assistant's turn: its text and the token
that ends the turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ragcache.errors import ConfigError
from ragcache.ingest.chunker import ChunkTokenizer
from ragcache.prompt import PromptFormat, as_text, encode_rendered, prompt_format
from ragcache_train.data import BadLine, DataRow
from ragcache_train.layout import Ask, EncodedRow
from ragcache_train.turns import AnswerForm, answer_form, render_turns


@dataclass(frozen=True)
class EncodingOptions:
    """How rows become ids.

    system:          text before everything where a row has none of its own; None: the template's own
    question_format: as of `prompt_format`
    segment_tokens:  of the pieces that a text to be summarised is cut into (100 in the paper)
    max_tokens:      longest sequence; link tokens, markers and anchors are not counted
    halves:          whether a "text" is cut in two halves, the first of which is a chunk (KVLink, A.6)
    """

    system: str | None = None
    question_format: str | None = None
    segment_tokens: int = 100
    max_tokens: int = 4096
    halves: bool = False


class RowEncoder:
    """Encodes rows. Raises ConfigError when the tokenizer has no end of text."""

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
        """The row's ids, or why it cannot be used: it does not fit.

        Raises ConfigError when an answer alone is longer than the context.
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
        """The text in segments of equal length, each read alone; cut at the end where it does not fit."""
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
        """Earlier turns are the reused segments, the oldest left out where they do not fit."""
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
        """Plain language modelling: every token but the first is to be learned; of halves, every one but the second's
        first."""
        bos = [] if self.tokenizer.bos_token_id is None else [int(self.tokenizer.bos_token_id)]
        ids = [*bos, *self._chunks.encode([row.text])[0]][: self.options.max_tokens]
        if self.options.halves and len(text := ids[len(bos) :]) > 2:
            half = len(text) // 2
            ask = Ask(text[half : half + 1], text[half + 1 :])
            return EncodedRow(row.kind, row.where, bos, [text[:half]], [ask], True, False, linked=False)
        if len(ids) < 2:
            ids.append(self._form.end_id)
        return EncodedRow(row.kind, row.where, [], [], [Ask(ids[:1], ids[1:])], False, False)


def passage_text(text: str) -> str:
    """Clean a text as the chunker does: no blank lines around it, and one newline at its end."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines) + "\n"
