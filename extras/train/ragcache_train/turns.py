"""The chat template's end of a question, and its form of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.errors import ConfigError
from ragcache.prompt import as_text, encode_rendered, encode_text, prompt_format
from ragcache_train.data import ChatMessage

QUESTION_MARK, ANSWER_MARK = "\ue000ragcache-question\ue000", "\ue000ragcache-answer\ue000"


class AnswerForm(NamedTuple):
    """before: text between the prompt's end and the answer; end_id: the token that ends the answer;
    adds_space: the tokenizer itself puts a space before a text."""

    before: str
    end_id: int
    adds_space: bool

    def ids(self, tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
        before = self.before.removesuffix(" ") if self.adds_space else self.before
        return [*encode_rendered(tokenizer, before + as_text(tokenizer, answer.strip())), self.end_id]


class Turns(NamedTuple):
    """A conversation in pieces for `encode_rendered`. bos: an id before the head, where no template writes one."""

    bos: int | None
    head: str
    turns: list[str]
    tail: str


def answer_form(tokenizer: PreTrainedTokenizerBase) -> AnswerForm:
    """Raises ConfigError when neither template nor tokenizer says how an answer ends."""
    before, after = _around_answer(tokenizer)
    found = encode_rendered(tokenizer, after)[:1] if after else []
    end_id = found[0] if found and found[0] in tokenizer.all_special_ids else tokenizer.eos_token_id
    if end_id is None:
        raise ConfigError("the tokenizer has no end-of-text token, so no answer could end; set its eos_token")
    pieces = tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "a")[:1])
    return AnswerForm(before, int(end_id), bool(pieces) and pieces[0][:1] in ("▁", "Ġ"))


def _around_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Text that the template writes before and after an answer, behind its own start of the assistant's turn."""
    tail = prompt_format(tokenizer).tail
    fallback = ("" if tail[-1:].isspace() else " ", "")
    if tokenizer.chat_template is None:
        return fallback
    question = {"role": "user", "content": QUESTION_MARK}
    start = _render(tokenizer, [question], start_answer=True)
    whole = _render(tokenizer, [question, {"role": "assistant", "content": ANSWER_MARK}])
    if start is None or whole is None or not whole.startswith(start) or ANSWER_MARK not in whole:
        return fallback  # templates that write more into a finished turn, such as an empty thought
    before, after = whole[len(start) :].split(ANSWER_MARK, 1)
    return before, after.lstrip()


def render_turns(
    tokenizer: PreTrainedTokenizerBase, system: str | None, earlier: Sequence[ChatMessage], question: str
) -> Turns:
    """A conversation parted before the first user turn, after each answer, and before the last answer.

    A template whose finished turns depend on what follows cannot be cut; the turns are then written as without one.
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
    except Exception:  # a template that refuses such a conversation: the caller has another way
        return None
    return text
