"""Prompts as token ids, and the chat template split around the prompt's context.

Ids are concatenated; strings never are. A chunk's ids are those of its text tokenised alone. They are therefore the
same at every rank and after every prefix, and its KV block can be reused.

Control tokens come from the chat template alone. Before text of users and documents reaches the template, it is cut
(`as_text`) inside everything that the tokenizer would take for a control token, and the rendered text is encoded in the
pieces between the cuts (`encode_rendered`). Texts without such spellings are not cut: their ids are those of the whole
rendered text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ragcache.errors import ConfigError, PromptError, TimedOutError, check_text
from ragcache.runtime import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ue000ragcache-"  # private use: no template or question contains it
CONTEXT_MARK = f"{MARK}context\ue000"
CUT = f"{MARK}cut\ue000"  # inside text that spells a control token but is not one
END_MARK = f"{MARK}end\ue000"  # after the last turn if the answer continues it
TURN_MARK = MARK + "turn-{}\ue000"  # a place in a conversation, by its number
_TURN_MARKS = re.compile(f"({TURN_MARK.format('[0-9]+')})")
Message = Mapping[str, Any]  # JSON, as chat templates take it
TEMPLATE_S = 5.0  # the longest that a chat template may take for a prompt: a good one takes milliseconds
PART = 1 << 16  # characters of a long text whose tokens are counted at once
CLOCK = "strftime_now"  # the function that a chat template calls for the time
DEFAULT_QUESTION_FORMAT = "Question: {question}"  # chunks end with their own newline


@dataclass(frozen=True)
class Text:
    """Tokens that see everything before them."""

    ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Passages:
    """Adjacent passages, each of which sees only itself. A method adds its tokens around and between them.

    label_ids: text in front of each passage, which sees everything before it, as any text does; (): no labels
    """

    chunk_ids: tuple[tuple[int, ...], ...]
    label_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def labels(self) -> tuple[tuple[int, ...], ...]:
        """Return a label for each passage; labels may have no tokens."""
        return self.label_ids or ((),) * len(self.chunk_ids)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in (*self.chunk_ids, *self.label_ids))


Part = Text | Passages
"""Part of a prompt, which is a sequence of parts that ends with a text. A `Prompt` has a single group of passages."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: prefix ids, then each chunk's ids, then suffix ids.

    prefix_ids: BOS, template head, system prompt; may be empty
    chunk_ids:  a list for each chunk; there may be no chunks, but each chunk has tokens
    suffix_ids: question and template tail; at least one token, because the answer begins from the last token's logits
    label_ids:  text in front of each chunk ("[2] "), a list for each chunk, possibly empty; (): no labels. Labels run
                with the question; methods with `keeps_context` read them

    Raises PromptError that names a part without tokens, or if the number of labels differs from the number of chunks.
    """

    prefix_ids: Sequence[int]
    chunk_ids: Sequence[Sequence[int]]
    suffix_ids: Sequence[int]
    label_ids: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_ids", tuple(int(i) for i in self.prefix_ids))
        object.__setattr__(self, "chunk_ids", tuple(tuple(int(i) for i in chunk) for chunk in self.chunk_ids))
        object.__setattr__(self, "suffix_ids", tuple(int(i) for i in self.suffix_ids))
        labels = tuple(tuple(int(i) for i in label) for label in self.label_ids)
        object.__setattr__(self, "label_ids", labels if any(labels) else ())
        if labels and len(labels) != len(self.chunk_ids):
            raise PromptError(
                f"{len(labels)} labels were given for {len(self.chunk_ids)} chunks; give each chunk a label, which may "
                "be empty"
            )
        if not self.suffix_ids:
            raise PromptError("the suffix has no tokens; give the question at least one")
        for rank, chunk in enumerate(self.chunk_ids):
            if not chunk:
                raise PromptError(f"chunk {rank} has no tokens; leave empty passages out")

    @property
    def parts(self) -> tuple[Part, ...]:
        return Text(tuple(self.prefix_ids)), self._passages, Text(tuple(self.suffix_ids))

    @property
    def _passages(self) -> Passages:
        return Passages(tuple(map(tuple, self.chunk_ids)), tuple(map(tuple, self.label_ids)))

    @property
    def labels(self) -> tuple[tuple[int, ...], ...]:
        """Return a label for each chunk; labels may have no tokens."""
        return self._passages.labels

    @property
    def context_tokens(self) -> int:
        """Return the number of tokens before the suffix."""
        return len(self.prefix_ids) + self._passages.num_tokens

    @property
    def num_tokens(self) -> int:
        return self.context_tokens + len(self.suffix_ids)

    @property
    def ids(self) -> list[int]:
        """Return all ids in order, as full prefill reads them."""
        passages = zip(self.labels, self.chunk_ids, strict=True)
        return [*self.prefix_ids, *(id for pair in passages for part in pair for id in part), *self.suffix_ids]


class PromptEnds(NamedTuple):
    """Ids before and after the chunks, and labels in front of each chunk; label_ids: () for no labels."""

    prefix_ids: Sequence[int]
    suffix_ids: Sequence[int]
    label_ids: Sequence[Sequence[int]] = ()


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
        """Return the question as the model reads it."""
        return self.question_format.replace("{question}", question)

    def suffix_text(self, question: str) -> str:
        return self.asked(question) + self.tail

    def suffix_ids(self, tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
        """Return the suffix ids of a question. Raises PromptError if the question is empty or only white space."""
        if not question or not question.strip():
            raise PromptError("the question is empty; ask something")
        return encode_rendered(tokenizer, self.suffix_text(as_text(tokenizer, question.strip())))


def exceeds(text: str, most: int, count: Callable[[str], int]) -> bool:
    """Return whether a long text has far more than `most` tokens, without tokenising all of it.

    Tokenising takes a hundred times the text's size in memory. So parts of PART characters are counted until they have
    more than twice `most` tokens, because the cuts between parts add tokens. If this returns False, the text may still
    have more than `most` tokens. For a text of at most PART characters it always returns False.

    Args:
        count: Counts the tokens of a part.
    """
    counted = 0
    for start in range(0, len(text) if len(text) > PART else 0, PART):
        counted += count(text[start : start + PART])
        if counted > 2 * most:
            return True
    return False


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` alone, without BOS, EOS or any control token, whatever the text spells."""
    return encode_rendered(tokenizer, as_text(tokenizer, text))


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a rendered chat template: control tokens are parsed, except those that `as_text` has cut."""
    pieces = [piece for piece in text.split(CUT) if piece]
    return [id for piece in pieces for id in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def as_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special_only: bool = False) -> str:
    """Return the text with CUT inside everything that the tokenizer would read as a control token.

    The cut comes after the first character, so that a template may still trim the text. A control token of a single
    character cannot be spelled in pieces: the cut replaces it.

    special_only: do not cut tokens that are control tokens only because the template writes them; see `control_tokens`

    Raises PromptError for half of a surrogate pair.
    """
    check_text(text)
    controls = control_tokens(tokenizer, special_only=special_only)
    pieces, cut = text.split(CUT), True
    while cut:  # the rest after a cut may spell another control token
        parts = [list(_cut(tokenizer, piece, controls)) for piece in pieces]
        cut = any(len(part) > 1 for part in parts)
        pieces = [piece for part in parts for piece in part]
    return CUT.join(pieces)


def all_as_text(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """Return a JSON value with all its strings cut by `as_text`, including keys."""
    if isinstance(value, str):
        return as_text(tokenizer, value)
    if isinstance(value, Mapping):
        return {as_text(tokenizer, str(name)): all_as_text(tokenizer, item) for name, item in value.items()}
    return [all_as_text(tokenizer, item) for item in value] if isinstance(value, list | tuple) else value


def control_tokens(tokenizer: PreTrainedTokenizerBase, *, special_only: bool = False) -> dict[int, str]:
    """Return ids and spellings of the tokens that text must never become.

    These are the special tokens, and the added tokens that the chat template writes although they are not marked
    special (Qwen's <think> and <tool_call>). Other added tokens are text: Gemma has some for runs of newlines and for
    HTML tags.
    """
    return list_controls(tokenizer, "" if special_only else template_text(tokenizer))


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's chat templates as written, or "" if it has none."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


@lru_cache(maxsize=8)  # Gemma has 6,000 special tokens, which take 20 ms to list
def list_controls(tokenizer: PreTrainedTokenizerBase, written: str) -> dict[int, str]:
    """List the tokens of `control_tokens`. Code that adds tokens to a tokenizer in use must clear this cache."""
    added = {id: (token.content, token.special) for id, token in tokenizer.added_tokens_decoder.items()}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {
        **{id: str(spelling) for id, spelling in named},
        **{id: spelling for id, (spelling, special) in added.items() if special or _is_markup(spelling, written)},
    }


def _is_markup(spelling: str, written: str) -> bool:
    """Return whether a template writes the spelling other than as a word or as white space."""
    bare = spelling.strip()
    return bool(bare) and not bare.isalnum() and bare in written


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, controls: Mapping[int, str]) -> Iterator[str]:
    """Yield the pieces of a text whose control tokens are cut after their first character."""
    done = 0
    for start, end in _control_spans(tokenizer, text, controls):
        start += len(text[start:end]) - len(text[start:end].lstrip())  # tokens may include the white space around them
        alone = len(text[start:end].rstrip()) <= 1
        yield text[done : start if alone else start + 1]
        done = start + 1
    yield text[done:]


def _control_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, controls: Mapping[int, str]
) -> Iterator[tuple[int, int]]:
    """Yield the spans of control tokens in a text, as the tokenizer finds them.

    The tokenizer has to find them, because it may normalise other characters to those of a control token. A slow
    tokenizer gives no offsets: with it, the text is searched for the spellings.
    """
    if not text:
        return
    if not tokenizer.is_fast:
        spellings = sorted(set(controls.values()), key=len, reverse=True)
        yield from (match.span() for match in re.finditer("|".join(map(re.escape, spellings)), text) if match[0])
        return
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        # A text outside the vocabulary gets the unknown token, which is a control token, without spelling it.
        unknown = id == tokenizer.unk_token_id and text[start:end].strip() != controls.get(id)
        if id in controls and not unknown and start < end:
            yield start, end


class Shown(NamedTuple):
    """The inputs of a chat template other than the messages, cut by `as_text`.

    tools:     functions that the template describes to the model
    variables: further variables of this template, such as enable_thinking
    date:      the time that the template is given if it asks for the time; None: the time of rendering
    """

    tools: Sequence[Message] = ()
    variables: Mapping[str, Any] = MappingProxyType({})
    date: datetime | None = None

    def as_text(self, tokenizer: PreTrainedTokenizerBase) -> Shown:
        """Return these inputs without control tokens."""
        return Shown(all_as_text(tokenizer, self.tools), all_as_text(tokenizer, self.variables), self.date)


NOTHING_SHOWN = Shown()


def prompt_format(
    tokenizer: PreTrainedTokenizerBase,
    *,
    system: str | None = None,
    question_format: str | None = None,
    shown: Shown = NOTHING_SHOWN,
) -> PromptFormat:
    """Split the tokenizer's chat template at the context, which opens the user message.

    Without a template, BOS (if the tokenizer has one), the system text and a newline precede the context, and the
    question and "\\nAnswer:" follow it. A tokenizer may state its own question format as
    `init_kwargs["ragcache_question_format"]`.

    system: the system prompt. shown: the template's other inputs

    Raises ConfigError if the question format has no {question}, or the template drops or repeats the user message.
    """
    stated = getattr(tokenizer, "init_kwargs", {}).get("ragcache_question_format")
    if question_format is None:
        question_format = stated if isinstance(stated, str) else DEFAULT_QUESTION_FORMAT
    if "{question}" not in question_format:
        raise ConfigError(f"question_format {question_format!r} has no {{question}} in it")
    turns = [*system_turn(tokenizer, system), {"role": "user", "content": CONTEXT_MARK}]
    head, tail = _halves(tokenizer, turns, shown)
    return PromptFormat(tuple(_opening_ids(tokenizer, head)), tail, question_format)


def conversation_ends(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], shown: Shown = NOTHING_SHOWN
) -> PromptEnds:
    """Split a conversation (role, content) at CONTEXT_MARK, which is in one of its turns.

    turns: contents of assistant turns as generated, all others already cut (`as_text`). The last turn may end with
           END_MARK: the prompt ends there, and the answer continues it
    shown: the template's other inputs

    Without the mark all ids are suffix. Raises PromptError if the chat template refuses the turns or loses the mark.
    """
    try:
        if not any(CONTEXT_MARK in turn["content"] for turn in turns):
            return PromptEnds((), _opening_ids(tokenizer, _render(tokenizer, turns, shown)))
        head, tail = _halves(tokenizer, turns, shown)
    except ConfigError as error:
        raise PromptError(str(error)) from error
    return PromptEnds(_opening_ids(tokenizer, head), encode_rendered(tokenizer, tail))


def conversation_pieces(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], marks: Sequence[str], shown: Shown = NOTHING_SHOWN
) -> list[str]:
    """Return the rendered conversation, cut at these marks (TURN_MARK), which its turns contain in this order.

    There is a piece before, between and after the marks. The first piece begins with BOS if the tokenizer has one and
    no template writes it. Raises PromptError if the chat template refuses the turns, or drops, repeats or moves a turn.
    """
    try:
        text = _render(tokenizer, turns, shown)
    except ConfigError as error:
        raise PromptError(str(error)) from error
    if tokenizer.chat_template is None:
        text = (tokenizer.bos_token or "") + text
    pieces = _TURN_MARKS.split(text)
    if pieces[1::2] != list(marks):
        raise PromptError("the chat template does not render every turn exactly once, in order; it cannot be kept")
    return pieces[::2]


def text_ends(tokenizer: PreTrainedTokenizerBase, head: str, tail: str | None) -> PromptEnds:
    """Return the ids of raw text around chunks, without a template; if `tail` is None, the whole text is suffix.

    BOS comes first if the tokenizer has one, and is not repeated if the text begins with it. There is no other control
    token.
    """
    bos = tokenizer.bos_token or ""
    if bos and head.startswith(bos):
        ids = encode_rendered(tokenizer, bos + as_text(tokenizer, head.removeprefix(bos)))
    else:
        ids = [*_bos(tokenizer), *encode_text(tokenizer, head)]
    return PromptEnds((), ids) if tail is None else PromptEnds(ids, encode_text(tokenizer, tail))


def system_turn(tokenizer: PreTrainedTokenizerBase, system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": as_text(tokenizer, system)}] if system else []


def _halves(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], shown: Shown = NOTHING_SHOWN
) -> tuple[str, str]:
    text = _render(tokenizer, turns, shown)
    if text.count(CONTEXT_MARK) != 1:
        raise ConfigError("the chat template does not render the user message exactly once; pass a tokenizer that does")
    head, tail = text.split(CONTEXT_MARK)
    return head, tail


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], shown: Shown = NOTHING_SHOWN) -> str:
    """Return the turns as the template writes them, with control tokens cut in the assistant's messages too.

    A template may parse an assistant's message: Qwen's template drops everything before </think>. So if cutting tokens
    that are not special changes the output, these tokens are left uncut for the template.
    """
    text = _written(tokenizer, _with_answers_cut(tokenizer, turns), shown)
    if CUT in text and (left := _with_answers_cut(tokenizer, turns, special_only=True)) != turns:
        read = _written(tokenizer, left, shown)
        return text if text.replace(CUT, "") == read.replace(CUT, "") else read
    return text


def _with_answers_cut(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], *, special_only: bool = False
) -> list[dict[str, Any]]:
    return [
        {**turn, "content": as_text(tokenizer, turn["content"], special_only=special_only)}
        if turn["role"] == "assistant"
        else dict(turn)
        for turn in turns
    ]


def _written(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], shown: Shown = NOTHING_SHOWN) -> str:
    last: str = turns[-1]["content"]
    continued = last.endswith(END_MARK)
    if tokenizer.chat_template is None:  # one line per turn
        lines = [turn["content"] for turn in turns]
        return "\n".join([*lines[:-1], f"Answer: {last.removesuffix(END_MARK)}"] if continued else [*lines, "Answer:"])
    variables = {"tools": list(shown.tools) or None, "add_generation_prompt": not continued, **shown.variables}
    if shown.date is not None:
        variables.setdefault(CLOCK, shown.date.strftime)
    try:
        with bounded(TEMPLATE_S):
            text: str = tokenizer.apply_chat_template(turns, tokenize=False, **variables)
    except TimeoutError as error:
        raise TimedOutError(
            f"the model's chat template takes over {TEMPLATE_S:g} s for these messages: it loops; use another model, "
            "or its tokenizer with another chat_template"
        ) from error
    except Exception as error:  # templates raise whatever they like (jinja2's TemplateError, mostly)
        raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
    if continued and text.count(END_MARK) != 1:
        raise ConfigError(
            "the model's chat template does not write the last message, an assistant's, as it stands, so that it "
            "cannot be continued; end with a user message"
        )
    return text.partition(END_MARK)[0]


def _opening_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a rendered prompt's beginning, with BOS in front if there is no template to write it."""
    ids = encode_rendered(tokenizer, text)
    return ids if tokenizer.chat_template is not None else [*_bos(tokenizer), *ids]


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
