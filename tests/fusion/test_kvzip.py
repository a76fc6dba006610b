"""KVzip: what is kept by plain transformers' own attention, answers by one forward with a mask for each head."""

import math

import pytest
import torch
from blocks import same
from families import (
    FAMILIES,
    METHOD_FAMILIES,
    assert_same,
    block_diagonal,
    masks_of,
    oracle_model,
    random_prompt,
    saved_tiny,
    tiny,
)
from formula_oracle import (
    ANSWER,
    CHUNKS,
    Family,
    Plan,
    formula_model,
    held_places,
    planned_logits,
    step_by_step,
    with_answer,
    without_dropped,
)  # fmt: skip
from kit.makers import each, made_by
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, StaleBlockError
from ragcache.kv.block_key import Recipe, block_key
from ragcache.models import kvzip
from ragcache.models.encode import AbandonedSignal

SINKS = 4


family = each(METHOD_FAMILIES, Family)
llama = made_by(Family, "llama", scope="function")


def ranked(scores, always):
    """Places, best first, by hand; those of `always` first, of equal ones the earlier."""
    return sorted(range(len(scores)), key=lambda place: (place not in always, -scores[place], place))


def shared_out(scores, count, always):
    """Places that each head holds, ascending, by layer: `count` a head on average. One place at a time goes to the
    layer whose heads gain most by it.

    scores: by layer and head
    """
    orders = [[ranked(own, always) for own in heads] for heads in scores]
    given = [len(always)] * len(scores)

    def gain(layer):
        if given[layer] == len(scores[layer][0]):
            return -1.0
        pairs = zip(scores[layer], orders[layer], strict=True)
        return sum(own[order[given[layer]]] for own, order in pairs) / len(scores[layer])

    while sum(given) < count * len(scores):
        given[max(range(len(scores)), key=gain)] += 1
    return [[sorted(order[:held]) for order in own] for own, held in zip(orders, given, strict=True)]


def expected_places(oracle, lm, before, chunk, behind, kept, always):
    """By layer and KV head, from the eager attention of one plain forward over before + chunk + behind."""
    ids = [*before, *chunk, *behind]
    mask = masks_of(oracle, torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
    with torch.no_grad():
        out = oracle(input_ids=torch.tensor([ids]), attention_mask=mask, output_attentions=True)
    start, end = len(before), len(before) + len(chunk)
    count = max(math.ceil(kept * len(chunk)), len(always))
    scores = []
    for weights, shape in zip(out.attentions, lm.shape.layers, strict=True):
        groups = weights.shape[1] // shape.num_kv_heads
        heads = weights[0, :, end:, start:end].unflatten(0, (shape.num_kv_heads, groups))
        scores.append(heads.amax((1, 2)).tolist())
    return shared_out(scores, count, always)


def places_of(block):
    return [held_places(block, layer) for layer in range(block.num_layers)]


@pytest.mark.parametrize("kept", [0.3, 0.75])
@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
def test_what_is_kept_follows_the_eager_attention_of_plain_transformers(family, recipe, kept):
    prompt = random_prompt(71, prefix=6, chunks=(9, 20, 15), suffix=3)
    before = prompt.prefix_ids if recipe == "prefix" else []
    blocks = rc.encode(family.lm, prompt, Recipe(recipe, kept=kept))
    whole = rc.encode(family.lm, prompt, recipe)
    for chunk, block, plain in zip(prompt.chunk_ids, blocks, whole, strict=True):
        wanted = expected_places(family.oracle, family.lm, before, chunk, chunk, kept, range(SINKS))
        assert places_of(block) == wanted
        assert block.num_tokens == len(chunk)
        assert block.tokens_by_layer == tuple(len(heads[0]) for heads in wanted)
        assert sum(block.tokens_by_layer) == len(wanted) * max(math.ceil(kept * len(chunk)), SINKS)
        assert block.num_bytes < plain.num_bytes
        for layer in range(block.num_layers):
            rows = torch.tensor(wanted[layer])[:, :, None]
            for own, all_of_it in (
                (block.layer_keys(layer), plain.layer_keys(layer)),
                (block.layer_values(layer), plain.layer_values(layer)),
            ):
                assert torch.equal(own, all_of_it.gather(1, rows.expand(-1, -1, all_of_it.shape[2])))


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(METHOD_FAMILIES)))
def test_every_other_family_too(name):
    lm, oracle = tiny(name)
    prompt = random_prompt(72, prefix=3, chunks=(11, 16), suffix=3)
    for chunk, block in zip(prompt.chunk_ids, rc.encode(lm, prompt, Recipe(kept=0.5)), strict=True):
        assert places_of(block) == expected_places(oracle, lm, [], chunk, chunk, 0.5, range(SINKS))
    theirs = plan_logits(lm, formula_model(saved_tiny(name)), prompt, 0.5)[0]
    assert_same(rc.fuse(lm, prompt, recipe=Recipe(kept=0.5)).next_logits, theirs)


