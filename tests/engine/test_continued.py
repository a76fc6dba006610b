"""A last assistant message is continued: the prompt ends inside of it, and the answer is what follows."""

import pytest
from engine_texts import CHAT
from kit.makers import tiny_lm
from plain_oracle import greedy, plain_transformers
from scripted import script
from templates import CHATML, FAMILIES, template_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ragcache as rc
from ragcache.engine.conversation import Conversation
from ragcache.errors import PromptError
from ragcache.models.generate import Detokenizer

SHORT = rc.Sampling(max_tokens=8)
QUESTION = {"role": "user", "content": "Where do dogs bark?"}
BEGUN = {"role": "assistant", "content": "  Dogs bark in the "}
CALL = rc.ToolCall("a", "search", "{}")


lm = tiny_lm(positions=2048, chat_template=CHAT)


def prompt_ids(tokenizer, *messages) -> list[int]:
    ends, _ = Conversation(tokenizer, messages).as_written(None)
    return [*ends.prefix_ids, *ends.suffix_ids]


def read(lm, ids) -> str:
    """What plain transformers goes on with."""
    return greedy(*plain_transformers(lm.name), rc.Prompt([], [], ids), None, SHORT.max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["The oar; [a] is", "  The boat,\n\n", "/ here"])
def test_the_prompt_is_what_transformers_makes_of_it(family, content):
    """But for white space at its ends, which transformers cuts: it is the caller's."""
    tokenizer = template_tokenizer(family)
    messages = [QUESTION, {"role": "assistant", "content": "The boat."}, QUESTION]
    begun = {"role": "assistant", "content": content}
    expected = tokenizer.apply_chat_template([*messages, begun], continue_final_message=True, tokenize=False)
    ours = prompt_ids(tokenizer, *messages, begun)
    assert (
        tokenizer.decode(ours).rstrip()
        == tokenizer.decode(tokenizer(expected, add_special_tokens=False)["input_ids"]).rstrip()
    )
    assert ours[-1] not in tokenizer.all_special_ids
    assert ours != prompt_ids(tokenizer, *messages)


def test_the_answer_goes_on_with_it(kb):
    ids = kb.lm.tokenizer(
        f"{kb.lm.tokenizer.bos_token}[user]{QUESTION['content']}[end][assistant]{BEGUN['content']}",
        add_special_tokens=False,
    )["input_ids"]
    answer = kb.chat([QUESTION, BEGUN], sampling=SHORT)
    assert answer.text == read(kb.lm, ids)
    assert answer.usage.prompt_tokens == len(ids)
    *events, done = kb.stream_chat([QUESTION, BEGUN], sampling=SHORT)
    assert "".join(one.text for one in events if isinstance(one, rc.Token)) == done.answer.text == answer.text


def letters(kb, count) -> rc.Sampling:
    """Answers of letters alone, each a token: what else an untrained model says may be no whole text."""
    ids = range(kb.lm.vocab_size)
    odd = {id: -100.0 for id in ids if not kb.lm.tokenizer.decode([id]).isalpha()}
    return rc.Sampling(max_tokens=count, logit_bias=odd)


@pytest.mark.parametrize("options", [{"k": 2}, {"k": 2, "context": "keep"}, {"context": "keep"}])
def test_so_it_does_over_passages(kb, options):
    """A step at a time is the whole: what was answered is given back, and the next answer goes on."""
    whole, begun = (kb.chat([QUESTION], sampling=letters(kb, count), **options) for count in (8, 3))
    turns = [QUESTION, {"role": "assistant", "content": begun.text}]
    rest = kb.chat(turns, sampling=letters(kb, 5), **options)
    assert len(begun.text) == 3
    assert begun.text + rest.text == whole.text
    assert [hit.chunk.id for hit in rest.hits] == [hit.chunk.id for hit in whole.hits]


