"""The mini model's tokenizer: any text, a token per name at any place, and a template that splits at the context."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragcache_eval.registry import names
from tools.mini.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, build_tokenizer, save_tokenizer, token_id

TOKENIZER = build_tokenizer()


def ids(text):
    return TOKENIZER.encode(text).ids


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, directory)
    return AutoTokenizer.from_pretrained(directory)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_comes_back_up_to_one_leading_space(text):
    assert TOKENIZER.decode(ids(text), skip_special_tokens=False).lstrip(" ") == text.lstrip(" ")


def test_no_text_becomes_a_special_token_by_chance():
    assert not set(ids("Mira <bos> reserved_0 | eos")) & set(range(len(SPECIAL_TOKENS)))


def test_a_name_has_the_same_tokens_wherever_it_stands():
    for name in ("Mira Halden", "North Beckbrook", "Chess Club Kestrel"):
        alone = ids(name)
        for text in (f"Where does {name} live?", f"# {name}\n", f"one\n{name} two", f"one\n\n{name}"):
            encoded = ids(text)
            assert any(encoded[start : start + len(alone)] == alone for start in range(len(encoded))), text


@pytest.mark.parametrize(
    "group", ["FEMALE_NAMES", "MALE_NAMES", "CLUB_EMBLEMS", "LAKES", "HILLS", "PRODUCTS", "PROFESSIONS"]
)
def test_listed_words_are_one_token(group):
    assert all(len(ids(word)) == 1 for word in getattr(names, group))


def test_special_tokens_come_first():
    assert [token_id(token) for token in (BOS, EOS, PAD)] == [TOKENIZER.token_to_id(token) for token in (BOS, EOS, PAD)]
    assert len(SPECIAL_TOKENS) == 3 + 64


def test_transformers_loads_the_same_tokenizer(loaded):
    text = "Mira Halden lives in North Beckbrook.\nShe was born in 1931.\n"
    assert loaded(text, add_special_tokens=False).input_ids == ids(text)
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (BOS, EOS, PAD)


def test_the_chat_template_is_the_training_format(loaded):
    messages = [{"role": "user", "content": "PASSAGES\nQuestion: Where does Mira live?"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}Answer from the registry.\nPASSAGES\nQuestion: Where does Mira live?\nAnswer:"


def test_the_chat_template_takes_a_system_message_and_earlier_turns(loaded):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Question: One?"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Question: Three?"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}Be brief.\nQuestion: One?\nAnswer: Two{EOS}\nQuestion: Three?\nAnswer:"


def test_prefix_passages_and_suffix_apart_are_the_ids_of_the_whole():
    parts = ["Answer from the registry.\n", "# Mira Halden\n\nShe lives there.\n", "Question: Where?\nAnswer:"]
    assert [token for part in parts for token in ids(part)] == ids("".join(parts))