def plan_logits(lm, formula, prompt, kept, answer=()):
    blocks = rc.encode(lm, prompt, Recipe(kept=kept))
    allowed = with_answer(block_diagonal(prompt), len(answer))
    plan = Plan(without_dropped(lm, allowed, blocks, prompt, prompt.context_tokens), torch.arange(allowed.shape[0]))
    return planned_logits(formula, [*prompt.ids, *answer], plan)[prompt.num_tokens - 1 :]


@pytest.mark.parametrize("kept", [0.01, 0.3, 0.6])
def test_reading_and_decoding_is_one_forward_with_a_mask_for_each_head(family, kept):
    prompt = random_prompt(73, prefix=6, chunks=CHUNKS, suffix=5)
    fused = rc.fuse(family.lm, prompt, "reposition", recipe=Recipe(kept=kept))
    held = sum(max(math.ceil(kept * size), min(SINKS, size)) for size in CHUNKS)
    assert sum(fused.kept_tokens) == (6 + held + 5) * family.lm.shape.num_layers
    assert_same(step_by_step(family.lm, fused, ANSWER), plan_logits(family.lm, family.formula, prompt, kept, ANSWER))


def test_tokens_that_run_together_see_what_those_do_that_run_one_by_one(family):
    prompt = random_prompt(68, prefix=4, chunks=CHUNKS, suffix=5)
    one_by_one, together = (rc.fuse(family.lm, prompt, recipe=Recipe(kept=0.3)) for _ in range(2))
    expected = step_by_step(family.lm, one_by_one, ANSWER)[-1]
    assert_same(family.lm.run(ANSWER, together.next_position, together.cache), expected, atol=3e-5)


def test_text_between_passages_does_not_see_what_was_dropped_either(family):
    """Labels stand behind some passages and before others: they run over what the heads hold of the former."""
    chunks = ((*range(20, 35),), (*range(60, 78),))
    parts = [rc.prompt.Text((7, 9)), rc.prompt.Passages(chunks[:1]), rc.prompt.Text((11, 12, 13)),
             rc.prompt.Passages(chunks[1:]), rc.prompt.Text((14, 15))]  # fmt: skip
    ids = [7, 9, *chunks[0], 11, 12, 13, *chunks[1], 14, 15]
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    allowed[2:17, :2] = allowed[20:38, :20] = False
    blocks = family.lm.encode(chunks, Recipe(kept=0.4))
    masks = []
    for layer, shape in enumerate(family.lm.shape.layers):
        by_head = allowed.repeat(shape.num_kv_heads, 1, 1)
        for start, end, block in ((2, 17, blocks[0]), (20, 38, blocks[1])):
            for head, own in enumerate(held_places(block, layer)):
                for place in set(range(end - start)) - set(own):
                    by_head[head, end:, start + place] = False
        masks.append(by_head)
    for by_head in masks:  # the second passage's own tokens were read alone
        by_head[:, 20:38, :20] = False
    logits = planned_logits(family.formula, ids, Plan(masks, torch.arange(len(ids))))[-1]
    assert_same(rc.fuse(family.lm, parts, "reposition", blocks).next_logits, logits)


@pytest.mark.parametrize("method", ["reposition", "concat"])
def test_all_kept_is_bit_equal_and_has_the_same_name(llama, method):
    prompt = random_prompt(75, chunks=CHUNKS)
    plain, whole = rc.encode(llama.lm, prompt), rc.encode(llama.lm, prompt, Recipe(kept=1))
    assert all(same(one, other) for one, other in zip(plain, whole, strict=True))
    one, other = (rc.fuse(llama.lm, prompt, method, blocks).next_logits for blocks in (plain, whole))
    assert torch.equal(one, other)
    assert block_key("f", Recipe(), [], [1]) == block_key("f", Recipe(kept=1.0), [], [1])


