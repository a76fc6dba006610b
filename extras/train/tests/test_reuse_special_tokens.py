"""The ids of link tokens and markers, and the initial values of their rows."""

from dataclasses import replace

import pytest
import torch
from families import tiny_config
from tiny_model import byte_tokenizer
from tokenizers import Tokenizer, models
from transformers import AddedToken, AutoModelForCausalLM, PreTrainedTokenizerFast

from ragcache.errors import ConfigError
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.special_tokens import choose_spec, prepare_model


def tokenizer_with(tokens: list[str]):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    "name",
    ["<|reserved_special_token_{}|>", "<unused{}>", "[unused{}]", "<reserved_{}>", "<|extra_{}|>", "<SPECIAL_{}>"],
)
def test_reserved_tokens_are_used_where_there_are_enough_in_a_row(name):
    tokenizer = tokenizer_with([name.format(n) for n in range(12)])
    size = len(tokenizer)
    assert choose_spec(tokenizer, "link", 2, 5, "reordered") == TrainedTokens("link", "isolated", 2, 5, 258, 268, 269)
    assert len(tokenizer) == size


@pytest.mark.parametrize("kept", [[f"<|reserved_{n}|>" for n in range(5)], ["<unused0>", "x0", "<unused1>", "x1"], []])
def test_else_the_vocabulary_grows(kept):
    tokenizer = tokenizer_with(kept)
    size = len(tokenizer)
    spec = choose_spec(tokenizer, "link", 2, 2, "reordered")
    assert spec is not None
    assert sorted(spec.added_ids) == list(range(size, size + 6))
    assert len(tokenizer) == size + 6
    assert tokenizer.convert_ids_to_tokens(spec.link_ids(1)) == ["<|link_2_1|>", "<|link_2_2|>"]
    spec.check(size + 6, tokenizer, "it")  # set apart from text


def test_markers_take_two_ids_and_block_attention_none():
    tokenizer = byte_tokenizer()
    assert choose_spec(tokenizer, "link", 0, 16, "reordered") == TrainedTokens("reposition")
    assert len(tokenizer) == 258
    spec = choose_spec(tokenizer, "markers", 5, 16, "composite")
    assert spec == TrainedTokens("markers", doc_start_id=258, doc_end_id=259, positions="composite")


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{n}": n for n in range(128_000)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w0")))
    tokens = [f"<|reserved_special_token_{n}|>" for n in range(256)]
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
    return tokenizer


def test_llama_3_gets_the_ids_of_the_authors_code():
    tokenizer = llama3_tokenizer()
    spec = choose_spec(tokenizer, "link", 5, 10, "reordered")
    assert spec is not None
    assert spec.link_ids(3) == [128011 + 5 * 3 + place for place in range(5)]
    assert (spec.kv_start_id, spec.kv_end_id) == (128254, 128255)
    assert len(tokenizer) == 128256
    with pytest.raises(ConfigError, match="for 48 passages at 5 each"):
        choose_spec(tokenizer, "link", 5, 49, "reordered")


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: tokenizer_with([f"<unused{n}>" for n in range(9)]), None])
def test_the_second_stage_finds_the_ids_of_the_first(make):
    """Rows of the first stage are kept if the section is the same, though a Llama 3 vocabulary has grown meanwhile."""
    tokenizer = llama3_tokenizer() if make is None else make()
    first, size = choose_spec(tokenizer, "link", 2, 3, "reordered"), len(tokenizer)
    assert (choose_spec(tokenizer, "link", 2, 3, "reordered"), len(tokenizer)) == (first, size)
    assert first.first_link_id == 128011 or make is not None


@pytest.mark.parametrize(("tokens", "slots"), [(-1, 4), (5, 0)])
def test_numbers_out_of_range_are_refused(tokens, slots):
    with pytest.raises(ConfigError, match="link_tokens is"):
        choose_spec(byte_tokenizer(), "link", tokens, slots, "reordered")
    with pytest.raises(ConfigError, match="one of link, markers"):
        choose_spec(byte_tokenizer(), "glue", 5, 4, "reordered")


def tiny(tied: bool):
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.tie_word_embeddings = tied
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [True, False])
def test_growing_keeps_old_rows_and_tied_heads_tied(tied):
    model = tiny(tied)
    old = model.get_input_embeddings().weight.detach().clone()
    old_head = model.get_output_embeddings().weight.detach().clone()
    spec = TrainedTokens("link", "isolated", 2, 3, 199, 205, 206)
    prepare_model(model, spec, seed=1)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embeddings.shape[0] == head.shape[0] == model.config.vocab_size == 207
    assert torch.equal(embeddings[:199], old)
    assert torch.equal(head[:199], old_head)
    assert (head is embeddings) == tied
    assert TrainedTokens.of(model.config) == spec


def test_new_rows_look_like_words_and_differ():
    model = tiny(False)
    spec = TrainedTokens("link", "isolated", 2, 3, 50, 56, 57)  # inside the vocabulary
    ids = sorted(spec.added_ids)
    others = [i for i in range(199) if i not in spec.added_ids]
    old = model.get_input_embeddings().weight.detach()[others].clone()
    prepare_model(model, spec, seed=1)
    rows = model.get_input_embeddings().weight.detach()
    assert torch.equal(rows[others], old)
    assert torch.pdist(rows[ids]).min() > 0.3 * torch.pdist(old).mean()
    lengths = rows[ids].norm(dim=1) / old.norm(dim=1).mean()
    assert ((lengths > 0.5) & (lengths < 2)).all()
    head = model.get_output_embeddings().weight.detach()
    torch.testing.assert_close(head[ids], head[others].mean(0).expand(len(ids), -1))


def test_the_start_depends_on_the_seed_alone():
    starts = []
    for seed in (1, 1, 2):
        model = tiny(True)
        torch.rand(seed)  # whatever ran before
        prepare_model(model, TrainedTokens("link", "isolated", 2, 3, 199, 205, 206), seed)
        starts.append(model.get_input_embeddings().weight.detach())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


LINKS = TrainedTokens("link", "isolated", 2, 3, 199, 205, 206)
FEWER, LONGER = replace(LINKS, link_slots=2), replace(LINKS, link_tokens=3, link_slots=2)


@pytest.mark.parametrize(
    ("first", "second", "changed"),
    [
        (FEWER, LINKS, [203, 204]),
        (LINKS, FEWER, []),
        # Of slot 1 the tokens 1 and 2 stay; from the third on every id is another token of another slot.
        (LINKS, LONGER, [201, 202, 203, 204]),
    ],
    ids=["a slot more", "a slot less", "a token more"],
)
def test_ids_that_stand_for_the_same_keep_their_rows_and_others_start_anew(first, second, changed):
    model = tiny(True)
    prepare_model(model, first, 1)
    before = model.get_input_embeddings().weight.detach().clone()
    prepare_model(model, second, 2)
    after = model.get_input_embeddings().weight.detach()
    assert torch.nonzero((after != before).any(1)).flatten().tolist() == changed
