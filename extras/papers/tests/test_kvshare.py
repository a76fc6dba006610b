"""KVShare: its limits, and both stages of its choice against what plain transformers computes."""

import threading

import pytest
import torch
from blend_oracle import forward
from families import assert_same, block_diagonal, causal, random_prompt
from paper_oracles import CHOSEN_ON, CHUNKS, LAYERS

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError
from ragcache.models.generate import decode
from ragcache_eval.reading import forced_logits

ANSWERED_ON = [name for name in CHOSEN_ON if name not in {"mistral-window", "gemma3"}]
"""An answer's token sees few passages' tokens through a small window in layer 1, and those have right values."""


def layer_one(weights):
    """Attention of all heads together, float64 [tokens, tokens]."""
    return weights[1][0].double().sum(0)


def wrong_values(oracle, prompt):
    """By token: L1 distance of layer 1's value in a plain forward from that of one that reads passages apart."""
    whole, apart = (
        forward(oracle, prompt.ids, mask)[1] for mask in (causal(prompt.num_tokens), block_diagonal(prompt))
    )
    return (whole[1][1] - apart[1][1]).double().abs().sum((0, 1, 3))


def best(impact, tokens, count):
    return sorted(sorted(tokens, key=lambda token: (-float(impact[token]), token))[:count])


class Expected:
    """The method, token by token: what runs in each step, and the logits behind it."""

    def __init__(self, oracle, prompt, count, more):
        self.oracle, self.ids, self.more = oracle, list(prompt.ids), more
        self.wrong = wrong_values(oracle, prompt)
        chunks = list(range(len(prompt.prefix_ids), prompt.context_tokens))
        suffix = list(range(prompt.context_tokens, prompt.num_tokens))
        received = layer_one(forward(oracle, self.ids, causal(prompt.num_tokens))[2]).sum(0)
        chosen = best(received * self.wrong, chunks, count)
        self.stale = [token for token in chunks if token not in chosen]
        apart = forward(oracle, self.ids, block_diagonal(prompt))[1]
        by_layer = [torch.tensor(chunks + suffix), *[torch.tensor(chosen + suffix)] * (LAYERS - 1)]
        self.logits, self.kv, _ = forward(oracle, self.ids, causal(len(self.ids)), apart, by_layer)
        self.chosen = [chosen]

    def step(self, token):
        self.ids.append(token)
        last, mask = len(self.ids) - 1, causal(len(self.ids))
        _, _, weights = forward(self.oracle, self.ids, mask, self.kv, [torch.tensor([last])] * LAYERS)
        chosen = best(layer_one(weights)[last][: len(self.wrong)] * self.wrong, self.stale, self.more)
        self.stale = [one for one in self.stale if one not in chosen]
        by_layer = [torch.tensor([*chosen, last])] * LAYERS
        self.logits, self.kv, _ = forward(self.oracle, self.ids, mask, self.kv, by_layer)
        self.chosen.append(chosen)


def assert_kv(fused, kv):
    for layer in range(LAYERS):
        keys, values, _ = fused.cache.layer_state(layer)
        assert_same(keys, kv[layer][0])
        assert_same(values, kv[layer][1])


@pytest.mark.parametrize("family", CHOSEN_ON)
@pytest.mark.parametrize("ratio", [0.2, 0.4])  # more would choose among values that a window leaves right
def test_the_values_that_are_most_wrong_where_attention_is_run_again(load, family, ratio):
    lm, oracle = load(family)
    prompt = random_prompt(211, prefix=6, chunks=CHUNKS)
    count = round(ratio * sum(CHUNKS))
    expected = Expected(oracle, prompt, count, 0)
    fused = rc.fuse(lm, prompt, "kvshare", ratio=ratio)
    assert_same(fused.next_logits, expected.logits)
    assert_kv(fused, expected.kv)
    suffix = len(prompt.suffix_ids)
    assert fused.computed_tokens == (sum(CHUNKS) + suffix, sum(CHUNKS) + suffix, count + suffix)


