"""The layout that travels with a request to vLLM, and the plan made of it. No vLLM is needed."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import LayoutError
from ragcache.fusion.layout import Span
from ragcache.kv.block_key import Recipe, block_key
from ragcache_vllm.plan import make_plan
from ragcache_vllm.request_layout import RequestLayout


@st.composite
def layouts(draw):
    """A layout and, drawn token by token, what each token of its prompt is: a block's number and whether it runs."""
    blocks, runs, tokens, at = [], [], [], 0
    for number in range(draw(st.integers(0, 4))):
        at += (gap := draw(st.integers(0, 3)))
        length = draw(st.integers(1, 6))
        again = [draw(st.booleans()) for _ in range(length)]
        blocks.append(Span(at, at + length))
        tokens += [(None, True)] * gap + [(number, run) for run in again]
        for offset, run in enumerate(again):
            if run and runs and runs[-1].stop == at + offset and offset:
                runs[-1] = Span(runs[-1].start, at + offset + 1)
            elif run:
                runs.append(Span(at + offset, at + offset + 1))
        at += length
    suffix = draw(st.integers(1, 4))
    return RequestLayout(tuple(blocks), tuple(runs)), tokens + [(None, True)] * suffix


@given(layouts())
def test_every_token_is_loaded_or_computed_as_it_was_drawn(drawn):
    layout, tokens = drawn
    ids = list(range(100, 100 + len(tokens)))
    plan = make_plan(ids, layout, "model")
    computed = {at for span in plan.computed for at in range(span.start, span.stop)}
    assert computed == {at for at, (_, runs) in enumerate(tokens) if runs}
    loaded = {at: stretch.key for stretch in plan.stretches for at in range(stretch.tokens.start, stretch.tokens.stop)}
    keys = [block_key("model", Recipe(), [], ids[block.start : block.stop]) for block in layout.blocks]
    assert loaded == {at: keys[number] for at, (number, runs) in enumerate(tokens) if not runs}
    for stretch in plan.stretches:
        (block,) = (one for one in layout.blocks if one.start <= stretch.tokens.start < one.stop)
        assert stretch.offset == stretch.tokens.start - block.start
    assert plan.is_scattered == any(runs and not later for (_, runs), (_, later) in pairwise(tokens))


@given(layouts(), st.data())
def test_what_is_in_vllms_cache_already_is_neither_loaded_nor_computed(drawn, data):
    layout, tokens = drawn
    plan = make_plan(list(range(len(tokens))), layout, "model")
    local, total = data.draw(st.integers(0, len(tokens) - 1)), len(tokens) + data.draw(st.integers(0, 3))
    runs = [runs for _, runs in tokens] + [True] * (total - len(tokens))
    computed = [at for span in plan.computed_behind(local, total) for at in range(span.start, span.stop)]
    assert computed == [at for at in range(local, total) if runs[at]]
    end = data.draw(st.integers(local, total))
    loaded = [at for one in plan.loaded_within(local, end) for at in range(one.tokens.start, one.tokens.stop)]
    assert loaded == [at for at in range(local, end) if not runs[at]]


@given(layouts())
def test_a_layout_survives_its_way_to_vllm(drawn):
    layout, _ = drawn
    assert RequestLayout.from_params(json.loads(json.dumps(layout.to_params()))) == layout


def test_keys_name_the_recipe_the_prefix_and_the_salt():
    layout = RequestLayout(
        (Span(0, 2), Span(2, 6)), prefix=2, recipe=Recipe("prefix", markers=(7, 8)), block_salt="hidden"
    )
    first, second = make_plan([1, 2, 7, 3, 4, 8, 9], layout, "model").keys
    assert first == block_key("model", Recipe(), [], [1, 2], "hidden")
    assert second == block_key("model", Recipe("prefix", markers=(7, 8)), [1, 2], [3, 4], "hidden")


def test_keys_name_the_neighbours_of_each_block():
    recipe, near = Recipe(neighbours=2), ((), ((5, 6), (7,)))
    layout = RequestLayout((Span(0, 2), Span(2, 4)), recipe=recipe, neighbours=near)
    assert RequestLayout.from_params(json.loads(json.dumps(layout.to_params()))) == layout
    keys = make_plan([1, 2, 3, 4, 9], layout, "model").keys
    assert keys == [block_key("model", recipe, [], [1, 2]), block_key("model", recipe, [], [3, 4], "", [[5, 6], [7]])]
    assert layout.salt("model", None) != RequestLayout(layout.blocks, recipe=recipe).salt("model", None)