def test_markers_stay(llama):
    recipe = Recipe(markers=((101, 102), (103,)), kept=0.1)
    chunk = list(range(20, 60))
    (block,) = llama.lm.encode([chunk], recipe)
    assert block.num_tokens == 43
    for layer in range(block.num_layers):
        for own in block.places(layer).tolist():
            assert own == [0, 1, 2, 3, 4, 5, 42]


def test_a_task_takes_the_place_of_the_repetition(tmp_path):
    directory = str(save_tiny_llama(tmp_path / "model"))
    lm, oracle = rc.load_lm(directory), oracle_model(directory)
    text = [number % 250 for number in range(40, 90)]
    asked = lm.tokenizer("Who wears a hat?", add_special_tokens=False)["input_ids"]
    repeat = lm.tokenizer("\n\nRepeat the previous text exactly.\n\n", add_special_tokens=False)["input_ids"]
    for recipe, behind in ((Recipe(kept=0.3, task="Who wears a hat?"), asked), (Recipe(kept=0.3), [*repeat, *text])):
        (block,) = lm.encode([text], recipe)
        assert places_of(block) == expected_places(oracle, lm, [], text, behind, 0.3, range(SINKS))


def test_long_chunks_are_repeated_in_pieces(llama, monkeypatch):
    chunk = [3 + rank * 7 % 190 for rank in range(200)]
    (whole,) = llama.lm.encode([chunk], Recipe(kept=0.2))
    monkeypatch.setattr(kvzip, "ROWS", 33)
    (pieces,) = llama.lm.encode([chunk], Recipe(kept=0.2))
    assert places_of(whole) == places_of(pieces)


@pytest.mark.parametrize("method", ["cacheblend", "epic", "a3", "prophet", "samkv"])
def test_methods_that_need_whole_blocks_say_so(llama, method):
    prompt = random_prompt(77)
    with pytest.raises(ConfigError, match=rf"{method}.*all of them.*reposition.*kept=1"):
        rc.fuse(llama.lm, prompt, method, recipe=Recipe(kept=0.5))
    with pytest.raises(ConfigError, match=method):
        rc.fuse(llama.lm, prompt, method, rc.encode(llama.lm, prompt, Recipe(kept=0.5)))
    with pytest.raises(StaleBlockError, match=r"holds .* of .* tokens"):
        rc.fuse(
            llama.lm, prompt, method, [block.made_by(None) for block in rc.encode(llama.lm, prompt, Recipe(kept=0.5))]
        )


def test_blocks_of_another_share_are_refused(llama):
    prompt = random_prompt(78, prefix=7)
    blocks = [block.made_by(None) for block in rc.encode(llama.lm, prompt, Recipe(kept=0.5))]
    with pytest.raises(StaleBlockError, match="are wanted"):
        rc.fuse(llama.lm, prompt, "reposition", blocks, recipe=Recipe(kept=0.8))


SHARES = [0, -0.5, 1.5, float("nan"), True, "half", None]
REFUSED = [
    *((lambda _, kept=kept: Recipe(kept=kept), ConfigError, "above 0") for kept in SHARES),
    (lambda _: Recipe(task="names"), ConfigError, "kept below 1"),
    (lambda lm: lm.encode([[5] * 20], Recipe(kept=0.5, task="names")), ConfigError, "no tokenizer"),
    (
        lambda lm: lm.encode([[5] * 300], Recipe(kept=0.5)),  # which fits once and not twice
        ContextTooLongError,
        r"chunk 0, with what is read behind it.*600 tokens.*512.*shorter",
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_what_cannot_be_kept_is_refused(llama, call, error, said):
    with pytest.raises(error, match=said):
        call(llama.lm)


def test_the_second_pass_is_given_up_when_nobody_wants_it(llama):
    asked = []

    def wanted():
        asked.append(1)
        return len(asked) <= 3  # the layers of the first pass

    with pytest.raises(AbandonedSignal):
        llama.lm.encode([list(range(3, 40))], Recipe(kept=0.5), is_needed=wanted)
    assert len(asked) == 4
