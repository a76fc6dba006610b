"""A prompt as token ids, and the chat template split around its context.

Ids are concatenated; strings never are. A chunk's ids are the ids of its text tokenised alone, so that they are the
same at every rank and behind every prefix, and its KV block can be reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ragcache.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ue000ragcache-"  # private use: no template or question holds it
CONTEXT_MARK = f"{MARK}context\ue000"
DEFAULT_QUESTION_FORMAT = "Question: {question}"  # chunks end with a newline of their own


@dataclass(frozen=True)
class Text:
    """Tokens that see everything before them."""

    ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Passages:
    """Passages side by side, each of which sees itself alone. A method adds its tokens around and between them."""

    chunk_ids: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk) for chunk in self.chunk_ids)


Part = Text | Passages
"""A prompt is a sequence of parts that ends with a text. `Prompt` is the one with one group of passages."""


@dataclass(frozen=True)
class Prompt:
    """prefix ids, then each chunk's ids, then suffix ids.

    prefix_ids: BOS, template head, system prompt; may be empty
    chunk_ids:  one list a chunk; may be empty, no chunk may be
    suffix_ids: question and template tail; at least one token, since the answer is read off the last one

    Raises PromptError naming the part that has no tokens.
    """

    prefix_ids: Sequence[int]
    chunk_ids: Sequence[Sequence[int]]
    suffix_ids: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_ids", tuple(int(i) for i in self.prefix_ids))
        object.__setattr__(self, "chunk_ids", tuple(tuple(int(i) for i in chunk) for chunk in self.chunk_ids))
        object.__setattr__(self, "suffix_ids", tuple(int(i) for i in self.suffix_ids))
        if not self.suffix_ids:
            raise PromptError("the suffix has no tokens; give the question at least one")
        for rank, chunk in enumerate(self.chunk_ids):
            if not chunk:
                raise PromptError(f"chunk {rank} has no tokens; leave empty passages out")

    @property
    def parts(self) -> tuple[Part, ...]:
        chunks = tuple(tuple(chunk) for chunk in self.chunk_ids)
        return Text(tuple(self.prefix_ids)), Passages(chunks), Text(tuple(self.suffix_ids))

    @property
    def context_tokens(self) -> int:
        """Tokens before the suffix."""
        return len(self.prefix_ids) + sum(len(chunk) for chunk in self.chunk_ids)

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + len(self.suffix_ids)

    @property
    def ids(self) -> list[int]:
        """All ids in order: what full prefill reads."""
        return [*self.prefix_ids, *(i for chunk in self.chunk_ids for i in chunk), *self.suffix_ids]


class PromptEnds(NamedTuple):
    """Ids before the chunks and behind them."""

    prefix_ids: Sequence[int]
    suffix_ids: Sequence[int]


@dataclass(frozen=True)
class PromptFormat:
    """How a question becomes prefix and suffix ids around the chunks.

    prefix_ids: ids of everything before the context; the same for all questions
    tail:       text after the question (the template's end of turn and start of answer)
    question_format: text put between context and tail, with "{question}" in it
    """

    prefix_ids: tuple[int, ...]
    tail: str
    question_format: str

    def asked(self, question: str) -> str:
        """The question as the model reads it."""
        return self.question_format.replace("{question}", question)

    def suffix_text(self, question: str) -> str:
        return self.asked(question) + self.tail

    def suffix_ids(self, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
        """Raises PromptError when the question is empty or holds nothing but white space."""
        if not question or not question.strip():
            raise PromptError("the question is empty; ask something")
        return encode_text(tokenizer, self.suffix_text(question.strip()))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of `text` alone, with no BOS or EOS added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def prompt_format(
    tokenizer: PreTrainedTokenizerBase, *, system: str | None = None, question_format: str | None = None
) -> PromptFormat:
    """Split the tokenizer's chat template at the context, which opens the user message.

    Without a template: BOS (where the tokenizer has one), the system text and a newline before the context; the
    question and "\\nAnswer:" behind it. A tokenizer may state its own question format as
    `init_kwargs["ragcache_question_format"]`.

    Raises ConfigError when the question format has no {question}, or the template drops or repeats the user message.
    """
    question_format = _question_format(tokenizer, question_format)
    head, tail = _halves(tokenizer, [*system_turn(system), {"role": "user", "content": CONTEXT_MARK}])
    return PromptFormat(tuple(_opening_ids(tokenizer, head)), tail, question_format)


def conversation_ends(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> PromptEnds:
    """Split a conversation (role, content) at CONTEXT_MARK, which stands in one of its turns.

    Without the mark all ids are suffix. Raises PromptError when the chat template refuses the turns or loses the mark.
    """
    try:
        if not any(CONTEXT_MARK in turn["content"] for turn in turns):
            return PromptEnds((), _opening_ids(tokenizer, _render(tokenizer, turns)))
        head, tail = _halves(tokenizer, turns)
    except ConfigError as error:
        raise PromptError(str(error)) from error
    return PromptEnds(_opening_ids(tokenizer, head), encode_text(tokenizer, tail))


def conversation_pieces(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]], marks: Sequence[str]
) -> list[str]:
    """The rendered conversation cut at these marks, which stand in its turns in this order; one piece more than marks.

    The first piece begins with BOS where the tokenizer has one and no template writes it. Raises PromptError when the
    chat template refuses the turns, or drops, repeats or moves one.
    """
    try:
        text = _render(tokenizer, turns)
    except ConfigError as error:
        raise PromptError(str(error)) from error
    if tokenizer.chat_template is None:
        text = (tokenizer.bos_token or "") + text
    pieces: list[str] = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise PromptError("the chat template does not render every turn exactly once, in order; it cannot be kept")
        pieces.append(before)
    return [*pieces, text]


def text_ends(tokenizer: PreTrainedTokenizerBase, head: str, tail: str | None) -> PromptEnds:
    """Raw text around chunks, no template; without chunks (tail None) all of it is suffix. BOS comes first where the
    tokenizer has one and the text does not begin with it."""
    first = [] if head.startswith(tokenizer.bos_token or " ") else _bos(tokenizer)
    ids = [*first, *encode_text(tokenizer, head)]
    return PromptEnds((), ids) if tail is None else PromptEnds(ids, encode_text(tokenizer, tail))


def system_turn(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _question_format(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    stated = getattr(tokenizer, "init_kwargs", {}).get("ragcache_question_format")
    chosen = given if given is not None else stated if isinstance(stated, str) else DEFAULT_QUESTION_FORMAT
    if "{question}" not in chosen:
        raise ConfigError(f"question_format {chosen!r} has no {{question}} in it")
    return chosen


def _halves(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    text = _render(tokenizer, turns)
    if text.count(CONTEXT_MARK) != 1:
        raise ConfigError("the chat template does not render the user message exactly once; pass a tokenizer that does")
    head, tail = text.split(CONTEXT_MARK)
    return head, tail


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> str:
    if tokenizer.chat_template is None:  # a line a turn
        return "\n".join([*(turn["content"] for turn in turns), "Answer:"])
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise whatever they like (jinja2's TemplateError, mostly)
        raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
    return text


def _opening_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of the beginning of a rendered prompt. A template writes BOS itself; where there is none, it is put first."""
    ids = encode_text(tokenizer, text)
    return ids if tokenizer.chat_template is not None else [*_bos(tokenizer), *ids]


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
