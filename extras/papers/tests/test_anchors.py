"""Anchors: what blocks hold and what is answered from them, against plain transformers over the whole sequence of text
and anchors under an explicit mask."""

import pytest
import torch
from families import (
    FAMILIES,
    METHOD_FAMILIES,
    VOCAB,
    assert_same,
    masks_of,
    oracle_logits_of,
    oracle_model,
    random_prompt,
    tiny_config,
)
from transformers import AutoModelForCausalLM, DynamicCache

import ragcache as rc
from extras.train.tests import reuse_oracle as oracle
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StaleBlockError
from ragcache.kv.anchor_tokens import Anchors
from ragcache.kv.block_key import Recipe, block_key
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.prompt import Passages, Text

IDS, SEGMENT = (170, 171, 172), 5
ANCHORED = Recipe(anchors=Anchors(IDS, SEGMENT))
STATED = {"first_anchor_id": 170, "anchor_tokens": 3, "anchor_segment": SEGMENT}
LINK = TrainedTokens("link", "isolated", 2, 8, 20, 60, 61, **STATED)
REPOSITION = TrainedTokens("reposition", **STATED)
PROMPT = random_prompt(91, prefix=6, chunks=(7, 20, 1, 5, 13), suffix=5)
ANSWER = [5, 77, 31, 8]
LINKS = [[20 + 2 * slot, 21 + 2 * slot] for slot in range(5)]


class Trained:
    def __init__(self, family, directory, spec):
        torch.manual_seed(0)
        config = tiny_config(family)
        config.ragcache = spec.section()
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        self.lm, self.plain = rc.load_lm(directory), oracle_model(str(directory))


def compressed(prompt=PROMPT, answer=(), links=None, **around):
    links = [[]] * len(prompt.chunk_ids) if links is None else links
    questions = [[*prompt.suffix_ids, *answer]]
    return oracle.compressed(prompt.prefix_ids, prompt.chunk_ids, questions, links, IDS, SEGMENT, **around)


def plain_logits(model, tokens, behind_prefix=False):
    allowed = oracle.allowed(tokens, behind_prefix=behind_prefix)
    return oracle_logits_of(model, [token.id for token in tokens], allowed)


def step_by_step(lm, fused, answer):
    out = [fused.next_logits]
    for step, token in enumerate(answer):
        out.append(lm.run([token], fused.next_position + step, fused.cache))
    return torch.stack(out)


def expected_steps(model, answer, **layout):
    return torch.stack([plain_logits(model, compressed(answer=answer[:n], **layout)) for n in range(len(answer) + 1)])