@pytest.mark.parametrize("family", ANSWERED_ON)
@pytest.mark.parametrize(("ratio", "more"), [(0.2, 3), (0.0, 1)])
def test_more_run_again_with_each_token_of_the_answer(load, family, ratio, more):
    """Which, how they come out, and what the token after sees; greedy, through the scheduler."""
    lm, oracle = load(family)
    prompt = random_prompt(212, prefix=6, chunks=CHUNKS)
    expected = Expected(oracle, prompt, round(ratio * sum(CHUNKS)), more)
    fused = rc.fuse(lm, prompt, "kvshare", ratio=ratio, decode_tokens=more)
    answer = write_steps(lm, fused, 5)
    for token in answer[:-1]:
        assert int(expected.logits.argmax()) == token
        expected.step(token)
    assert int(expected.logits.argmax()) == answer[-1]
    assert all(len(chosen) == more for chosen in expected.chosen[1:])
    assert_kv(fused, expected.kv)


def write_steps(lm, fused, count):
    steps = decode(lm, fused.cache, fused.next_logits, fused.next_position, rc.Sampling(max_tokens=count))
    return list(steps)


def test_the_answer_looks_elsewhere_than_the_question(load):
    """Or a choice by the question alone would pass: the best of what is left by its impact on the question."""
    _, oracle = load("llama")
    prompt = random_prompt(213, prefix=6, chunks=CHUNKS)
    expected = Expected(oracle, prompt, 0, 3)
    received = layer_one(forward(oracle, prompt.ids, causal(prompt.num_tokens))[2]).sum(0)
    by_question = best(received * expected.wrong, list(expected.stale), 3)
    expected.step(int(expected.logits.argmax()))
    assert expected.chosen[1] != by_question


def test_all_that_is_left_runs_once_and_no_more(load):
    """A step that runs every stale token leaves the passages as full prefill has them, and plain steps behind it."""
    lm, _ = load("llama")
    prompt = random_prompt(215, prefix=6, chunks=CHUNKS)
    fused = rc.fuse(lm, prompt, "kvshare", ratio=0.0, decode_tokens=1000)
    write_steps(lm, fused, 4)
    full = rc.fuse(lm, prompt, "full")
    for layer in range(LAYERS):
        for own, whole in zip(fused.cache.layer_state(layer)[:2], full.cache.layer_state(layer)[:2], strict=True):
            assert_same(own[:, :, : prompt.context_tokens], whole[:, :, : prompt.context_tokens])
    assert set(fused.cache.lengths) == {prompt.num_tokens + 3}


def test_answers_that_are_forced_run_the_same_steps(load):
    lm, _ = load("llama")
    prompt = random_prompt(216, prefix=6, chunks=CHUNKS)
    written = write_steps(lm, rc.fuse(lm, prompt, "kvshare"), 6)
    fused = rc.fuse(lm, prompt, "kvshare")
    assert forced_logits(lm, fused, written).argmax(-1).tolist() == written
    assert set(fused.cache.lengths) == {prompt.num_tokens}


def test_steps_beside_others_are_as_alone(load):
    """Several answers at once, by several methods: each as it is by itself (law 7)."""
    lm, _ = load("llama")
    methods = ["kvshare", "reposition", "kvshare", "full"]
    prompts = [random_prompt(220 + rank, prefix=6, chunks=CHUNKS) for rank in range(len(methods))]
    alone = [write_steps(lm, rc.fuse(lm, p, m), 8) for m, p in zip(methods, prompts, strict=True)]
    found = [None] * len(methods)

    def ask(rank):
        found[rank] = write_steps(lm, rc.fuse(lm, prompts[rank], methods[rank]), 8)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(methods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_an_answer_can_be_cancelled(load):
    lm, _ = load("llama")
    fused = rc.fuse(lm, random_prompt(230, prefix=6, chunks=CHUNKS), "kvshare")
    cancelled = threading.Event()
    sampling = rc.Sampling(max_tokens=50)
    steps = decode(lm, fused.cache, fused.next_logits, fused.next_position, sampling, cancelled=cancelled)
    next(steps)
    cancelled.set()
    with pytest.raises(CancelledError):
        list(steps)


def test_evict_is_refused_where_answers_run_passages_again(load):
    lm, _ = load("llama")
    prompt = random_prompt(231, prefix=6, chunks=CHUNKS)
    with pytest.raises(ConfigError, match="'kvshare' may run again while it answers; leave one of the two out"):
        rc.fuse(lm, prompt, "kvshare", evict=8)
    kept = rc.fuse(lm, prompt, "kvshare", decode_tokens=0, evict=8)
    assert len(write_steps(lm, kept, 3)) == 3
