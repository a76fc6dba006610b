"""Rows become the ids that the engine makes of the same passages and questions."""

from pathlib import Path

import pytest
from tiny_model import byte_tokenizer

from ragcache.errors import ConfigError
from ragcache.ingest.chunker import Chunker
from ragcache.models.hub import resolve
from ragcache.prompt import encode_text, prompt_format
from ragcache_train.row_encoder import RowEncoder
from ragcache_train.train_options import EncodingOptions
from ragcache_train.train_rows import Asked, BadLine, ChatMessage, DataRow

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # writes finished turns otherwise when others follow
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PASSAGES = ("First line.\n\nSecond <|eos|> line.\n", "Another passage.")
QA = DataRow("qa", "rows:1", None, PASSAGES, (Asked("Which?", "This one"), Asked(" And? ", "That")))
TURNS = tuple(ChatMessage(role, text) for role, text in zip(["user", "assistant"] * 3, "abcdef", strict=True))


def tokenizer_with(template: str | None):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


MINI_TEMPLATE = (Path(resolve("mini")) / "chat_template.jinja").read_text(encoding="utf-8")
TEMPLATES = {"none": None, "chatml": CHATML, "mini": MINI_TEMPLATE, "forgetful": FORGETFUL}


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def tokenizer(request):
    return tokenizer_with(request.param)


def encode(tokenizer, row: DataRow, **options):
    return RowEncoder(tokenizer, EncodingOptions(**options)).encode(row)


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_question_has_the_engines_ids(tokenizer, system):
    row = encode(tokenizer, QA, system=system)
    form = prompt_format(tokenizer, system=system)
    assert tuple(row.prefix) == form.prefix_ids
    chunker = Chunker(tokenizer)
    assert row.chunks == [chunker.split(passage)[0].token_ids for passage in PASSAGES]
    assert [ask.suffix for ask in row.asks] == [form.suffix_ids(tokenizer, asked.question) for asked in QA.asked]
    assert (row.apart, row.shuffle) == (None, True)


def test_a_row_has_its_own_system_text_and_its_order():
    tokenizer = tokenizer_with(CHATML)
    row = DataRow("qa", "", "Mine.", ("P",), (Asked("Q?", "A"),), shuffle=False)
    encoded = encode(tokenizer, row, system="Be brief.")
    assert "Mine." in text_of(tokenizer, encoded.prefix)
    assert not encoded.shuffle


@pytest.mark.parametrize(
    ("name", "answer"), [("none", " This one<|eos|>"), ("chatml", "This one<|im_end|>"), ("mini", " This one<|eos|>")]
)
def test_an_answer_is_what_the_template_writes(name, answer):
    tokenizer = tokenizer_with(TEMPLATES[name])
    assert text_of(tokenizer, encode(tokenizer, QA).asks[0].answer) == answer


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = tokenizer_with(None)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end-of-text"):
        RowEncoder(tokenizer, EncodingOptions())


def test_a_conversation_is_the_template_cut_after_each_answer():
    tokenizer = tokenizer_with(CHATML)
    row = encode(tokenizer, DataRow("chat", "", "S", messages=TURNS))
    messages = [{"role": "system", "content": "S"}, *(turn._asdict() for turn in TURNS[:-1])]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (ask,) = row.asks
    assert "".join(text_of(tokenizer, ids) for ids in [row.prefix, *row.chunks, ask.suffix]) == whole
    turns = [text_of(tokenizer, ids) for ids in row.chunks]
    assert turns[0] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert text_of(tokenizer, ask.answer) == "f<|im_end|>"
    assert row.apart is True


@pytest.mark.parametrize("name", ["none", "forgetful"])
def test_a_conversation_that_cannot_be_cut_is_written_plainly(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    row = encode(tokenizer, DataRow("chat", "", None, messages=TURNS))
    assert [text_of(tokenizer, ids) for ids in row.chunks] == ["a\nb\n", "c\nd\n"]
    form = prompt_format(tokenizer, question_format="{question}")
    assert tuple(row.prefix) == form.prefix_ids
    assert row.asks[0].suffix == form.suffix_ids(tokenizer, "e")


def test_the_oldest_turns_are_left_out_where_they_do_not_fit():
    tokenizer = tokenizer_with(None)
    row = encode(tokenizer, DataRow("chat", "", None, messages=TURNS), max_tokens=20)
    assert [text_of(tokenizer, ids) for ids in row.chunks] == ["c\nd\n"]


def test_a_text_to_summarise_is_cut_into_segments(tokenizer):
    text = "x" * 249
    row = encode(tokenizer, DataRow("summary", "", None, (text,), (Asked("Sum up.", "Short"),)))
    assert [len(ids) for ids in row.chunks] == [100, 100, 50]
    assert [i for ids in row.chunks for i in ids] == encode_text(tokenizer, text + "\n")
    assert (row.apart, row.shuffle) == (True, False)


def test_a_text_to_summarise_is_cut_at_the_end_where_it_does_not_fit():
    tokenizer = tokenizer_with(None)
    row = encode(tokenizer, DataRow("summary", "", None, ("x" * 500,), (Asked("Sum up.", "Short"),)), max_tokens=300)
    (ask,) = row.asks
    total = len(row.prefix) + sum(len(ids) for ids in row.chunks) + len(ask.suffix) + len(ask.answer)
    assert total == 300


def test_an_instruction_is_a_whole_message():
    tokenizer = tokenizer_with(CHATML)
    row = encode(tokenizer, DataRow("instruction", "", None, asked=(Asked("Add 1 and 2.", "3"),)))
    assert row.chunks == []
    whole = text_of(tokenizer, [*row.prefix, *row.asks[0].suffix])
    assert whole == "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n<|im_start|>assistant\n"
    assert row.apart is False


def test_every_token_of_a_plain_text_is_learned():
    tokenizer = tokenizer_with(None)
    (ask,) = encode(tokenizer, DataRow("text", "", text="abc")).asks
    assert [*ask.suffix, *ask.answer] == [tokenizer.bos_token_id, *encode_text(tokenizer, "abc")]
    assert len(ask.suffix) == 1


def test_a_row_that_does_not_fit_is_named():
    tokenizer = tokenizer_with(None)
    assert isinstance(encode(tokenizer, QA, max_tokens=100), type(encode(tokenizer, QA)))
    found = encode(tokenizer, QA, max_tokens=70)
    assert isinstance(found, BadLine)
    assert found.where == "rows:1"
    assert "longest sequence is 70" in found.reason


def test_an_answer_longer_than_the_context_is_refused():
    tokenizer = tokenizer_with(None)
    row = DataRow("qa", "rows:9", None, ("P",), (Asked("Q?", "a" * 80),))
    with pytest.raises(ConfigError, match=r"rows:9.*82 tokens.*takes 40.*max_tokens"):
        encode(tokenizer, row, max_tokens=40)