def plain_kv(model, tokens, behind_prefix):
    """Rotated keys and values of all tokens by layer, [num_kv_heads, n, head_dim], from one plain forward."""
    cache = DynamicCache()
    mask = masks_of(model, oracle.allowed(tokens, behind_prefix=behind_prefix))
    with torch.no_grad():
        model(input_ids=torch.tensor([[token.id for token in tokens]]), attention_mask=mask, past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
@pytest.mark.parametrize("family", METHOD_FAMILIES)
def test_a_block_is_the_anchors_kv_of_a_plain_forward(family, recipe, tmp_path):
    one = Trained(family, tmp_path, REPOSITION)
    blocks = rc.encode(one.lm, PROMPT, Recipe(recipe, anchors=ANCHORED.anchors))
    prefix = PROMPT.prefix_ids if recipe == "prefix" else []
    for chunk, block in zip(PROMPT.chunk_ids, blocks, strict=True):
        tokens = oracle.compressed(prefix, [chunk], [], [[]], IDS, SEGMENT)
        places = [place for place, token in enumerate(tokens) if token.part == "anchor"]
        first = len(prefix)
        assert (block.num_tokens, set(block.tokens_by_layer)) == (len(tokens) - first, {len(places)})
        for layer, (keys, values) in enumerate(plain_kv(one.plain, tokens, recipe == "prefix")):
            assert block.places(layer).tolist() == [[place - first for place in places]] * keys.shape[0]
            ours = one.lm.rope.rotate(block.layer_keys(layer), layer, torch.tensor(places))
            assert_same(ours, keys[:, places])
            assert_same(block.layer_values(layer), values[:, places])


@pytest.mark.parametrize("family", FAMILIES)
def test_link_is_one_forward_over_text_anchors_and_links(family, tmp_path):
    one = Trained(family, tmp_path, LINK)
    fused = rc.fuse(one.lm, PROMPT, one.lm.default_method)
    assert one.lm.default_method == "link"
    held = 6 + 1 + sum(-(-len(chunk) * 3 // 5) for chunk in PROMPT.chunk_ids) + 2 * 5 + 1 + 5
    assert fused.kept_tokens == (held,) * one.lm.num_layers
    assert max(fused.computed_tokens) == 2 * 5 + 1 + 5
    expected = expected_steps(one.plain, ANSWER, links=LINKS, start=60, end=61)
    assert_same(step_by_step(one.lm, fused, ANSWER), expected)


@pytest.mark.parametrize("method", ["reposition", "link", "concat-of-one", "ape-of-one"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_methods_that_move_blocks_read_them(family, method, tmp_path):
    """Of one passage all of them are the same forward; concat and ape leave several side by side."""
    one = Trained(family, tmp_path, REPOSITION)
    name, _, few = method.partition("-")
    prompt = rc.Prompt([] if few else PROMPT.prefix_ids, PROMPT.chunk_ids[1 : 2 if few else 5], PROMPT.suffix_ids)
    options = {"temperature": 1.0, "scale": 1.0} if name == "ape" else {}
    assert_same(rc.fuse(one.lm, prompt, name, **options).next_logits, plain_logits(one.plain, compressed(prompt)))


def test_a_passage_behind_the_prefix_sees_it(tmp_path):
    one = Trained("gemma2", tmp_path, LINK)
    prompt = rc.Prompt(PROMPT.prefix_ids, PROMPT.chunk_ids[1:2], PROMPT.suffix_ids)
    ours = rc.fuse(one.lm, prompt, "link", recipe="prefix").next_logits
    tokens = compressed(prompt, links=LINKS, start=60, end=61)
    assert_same(ours, plain_logits(one.plain, tokens, behind_prefix=True))


def test_a_chunk_of_more_rows_than_run_at_once(tmp_path):
    one = Trained("mistral-window", tmp_path, REPOSITION)
    prompt = random_prompt(92, chunks=(200, 30))
    assert_same(rc.fuse(one.lm, prompt).next_logits, plain_logits(one.plain, compressed(prompt)))


def test_text_between_passages_sees_anchors_alone(tmp_path):
    one = Trained("llama", tmp_path, REPOSITION)
    chunks = ((*range(20, 35),), (*range(60, 78),))
    parts = [Text((7, 9)), Passages(chunks[:1]), Text((11, 12, 13)), Passages(chunks[1:]), Text((14, 15))]
    links = [[11, 12, 13], []]  # text sees what link tokens see
    tokens = oracle.compressed((7, 9), chunks, [(14, 15)], links, IDS, SEGMENT)
    assert_same(rc.fuse(one.lm, parts, "reposition").next_logits, plain_logits(one.plain, tokens))


def test_a_segment_as_long_as_the_chunk_is_a_trailer(tmp_path):
    """One segment: its anchors run behind all of the text, as tokens behind a chunk do."""
    lm = Trained("qwen3", tmp_path, REPOSITION).lm
    chunk = list(range(30, 50))
    (anchored,) = lm.encode([chunk], Recipe(bos=True, anchors=(IDS, 20)))
    (whole,) = lm.encode([chunk], Recipe(bos=True, markers=((), IDS)))
    assert (anchored.num_tokens, set(anchored.tokens_by_layer)) == (whole.num_tokens, {3})
    for layer in range(anchored.num_layers):
        assert_same(anchored.layer_keys(layer), whole.layer_keys(layer)[:, -3:])
        assert_same(anchored.layer_values(layer), whole.layer_values(layer)[:, -3:])


def test_full_prefill_reads_no_anchors(tmp_path):
    one = Trained("llama", tmp_path, REPOSITION)
    causal = torch.ones(PROMPT.num_tokens, PROMPT.num_tokens, dtype=torch.bool).tril()
    assert_same(rc.fuse(one.lm, PROMPT, "full").next_logits, oracle_logits_of(one.plain, PROMPT.ids, causal))


def test_recipes_by_name():
    recipes = [
        Recipe(),
        ANCHORED,
        Recipe(anchors=(IDS, 6)),
        Recipe(anchors=(IDS[:2], 5)),
        Recipe("prefix", anchors=(IDS, 5)),
        Recipe(markers=((), IDS)),
    ]
    assert len({block_key("f", recipe, [], [1, 2]) for recipe in recipes}) == len(recipes)
    assert [Recipe.from_json(recipe.to_json()) for recipe in recipes] == recipes
    assert str(ANCHORED) == "'isolated' with anchors 170 to 172 behind every 5 tokens"
    for size in range(23):
        text = list(range(size))
        block = ANCHORED.marked(text)
        assert block == [token.id for token in oracle.compressed([], [text], [], [[]], IDS, SEGMENT)]
        assert ANCHORED.unmarked(block) == text
    with pytest.raises(ConfigError, match="lacks its anchors"):
        ANCHORED.unmarked([1, 2, 3, 4, 5, 170, 171, 173])


@pytest.mark.parametrize(
    "anchors", [(), ((), 100), ((5,), 0), ((5, 6), 1), ((5.0,), 10), ((True,), 10), (5, 10), ((5,), 10, 1), "ab", 7]
)
def test_what_are_no_anchors_is_refused(anchors):
    with pytest.raises(ConfigError, match=r"cannot be used.*at least one.*at least as many"):
        Recipe(anchors=anchors)


@pytest.mark.parametrize("other", [{"markers": (5, 6)}, {"neighbours": 2}, {"kept": 0.5}])
def test_what_does_not_go_with_anchors_is_refused(other):
    with pytest.raises(ConfigError, match=f"anchors and {next(iter(other))}.*do not go together"):
        Recipe(anchors=(IDS, SEGMENT), **other)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Trained("llama", tmp_path_factory.mktemp("llama"), REPOSITION).lm


def test_ids_that_the_model_lacks_and_chunks_that_grow_too_long_are_refused(llama):
    with pytest.raises(PromptError, match=f"token id {VOCAB}"):
        llama.encode([[5, 6]], Recipe(anchors=((VOCAB,), 10)))
    with pytest.raises(ContextTooLongError, match=r"chunk 0 has 640 tokens.*takes 512"):
        llama.encode([[5] * 400], ANCHORED)


@pytest.mark.parametrize("method", ["cacheblend", "epic", "a3", "prophet", "samkv"])
def test_methods_that_need_whole_blocks_say_so(llama, method):
    with pytest.raises(ConfigError, match=rf"{method}.*all of them.*170 to 172.*reposition.*'full'"):
        rc.fuse(llama, PROMPT, method)


def test_blocks_and_recipes_that_are_not_the_models_are_refused(llama):
    for other in (Recipe(anchors=(IDS, 6)), Recipe(anchors=(IDS[:2], SEGMENT))):
        with pytest.raises(ConfigError, match=r"needs blocks of recipe.*behind every 5 tokens"):
            rc.fuse(llama, PROMPT, recipe=other)
        blocks = [block.made_by(None) for block in rc.encode(llama, PROMPT, other)]
        with pytest.raises(StaleBlockError, match=r"its text has"):
            rc.fuse(llama, PROMPT, blocks=blocks)
    with pytest.raises(ConfigError, match="do not go together"):
        rc.fuse(llama, PROMPT, recipe=Recipe(kept=0.5))
    with pytest.raises(StaleBlockError, match="holds 7 tokens"):
        rc.fuse(llama, PROMPT, blocks=[block.made_by(None) for block in rc.encode(llama, PROMPT)])


def test_a_model_without_anchors_refuses_blocks_with_them(llama, tmp_path):
    plain = Trained("llama", tmp_path, TrainedTokens("reposition")).lm
    with pytest.raises(ConfigError, match=r"'reposition' needs blocks of recipe 'isolated', not .*anchors"):
        rc.fuse(plain, PROMPT, blocks=rc.encode(plain, PROMPT, ANCHORED))
