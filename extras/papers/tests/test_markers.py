"""`markers` against a plain forward pass over the ids with the markers, at TurboRAG's positions."""

from collections import Counter

import pytest
import torch
from families import VOCAB, assert_same, block_diagonal, layout, oracle_logits_of, random_prompt, tiny
from kit.makers import made_by

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, StaleBlockError
from ragcache.kv.block_key import block_key
from ragcache.models.trained_tokens import TrainedTokens

START, END = 170, 171
GIVEN = {"doc_start_id": START, "doc_end_id": END}
MARKED = rc.Recipe("isolated", markers=(START, END))


llama = made_by(lambda: tiny("llama")[0])


def trained(positions):
    return tiny("llama", TrainedTokens("markers", **GIVEN, positions=positions))


def places(marked, positions):
    return layout(marked)[0].tolist() if positions == "composite" else list(range(marked.num_tokens))


def with_markers(prompt):
    return rc.Prompt(prompt.prefix_ids, [[START, *chunk, END] for chunk in prompt.chunk_ids], prompt.suffix_ids)


@pytest.mark.parametrize("positions", ["reordered", "composite"])
@pytest.mark.parametrize("seed", range(2))
def test_markers_are_one_block_diagonal_forward(family, positions, seed):
    lm, model = family
    prompt = random_prompt(seed, prefix=seed * 4)
    marked = with_markers(prompt)
    where = places(marked, positions)
    blocks = rc.encode(lm, prompt, recipe=MARKED)
    fused = rc.fuse(lm, prompt, method="markers", positions=positions, blocks=blocks, **GIVEN)
    assert_same(fused.next_logits, oracle_logits_of(model, marked.ids, block_diagonal(marked), where))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}
    assert fused.next_position == where[-1] + 1
    assert fused.prompt_tokens == marked.num_tokens
    assert set(fused.kept_tokens) == {marked.num_tokens}


@pytest.mark.parametrize("positions", ["reordered", "composite"])
def test_one_chunk_behind_the_prefix_is_full_prefill(family, positions):
    lm, model = family
    prompt = random_prompt(7, prefix=6, chunks=(17,))
    marked = with_markers(prompt)
    causal = torch.ones(marked.num_tokens, marked.num_tokens, dtype=torch.bool).tril()
    fused = rc.fuse(lm, prompt, method="markers", positions=positions, recipe="prefix", **GIVEN)
    assert_same(fused.next_logits, oracle_logits_of(model, marked.ids, causal))


@pytest.mark.parametrize("positions", ["reordered", "composite"])
def test_a_trained_checkpoint_needs_no_options(positions):
    lm, model = trained(positions)
    assert lm.default_method == "markers"
    prompt = random_prompt(4)
    marked = with_markers(prompt)
    fused = rc.fuse(lm, prompt, method="markers")
    where = places(marked, positions)
    assert_same(fused.next_logits, oracle_logits_of(model, marked.ids, block_diagonal(marked), where))
    assert fused.reserved_ids == {START, END}
    other = "reordered" if positions == "composite" else "composite"
    moved = rc.fuse(lm, prompt, method="markers", positions=other).next_logits
    assert not torch.allclose(moved, fused.next_logits, atol=1e-3)


def test_decoding_goes_on_behind_the_longest_chunk():
    lm, model = trained("composite")
    prompt = random_prompt(5)
    marked = with_markers(prompt)
    ids, where, allowed = marked.ids, places(marked, "composite"), block_diagonal(marked)
    fused = rc.fuse(lm, prompt, method="markers")
    position = fused.next_position
    for token in (11, 12, 13):
        logits = lm.run([token], position, fused.cache)
        ids, where = [*ids, token], [*where, position]
        grown = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        grown[:-1, :-1] = allowed
        allowed, position = grown, position + 1
        assert_same(logits, oracle_logits_of(model, ids, allowed, where))


def test_blocks_with_and_without_markers_are_never_mistaken(llama):
    prompt = random_prompt(0)
    plain, marked = rc.encode(llama, prompt), rc.encode(llama, prompt, recipe=MARKED)
    assert [block.num_tokens for block in marked] == [len(chunk) + 2 for chunk in prompt.chunk_ids]
    with pytest.raises(StaleBlockError, match="markers 170 and 171"):
        rc.fuse(llama, prompt, method="markers", blocks=plain, **GIVEN)
    with pytest.raises(ConfigError, match=r"'reposition' needs blocks of recipe 'isolated', not"):
        rc.fuse(llama, prompt, method="reposition", blocks=marked)
    with pytest.raises(ConfigError, match="with markers 5 and 6, not 'isolated' with markers 170 and 171"):
        rc.fuse(llama, prompt, method="markers", blocks=marked, doc_start_id=5, doc_end_id=6)
    recipes = [rc.Recipe(), MARKED, rc.Recipe(markers=(END, START)), rc.Recipe("prefix"), rc.Recipe(bos=True)]
    keys = Counter(block_key(llama.fingerprint, recipe, (), [1, 2, 3]) for recipe in recipes)
    assert max(keys.values()) == 1
    assert block_key(llama.fingerprint, MARKED, (), [1, 2, 3]) != block_key(
        llama.fingerprint, rc.Recipe(), (), [START, 1, 2, 3, END]
    )


def test_markers_count_towards_the_longest_prompt(llama):
    lengths = [100] * 4
    room = llama.max_positions - sum(lengths) - 2 * len(lengths)

    rc.fuse(llama, random_prompt(0, prefix=0, chunks=tuple(lengths), suffix=room), method="markers", **GIVEN)
    with pytest.raises(ContextTooLongError):
        rc.fuse(llama, random_prompt(0, prefix=0, chunks=tuple(lengths), suffix=room + 1), method="markers", **GIVEN)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, r"no trained markers.*ragcache train"),
        ({"doc_start_id": 5}, "both or neither"),
        ({**GIVEN, "positions": "sideways"}, "sideways"),
        ({"doc_start_id": 5, "doc_end_id": VOCAB}, f"{VOCAB}.*0 to {VOCAB - 1}"),
        ({"doc_start_id": "5", "doc_end_id": 6}, "'5' is no token id"),
    ],
)
def test_what_cannot_be_is_named(llama, options, named):
    with pytest.raises(ConfigError, match=named):
        rc.fuse(llama, random_prompt(0), method="markers", **options)