def test_a_kept_conversation_goes_on_from_both(kb):
    """The whole message, sent back, is known with its passages."""
    options = {"k": 2, "context": "keep", "sampling": letters(kb, 8)}
    rest = kb.chat([QUESTION, BEGUN], **options)
    turns = [QUESTION, {**BEGUN, "content": BEGUN["content"] + rest.text}, {"role": "user", "content": "And cats?"}]
    after = kb.chat(turns, **options)
    known = {hit.chunk.id for hit in rest.hits}
    found = sum(hit.chunk.num_tokens for hit in after.hits if hit.chunk.id not in known)
    new = len("[end][user]Question: And cats?[end][assistant]") + found
    assert after.usage.prompt_tokens == rest.usage.prompt_tokens + 8 + new  # its passages stand there still
    assert after.usage.computed_tokens <= new + 8


def test_without_a_chat_template_it_stands_behind_the_word_for_answers(lm, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "chat_template", None)
    text = lm.tokenizer.decode(prompt_ids(lm.tokenizer, QUESTION, BEGUN), skip_special_tokens=True)
    assert text == f"{QUESTION['content']}\nAnswer: {BEGUN['content']}"


def test_an_empty_message_is_none_and_a_call_is_not_continued(lm):
    alone = prompt_ids(lm.tokenizer, QUESTION)
    for empty in ("", " \n"):
        assert prompt_ids(lm.tokenizer, QUESTION, {"role": "assistant", "content": empty}) == alone
    called = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
    assert lm.tokenizer.decode(prompt_ids(lm.tokenizer, QUESTION, called)).endswith("see.[end][assistant]")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            CHAT.replace("m['content']", "'...' if m['role'] == 'assistant' else m['content']"),
            "does not write the last",
        ),
        (CHAT.replace("m['content']", "m['content'] * 2"), "does not write the last message"),
        (
            "{% if messages[-1].role != 'user' %}{{ raise_exception('ends with a user') }}{% endif %}",
            "ends with a user",
        ),
    ],
)
def test_it_is_refused_by_name_where_the_template_cannot(kb, monkeypatch, template, reason):
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", template)
    with pytest.raises(PromptError, match=reason):
        kb.chat([QUESTION, BEGUN], sampling=SHORT)


# Thoughts


def test_what_a_thinking_model_is_given_to_go_on_with_is_its_answer(kb, monkeypatch):
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", CHATML)
    script(monkeypatch, kb.lm, "town.")
    answer = kb.chat([QUESTION, BEGUN], sampling=rc.Sampling(max_tokens=30))
    assert (answer.text, answer.reasoning) == ("town.", "")


def test_unless_its_template_puts_it_into_the_thoughts(kb, monkeypatch):
    opens = CHAT.replace("m['content']", "('<think>' if loop.last and m['role'] == 'assistant' else '') + m['content']")
    monkeypatch.setattr(kb.lm.tokenizer, "chat_template", opens + "{# </think> #}")
    script(monkeypatch, kb.lm, "Hm.</think>town.")
    long = {"role": "assistant", "content": BEGUN["content"] * 5}
    answer = kb.chat([QUESTION, long], sampling=rc.Sampling(max_tokens=30))
    assert (answer.text, answer.reasoning) == ("town.", "Hm.")


# Text


def test_a_space_before_the_first_word_is_kept():
    """Decoders of SentencePiece's kind drop the first space of what they decode."""
    words = {"\u2581Dogs": 0, "\u2581bark": 1, "s": 2, "<unk>": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    for begun, ids, text in (([0], [1], " bark"), ([0], [2], "s"), ([], [1], "bark")):
        pieces = Detokenizer(tokenizer, begun=begun)
        assert "".join([*(pieces.push(id) for id in ids), pieces.finish()]) == text


def test_stop_strings_are_looked_for_in_what_is_new(lm):
    tokenizer = AutoTokenizer.from_pretrained(lm.name)
    begun, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "bc ab."))
    pieces = Detokenizer(tokenizer, ("ab",), begun=begun[-1:])
    assert "".join([*(pieces.push(id) for id in ids), pieces.finish()]) == "bc "
