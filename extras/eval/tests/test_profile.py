"""Layers that are found for `prophet`, against a search of all combinations by hand."""

from statistics import fmean

import pytest
import torch
from kit.makers import tiny_lm

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.prompt import prompt_format
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.methods import MethodSpec
from ragcache_eval.profile import Profile, can_profile
from ragcache_eval.reading import forced_logits, write_answer
from ragcache_eval.runner import Runner, RunSettings

SPEC = MethodSpec.parse("prophet:ratio=0.3")
TEXTS = (
    "The cat of the baker sat on the old mat by the door. It was happy there.",
    "Dogs bark at night in the small town of Kelbrook on the hill.",
    "The river Arno rises in the Vale hills and flows into the lake.",
    "A mill stands by the lake, and its miller keeps bees behind it.",
)
QUESTIONS = ("Where do dogs bark?", "Who keeps bees?", "What rises in the hills?")


lm = tiny_lm(positions=2048)


@pytest.fixture(scope="module")
def cases():
    passages = tuple(CasePassage(text) for text in TEXTS)
    return [Case(str(rank), question, passages, ("A mill",)) for rank, question in enumerate(QUESTIONS)]


def far(lm, cases, layers):
    """Return the mean KL from full prefill along full prefill's answer, in nats a token."""
    form, found = prompt_format(lm.tokenizer), []
    for case in cases:
        prompt = case.prompt(lm.tokenizer, form)
        full = rc.fuse(lm, prompt, "full")
        ids = write_answer(lm, full, 6).ids
        ours = rc.fuse(lm, prompt, "prophet", ratio=0.3, layers=list(layers))
        p, q = (forced_logits(lm, one, ids).double().log_softmax(-1) for one in (full, ours))
        found.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return fmean(found)


def profiled(lm, cases, count):
    runner = Runner(lm, prompt_format(lm.tokenizer), RunSettings(max_tokens=6))
    profile = Profile(runner, cases, SPEC, count)
    assert len(list(profile.scores())) == profile.num_scores
    return profile.spec


def test_the_layer_stays_that_brings_answers_nearest_to_full_prefill(lm, cases):
    by_layer = {layer: far(lm, cases, [layer]) for layer in range(lm.num_layers)}
    assert max(by_layer.values()) > 1.01 * min(by_layer.values()), "all layers choose alike"
    found = profiled(lm, cases, 1)
    best = min(by_layer, key=by_layer.get)
    assert dict(found.options) == {"ratio": 0.3, "layers": [best]}
    assert found.label == f"prophet:ratio=0.3:layers=[{best}]"
    assert found.method() == rc.METHODS["prophet"](ratio=0.3, layers=[best])


@pytest.mark.slow
def test_a_second_layer_is_the_one_that_helps_the_first_most(lm, cases):
    first = min(range(lm.num_layers), key=lambda layer: far(lm, cases, [layer]))
    others = [layer for layer in range(lm.num_layers) if layer != first]
    second = min(others, key=lambda layer: far(lm, cases, [first, layer]))
    assert dict(profiled(lm, cases, 2).options)["layers"] == sorted([first, second])


def test_more_layers_than_there_are_is_all_of_them(lm, cases):
    found = profiled(lm, cases[:1], 99)
    assert dict(found.options)["layers"] == list(range(lm.num_layers))
    prompt = cases[0].prompt(lm.tokenizer, prompt_format(lm.tokenizer))
    every = rc.fuse(lm, prompt, "prophet", ratio=0.3)
    assert torch.equal(rc.fuse(lm, prompt, found.method()).next_logits, every.next_logits)


def test_what_has_no_layers_to_find_is_refused(lm, cases):
    runner = Runner(lm, prompt_format(lm.tokenizer), RunSettings(max_tokens=6))
    named = MethodSpec.parse("prophet:layers=[0]")
    assert [can_profile(one) for one in (SPEC, named, MethodSpec("a3", "a3"))] == [True, False, False]
    for spec in (named, MethodSpec("a3", "a3")):
        with pytest.raises(ConfigError, match="profiled for prophet alone"):
            Profile(runner, cases, spec, 1)
    with pytest.raises(ConfigError, match="at least one"):
        Profile(runner, [], SPEC, 1)
    small = Runner(lm, runner.form, RunSettings(max_tokens=lm.max_positions, on_overflow="skip"))
    with pytest.raises(ConfigError, match="no question of the profile"):
        list(Profile(small, cases, SPEC, 1).scores())
