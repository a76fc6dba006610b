"""What a key learns of other keys' prompts and passages, by every field of its answers and by time.

After "Auditing prompt caching" (Gu et al., arXiv 2502.07776): a probe sends a text that another key has sent before, or
one that nobody has, in random order. Fields must not differ at all; times are compared by a two-sample test.
"""

import math
import random
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from engine_texts import TEXTS

import ragcache as rc
from ragcache.engine.keys import Key
from ragcache_demo.bag_of_words import BagOfWords

LEAST = 0.01
FEW, MANY = 24, 250  # probes of each kind
WORDS = 149  # in a probe; its tokens are no multiple of 64
ONE = rc.Sampling(max_tokens=1)


@pytest.fixture(scope="module")
def one_thread():
    """Compute in a single thread: two that share a busy processor wait for each other, which hides every difference."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def keys(lm, one_thread, tmp_path_factory):
    """The store as alice sees it, as bob sees it, and as carol does, who reads what alice reads."""
    with rc.RagCache.open(
        tmp_path_factory.mktemp("audit") / "kb", model=lm, method="reposition", embedder=BagOfWords()
    ) as kb:
        for name in ("a", "b"):
            kb.collection(name).ingest(rc.Document(id, text) for id, text in TEXTS.items())
        yield tuple(
            kb.as_key(Key(id, reads=frozenset(reads), writes=frozenset(reads)))
            for id, reads in (("alice", "a"), ("bob", "b"), ("carol", "a"))
        )


def words(seed: int, number: int) -> str:
    """A text of its own for each seed, of the same length."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(number))


def prompt(kb: rc.RagCache, text: str) -> rc.Answer:
    return kb.complete(text, method="full", sampling=ONE)


def passage(kb: rc.RagCache, text: str) -> rc.Answer:
    return kb.ask("Why?", hits=[rc.Passage(text)], sampling=ONE)


def in_text(kb: rc.RagCache, text: str) -> rc.Answer:
    return kb.complete(f"Read this. {text} And now?", sampling=ONE)


def in_order(kb: rc.RagCache, text: str) -> rc.Answer:
    halves = [rc.Passage(text[:600]), rc.Passage(text[600:])]
    return kb.ask("Why?", hits=halves, method="full", order="shared", sampling=ONE)


def kept(kb: rc.RagCache, text: str) -> rc.Answer:
    return kb.chat([{"role": "user", "content": text}], context="keep", sampling=ONE)


WAYS = [prompt, passage, in_text, in_order, kept]


def fields(answer: rc.Answer) -> list[object]:
    """Everything that a caller sees but times, without what the text itself says.

    Random texts have their first letters in common with the prober's own earlier ones, so counts are of 64 tokens.
    """
    usage = [count // 64 for count in asdict(answer.usage).values()]
    return [*usage, [hit.kv for hit in answer.hits], answer.dropped, answer.method, answer.method_reason]


def probes(ask, victim: rc.RagCache, prober: rc.RagCache, number: int, seed: int):
    """Times and fields of probes with texts that the victim sent, and with texts that nobody did."""
    seed += 20 * WAYS.index(ask)
    kinds = [True, False] * number
    random.Random(seed).shuffle(kinds)
    found: dict[bool, list[tuple[float, list[object]]]] = {True: [], False: []}
    for rank, sent in enumerate(kinds):
        text = words(seed * 100_000 + rank, WORDS)
        other = words(seed * 100_000 + 50_000 + rank, WORDS)
        ask(victim, text if sent else other)  # before every probe, so that both kinds come after an answer
        started = time.perf_counter()
        answer = ask(prober, text)
        found[sent].append((time.perf_counter() - started, fields(answer)))
    return found[True], found[False]


def p_value(one: list[float], other: list[float]) -> float:
    """The two-sided p-value of Mann and Whitney's test, by its normal approximation."""
    both = np.array([*one, *other])
    ranks = np.argsort(np.argsort(both)) + 1.0
    n, m = len(one), len(other)
    u = ranks[:n].sum() - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def times(ask, victim, prober, number, seed) -> float:
    sent, fresh = probes(ask, victim, prober, number, seed)
    return p_value([took for took, _ in sent], [took for took, _ in fresh])


def test_the_test_finds_a_difference_and_nothing_else():
    rng = np.random.default_rng(0)
    assert p_value(list(rng.normal(0, 1, 200)), list(rng.normal(1, 1, 200))) < 1e-6
    p_values = [p_value(list(rng.normal(0, 1, 40)), list(rng.normal(0, 1, 40))) for _ in range(400)]
    assert abs(np.mean(np.array(p_values) < 0.1) - 0.1) < 0.05


@pytest.mark.parametrize("ask", WAYS)
def test_fields_tell_nothing_between_collections_and_something_within_one(keys, ask):
    alice, bob, carol = keys
    sent, fresh = probes(ask, alice, bob, 4, seed=1)
    assert [told for _, told in sent] == [told for _, told in fresh]
    sent, fresh = probes(ask, alice, carol, 4, seed=2)
    assert [told for _, told in sent] != [told for _, told in fresh]


def test_a_prompt_of_another_key_has_no_cached_token(keys):
    alice, bob, carol = keys
    text = "One of sixteen"  # bytes are this model's tokens
    prompt(alice, text)
    assert prompt(bob, text).usage.cached_tokens <= 1, "but for BOS"
    assert prompt(carol, text).usage.cached_tokens == len(text)


def test_first_tokens_come_alike_between_collections_and_sooner_within_one(keys):
    alice, bob, carol = keys
    assert times(prompt, alice, carol, FEW, 4) < LEAST
    assert any(times(prompt, alice, bob, FEW, seed) > LEAST for seed in (5, 6))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ask", WAYS)
def test_five_hundred_probes_tell_nothing_between_collections(keys, ask):
    """One round in a hundred is below by chance, so that a second has to confirm it. A probe takes 60 ms of a core,
    so each way half a minute."""
    alice, bob, carol = keys
    own = times(ask, alice, carol, FEW, 7)
    between = [times(ask, alice, bob, MANY, 8)]
    if between[0] <= LEAST:
        between.append(times(ask, alice, bob, MANY, 9))
    print(f"{ask.__name__}: p within a collection {own:.2g}, between {between}")
    assert own < LEAST
    assert max(between) > LEAST
