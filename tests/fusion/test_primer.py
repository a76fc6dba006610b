"""Blocks read behind a primer that is left out, against plain forwards over [prefix + primer + chunk]."""

import pytest
from blocks import same
from families import FAMILIES, assert_same, ids_of, oracle_logits_of, random_prompt
from kit.makers import made_by
from test_neighbours import one_forward

import ragcache as rc
from ragcache.errors import ConfigError, StaleBlockError
from ragcache.kv.block_key import Recipe, block_key
from ragcache.models.primer import PRIMERS, visible

IDS = (11, 12, 13, 14, 15)
PRIMER = Recipe("primer", primer=IDS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_passages_see_prefix_and_primer_and_the_question_sees_no_primer(load, family):
    """One plain forward: a copy of prefix and primer stands before each passage, which the question does not see."""
    lm, oracle = load(family)
    prompt = random_prompt(70, prefix=6, chunks=(7, 13, 4))
    recipe = lm.recipe(PRIMER)
    fused = rc.fuse(lm, prompt, "reposition", rc.encode(lm, prompt, recipe))
    copies = [[[*prompt.prefix_ids, *recipe.primer_ids]]] * 3
    assert_same(fused.next_logits, oracle_logits_of(oracle, *one_forward(prompt, copies, Recipe())))
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


def test_an_empty_primer_is_the_recipe_prefix(lm):
    prompt = random_prompt(72, prefix=6, chunks=(7, 9))
    empty = lm.recipe(Recipe("primer", primer=()))
    assert empty == Recipe("prefix")
    assert all(map(same, rc.encode(lm, prompt, empty), rc.encode(lm, prompt, "prefix")))
    assert block_key(lm.fingerprint, empty, [9], [1, 2]) == block_key(lm.fingerprint, Recipe("prefix"), [9], [1, 2])


def test_the_key_says_which_primer_and_which_prefix(lm):
    recipes = [PRIMER, Recipe("primer", primer=IDS[1:]), Recipe("primer", primer=IDS, neighbours=1), Recipe("prefix")]
    keys = [block_key(lm.fingerprint, recipe, [9], [1, 2]) for recipe in recipes] + [
        block_key(lm.fingerprint, PRIMER, [8], [1, 2])
    ]
    assert len(set(keys)) == len(keys)
    assert Recipe.from_json(PRIMER.to_json()) == PRIMER


def test_a_primer_longer_than_every_window_is_cut_to_what_is_seen(load):
    lm, _ = load("mistral-window")
    window = lm.config.sliding_window
    long = tuple(ids_of(window + 9, 75))
    assert lm.recipe(Recipe("primer", primer=long)).primer_ids == long[-(window - 1) :]
    mixed, _ = load("gemma2")
    assert visible(long, mixed.config) == long


def test_each_shipped_primer_has_about_as_many_tokens_as_its_name_says(mini):
    for name, text in PRIMERS.items():
        words = len(text.split())
        assert 0.6 * int(name) <= words <= int(name)  # a real tokenizer makes 1.2 to 1.4 tokens of a word
        assert mini.recipe(Recipe("primer", primer=name)).primer_ids
        assert not any(character.isdigit() for character in text)


REFUSED = [
    (lambda lm, mini: Recipe("isolated", primer=IDS), "reads no primer"),
    (lambda lm, mini: Recipe("prefix", primer="128"), "reads no primer"),
    (lambda lm, mini: Recipe("primer", primer=5), "is no text and no list"),
    (lambda lm, mini: Recipe("primer", primer=[1, "2"]), "is no text and no list"),
    (lambda lm, mini: lm.recipe(Recipe("primer", primer=(7,) * 300)), "takes 512"),
    (lambda lm, mini: lm.recipe(Recipe("primer", primer=(5000,))), "outside the vocabulary of .*another model's"),
    (lambda lm, mini: lm.recipe("primer"), "no tokenizer"),
    (lambda lm, mini: mini.recipe(Recipe("primer", primer=(mini.tokenizer.eos_token_id,))), "holds the control token"),
    (lambda lm, mini: block_key(mini.fingerprint, Recipe("primer"), (), [1]), "turns it into a model's ids"),
]
mini = made_by(rc.load_lm, "mini")


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_no_primer_or_cannot_be_read_is_refused(llama, mini, call, words):
    with pytest.raises(ConfigError, match=words):
        call(llama[0], mini)


def test_blocks_behind_another_primer_are_stale(lm):
    prompt = random_prompt(76, prefix=6, chunks=(7, 9))
    with pytest.raises(StaleBlockError):
        rc.fuse(lm, prompt, "reposition", rc.encode(lm, prompt, PRIMER), recipe=Recipe("primer", primer=IDS[1:]))
    with pytest.raises(ConfigError, match="'concat' leaves blocks"):
        rc.fuse(lm, prompt, "concat", rc.encode(lm, prompt, PRIMER))