@pytest.mark.parametrize(
    ("neighbours", "message"),
    [
        (((),), "2 blocks and neighbours of 1"),
        (((), ((5,), (6,), (7,))), "3 neighbours were given"),
        (((), (("a",),)), "are no chunks"),
    ],
)
def test_neighbours_that_do_not_fit_are_refused(neighbours, message):
    with pytest.raises(LayoutError, match=message):
        RequestLayout((Span(0, 2), Span(2, 4)), recipe=Recipe(neighbours=2), neighbours=neighbours)


def test_a_block_begins_and_ends_with_the_markers_of_its_recipe():
    """Or another token's KV would stand under a client's own."""
    layout = RequestLayout((Span(0, 5),), recipe=Recipe(markers=((7, 8), (9,))))
    (key,) = make_plan([7, 8, 3, 4, 9, 5], layout, "model").keys
    assert key == block_key("model", Recipe(markers=((7, 8), (9,))), [], [3, 4])
    for ids in ([6, 8, 3, 4, 9, 5], [7, 8, 3, 4, 4, 5]):
        with pytest.raises(LayoutError, match=r"tokens 0 to 5 of the prompt: .*markers 7 to 8 and 9"):
            make_plan(ids, layout, "model")
    with pytest.raises(LayoutError, match="markers"):
        make_plan([7, 9, 5], RequestLayout((Span(0, 2),), recipe=layout.recipe), "model")


def test_the_salt_names_all_that_the_kv_depends_on():
    layout = RequestLayout((Span(0, 2), Span(2, 6)), (Span(2, 3),), 2, Recipe(), "hidden")
    others = [
        RequestLayout((Span(0, 2), Span(2, 5)), (Span(2, 3),), 2, Recipe(), "hidden"),
        RequestLayout((Span(0, 2), Span(2, 6)), (), 2, Recipe(), "hidden"),
        RequestLayout((Span(0, 2), Span(2, 6)), (Span(2, 3),), 0, Recipe(), "hidden"),
        RequestLayout((Span(0, 2), Span(2, 6)), (Span(2, 3),), 2, Recipe("prefix"), "hidden"),
        RequestLayout((Span(0, 2), Span(2, 6)), (Span(2, 3),), 2, Recipe(markers=((7, 8), ())), "hidden"),
        RequestLayout((Span(0, 2), Span(2, 6)), (Span(2, 3),), 2, Recipe(), "other"),
    ]
    salts = {one.salt("model", None) for one in (layout, *others)}
    salts |= {layout.salt("other", None), layout.salt("model", "caller")}
    assert len(salts) == 9
    assert all("hidden" not in salt for salt in salts)


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([(0, 0)], []),
        ([(3, 2)], []),
        ([(-1, 2)], []),
        ([(0, 4), (3, 6)], []),
        ([(4, 6), (0, 2)], []),
        ([(0, 4)], [(3, 5)]),
        ([(0, 4)], [(5, 6)]),
        ([(0, 4), (4, 8)], [(3, 5)]),
        ([(0, 4)], [(2, 3), (1, 2)]),
    ],
)
def test_spans_that_make_no_layout_are_refused(blocks, runs):
    with pytest.raises(LayoutError, match="layout's"):
        RequestLayout(tuple(Span(*one) for one in blocks), tuple(Span(*one) for one in runs))


@pytest.mark.parametrize("num_tokens", [0, 3, 4])
def test_a_layout_that_leaves_nothing_to_run_is_refused(num_tokens):
    with pytest.raises(LayoutError, match="last token has to run"):
        make_plan(list(range(num_tokens)), RequestLayout((Span(0, 4),)), "model")


@pytest.mark.parametrize(
    "params",
    [
        {},
        [],
        {"blocks": [[0, 4]]},
        {"blocks": [[0, "4"]], "runs": [], "prefix": 0, "recipe": {}, "block_salt": ""},
        {"blocks": [[0, 4, 5]], "runs": [], "prefix": 0, "recipe": {}, "block_salt": ""},
        {"blocks": [[0, 4]], "runs": [], "prefix": True, "recipe": {}, "block_salt": ""},
        {"blocks": [[0, 4]], "runs": [], "prefix": 0, "recipe": {"name": "other"}, "block_salt": ""},
        {"blocks": [[0, 4]], "runs": [], "prefix": 0, "recipe": {"markers": [1]}, "block_salt": ""},
    ],
)
def test_what_a_client_sends_is_checked(params):
    with pytest.raises(LayoutError, match="kv_transfer_params"):
        RequestLayout.from_params({"ragcache": params})


def test_a_request_without_a_layout_has_none():
    assert RequestLayout.from_params(None) is None
    assert RequestLayout.from_params({"do_remote_prefill": True}) is None


def test_blocks_whose_heads_hold_different_tokens_are_refused():
    layout = RequestLayout((Span(0, 4),), recipe=Recipe(kept=0.5))
    with pytest.raises(LayoutError, match=r"0\.5 of the KV.*kept=1"):
        make_plan([1, 2, 3, 4, 5], layout, "model")
