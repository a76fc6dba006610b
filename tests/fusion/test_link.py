"""`link` against one plain forward over the interleaved ids, under the mask of KVLink's figure 2."""

import pytest
import torch
from families import (
    SMALL,
    VOCAB,
    assert_same,
    causal_logits,
    linked,
    oracle_logits_of,
    oracle_model,
    random_prompt,
    tiny,
)
from kit.makers import each
from transformers import LlamaConfig, LlamaForCausalLM

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, PromptError
from ragcache.models.trained_tokens import TrainedTokens

LINKS = [[101, 102], [], [7, 7, 9], [101]]
TRAINED = TrainedTokens("link", link_tokens=2, link_slots=4, first_link_id=150, kv_start_id=160, kv_end_id=161)


trained = each(["llama", "qwen3", "phi3", "mixtral"], lambda name: tiny(name, TRAINED))


def oracle_of(model, prompt, links, **more):
    ids, allowed = linked(prompt, links, **more)
    return oracle_logits_of(model, ids, allowed)


@pytest.mark.parametrize("seed", range(2))
def test_link_is_one_forward_under_the_papers_mask(family, seed):
    lm, model = family
    prompt = random_prompt(seed, prefix=seed * 4)
    fused = rc.fuse(lm, prompt, method="link", link_ids=LINKS, blocks=rc.encode(lm, prompt))
    assert_same(fused.next_logits, oracle_of(model, prompt, LINKS))
    added = sum(map(len, LINKS))
    assert set(fused.computed_tokens) == {added + len(prompt.suffix_ids)}
    assert set(fused.kept_tokens) == {prompt.num_tokens + added} == {fused.next_position, fused.prompt_tokens}


def test_without_link_tokens_it_is_reposition(family):
    lm, _ = family
    prompt = random_prompt(3)
    moved = rc.fuse(lm, prompt, method="reposition").next_logits
    for options in ({"link_ids": [[]] * 4}, {"link_tokens": 0}):
        assert torch.equal(rc.fuse(lm, prompt, method="link", **options).next_logits, moved)


def test_a_trained_checkpoint_needs_no_options(trained):
    lm, model = trained
    assert lm.default_method == "link"
    for seed, chunks in enumerate([(7, 13, 4, 9), (5, 3)]):
        prompt = random_prompt(seed, chunks=chunks)
        links = [[150 + 2 * slot, 151 + 2 * slot] for slot in range(len(chunks))]
        expected = oracle_of(model, prompt, links, before=[160], behind=[161])
        for options in ({}, {"link_tokens": 2}):
            fused = rc.fuse(lm, prompt, method="link", **options)
            assert_same(fused.next_logits, expected)
        assert set(fused.computed_tokens) == {2 * len(chunks) + 1 + len(prompt.suffix_ids)}
        assert fused.prompt_tokens == prompt.num_tokens + 2 * len(chunks) + 2 == fused.next_position
        assert fused.reserved_ids == set(range(150, 158)) | {160, 161}


def test_kv_start_belongs_to_the_prefix(trained):
    """A chunk encoded behind the prefix sees it too, so one such chunk is full prefill."""
    lm, model = trained
    one = random_prompt(9, chunks=(11,))
    ids = [*one.prefix_ids, 160, *one.chunk_ids[0], 150, 151, 161, *one.suffix_ids]
    assert_same(rc.fuse(lm, one, method="link", recipe="prefix").next_logits, causal_logits(model, ids))


def test_given_link_ids_replace_all_that_the_checkpoint_adds(trained):
    lm, model = trained
    prompt = random_prompt(4)
    assert_same(rc.fuse(lm, prompt, method="link", link_ids=LINKS).next_logits, oracle_of(model, prompt, LINKS))


def test_a_callers_prefix_holds_kv_start(trained):
    lm, _ = trained
    prompt = random_prompt(5)
    prefix = lm.read([*prompt.prefix_ids, 160])
    fused = rc.fuse(lm, prompt, method="link", blocks=rc.encode(lm, prompt), exact=prefix)
    assert fused.encoded_tokens == 0
    assert fused.cached_tokens == prompt.context_tokens + 1
    assert_same(fused.next_logits, rc.fuse(lm, prompt, method="link").next_logits)
    with pytest.raises(ConfigError, match="prefix"):
        rc.fuse(lm, prompt, method="link", exact=lm.read(prompt.prefix_ids))


def test_checkpoints_of_the_authors_code(tmp_path):
    """Llama 3's vocabulary and no section: K says everything else."""
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 128256, "hidden_size": 16, "intermediate_size": 24, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    lm, model = rc.load_lm(tmp_path), oracle_model(str(tmp_path))
    assert lm.reuse is None
    prompt = random_prompt(1, chunks=(5, 6, 7))
    for k in (1, 5):
        links = [[128011 + k * n + j for j in range(k)] for n in range(3)]
        expected = oracle_of(model, prompt, links, before=[128254], behind=[128255])
        fused = rc.fuse(lm, prompt, method="link", link_tokens=k)
        assert_same(fused.next_logits, expected)
        assert {128011, 128254, 128255} <= fused.reserved_ids
    with pytest.raises(ConfigError, match="no trained link tokens"):
        rc.fuse(lm, prompt, method="link")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "no trained link tokens.*ragcache train"),
        ({"link_tokens": 5}, "no trained link tokens"),
        ({"link_tokens": -1}, "link_tokens is -1"),
        ({"link_tokens": "5"}, "link_tokens is '5'"),
        ({"link_ids": [[1], [2]]}, "2 lists.*4 chunks"),
        ({"link_ids": [[1], [2], [3], [VOCAB]]}, f"{VOCAB}.*0 to {VOCAB - 1}"),
        ({"link_ids": [[1], [2], [3], [-1]]}, "-1"),
        ({"link_ids": [1, 2, 3, 4]}, "one list of token ids a chunk"),
        ({"link_ids": "abcd"}, "one list of token ids a chunk"),
        ({"link_ids": [[0.5]] * 4}, "one list of token ids a chunk"),
        ({"link_ids": [[]] * 4, "link_tokens": 1}, "exclude each other"),
    ],
)
def test_what_cannot_be_is_named(llama, options, named):
    with pytest.raises(ConfigError, match=named):
        rc.fuse(llama[0], random_prompt(0), method="link", **options)


def test_a_checkpoint_is_held_to_its_training(trained):
    lm, _ = trained
    with pytest.raises(ConfigError, match=r"link_tokens is 5.*trained with 2"):
        rc.fuse(lm, random_prompt(0), method="link", link_tokens=5)
    with pytest.raises(PromptError, match=r"5 passages.*4 at most"):
        rc.fuse(lm, random_prompt(0, chunks=(3, 3, 3, 3, 3)), method="link")
    with pytest.raises(ConfigError, match="no trained markers"):
        rc.fuse(lm, random_prompt(0), method="markers")


def test_link_tokens_count_towards_the_longest_prompt(llama):
    prompt = random_prompt(0, prefix=0, chunks=(500,), suffix=6)
    rc.fuse(llama[0], prompt, method="link", link_ids=[[5] * 6])
    with pytest.raises(ContextTooLongError, match="513"):
        rc.fuse(llama[0], prompt, method="link", link_ids=[[5] * 7])
