"""The prefix tree against a model of it: a list of all sequences, and the longest common prefix by comparison.

Every token's KV is a number that depends on all tokens before it, so that whatever is served for another sequence, or
at another place, is seen.
"""

from functools import partial
from itertools import takewhile
from operator import eq
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import at_once, beside

from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.engine.caches.prefix_nodes import Owned
from ragcache.errors import ConfigError
from ragcache.kv.cache_shape import CacheShape, LayerShape

SHAPE = CacheShape((LayerShape(num_kv_heads=2, key_dim=3, value_dim=2),) * 2, torch.float32, torch.device("cpu"))
TOKEN_BYTES = 2 * 2 * (3 + 2) * 4
PLENTY = 10_000 * TOKEN_BYTES

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)
namespaces = st.sampled_from(["a", "b"])


def expected(namespace, elements, layer):
    """float32 [num_kv_heads, n, width] for keys and values: a number for each prefix, exact in float32."""
    state, numbers = len(namespace) + ord(namespace[0]), []
    for element in elements:
        state = (state * 31 + int(element) + 7) % 65521
        numbers.append(state)
    column = torch.tensor(numbers, dtype=torch.float32)[None, :, None] + layer
    return [column.expand(2, -1, width) * torch.arange(1, 3)[:, None, None] for width in (3, 2)]


def reader(namespace, elements):
    def read(layer, start, stop):
        return tuple(part[:, start:stop] for part in expected(namespace, elements, layer))

    return read


def insert(tree, namespace, elements, owned=()):
    return tree.insert(namespace, elements, reader(namespace, elements), owned)


def served(tree, namespace, elements):
    """How much is found, after comparing every number of it."""
    with tree.match(namespace, elements) as lease:
        check(lease, namespace, elements)
        return lease.num_tokens


def check(lease, namespace, elements):
    count = lease.num_tokens
    for layer in range(SHAPE.num_layers):
        keys, values = torch.full((2, count, 3), -1.0), torch.full((2, count, 2), -1.0)
        lease.copy_layer(layer, keys, values)
        for got, wanted in zip((keys, values), expected(namespace, elements[:count], layer), strict=True):
            assert torch.equal(got, wanted)


def common(one, other):
    return sum(takewhile(bool, map(eq, one, other)))


def longest(kept, namespace, elements):
    return max((common(elements, other) for name, other in kept if name == namespace), default=0)


steps = st.lists(st.tuples(st.sampled_from(["insert", "match", "count"]), namespaces, sequences), max_size=40)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 5))
def test_it_finds_the_longest_common_prefix(steps, page_tokens):
    tree, kept = PrefixCache(SHAPE, PLENTY, page_tokens=page_tokens), []
    for what, namespace, elements in steps:
        if what == "insert":
            assert insert(tree, namespace, elements) == len(elements)
            kept.append((namespace, elements))
        elif what == "match":
            assert served(tree, namespace, elements) == longest(kept, namespace, elements)
        else:
            assert tree.count(namespace, elements) == longest(kept, namespace, elements)
    different = {(name, tuple(one[:n])) for name, one in kept for n in range(1, len(one) + 1)}
    assert tree.stats().tokens == len(different)
    assert tree.stats().num_bytes == len(different) * TOKEN_BYTES, "a shared prefix is held once"
    tree.clear()
    assert (tree.stats().num_bytes, tree.stats().nodes) == (0, 0)


budgeted = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "lease", "release", "drop"]), namespaces, sequences), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(budgeted, st.integers(1, 30), st.integers(1, 4))
def test_the_budget_holds_and_leases_stay(steps, tokens, page_tokens):
    """Whatever is found is right and was inserted; what is leased is still there, bit for bit, whatever happens."""
    budget = tokens * TOKEN_BYTES
    tree, kept, leases = PrefixCache(SHAPE, budget, page_tokens=page_tokens), [], []
    for number, (what, namespace, elements) in enumerate(steps):
        if what == "insert":
            held = insert(tree, namespace, elements, [Owned(0, len(elements), number % 5)])
            assert tree.count(namespace, elements) == held <= min(len(elements), tokens)
            kept.append((namespace, elements))
        elif what == "match":
            assert served(tree, namespace, elements) <= longest(kept, namespace, elements)
        elif what == "lease":
            leases.append((tree.match(namespace, elements), namespace, elements))
        elif what == "release" and leases:
            leases.pop(0)[0].release()
        elif what == "drop":
            tree.drop({number % 5})
            assert number % 5 not in tree.owners()
        assert tree.stats().num_bytes <= budget
        for lease, name, sequence in leases:
            check(lease, name, sequence)
    for lease, name, sequence in leases:
        if not any(what == "drop" for what, *_ in steps):
            assert tree.count(name, sequence) >= lease.num_tokens
        lease.release()
        lease.release()
    tree.clear()
    assert tree.stats().num_bytes == 0


owned_sequences = st.lists(st.tuples(sequences, st.lists(st.integers(1, 4), max_size=3)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(owned_sequences, st.sets(st.integers(0, 5)), st.integers(1, 5))
def test_a_deletion_takes_all_that_was_computed_over_it(inserts, gone, page_tokens):
    """Each sequence is cut into parts with owners by their first element: what is found afterwards has no deleted part,
    apart from tokens that other owners' parts share."""
    tree = PrefixCache(SHAPE, PLENTY, page_tokens=page_tokens)
    kept = []
    for elements, lengths in inserts:
        owned, start = [], 0
        for length in lengths:
            stop = min(start + length, len(elements))
            if start < stop:
                owned.append(Owned(start, stop, elements[start] + 3 * (length % 2)))
            start = stop
        insert(tree, "a", elements, owned)
        kept.append((elements, owned))
    tree.drop(gone)
    assert not tree.owners() & gone
    for elements, owned in kept:
        start = min((one.start for one in owned if one.owner in gone), default=len(elements))
        others = [common(elements, other) for other, theirs in kept if not any(o.owner in gone for o in theirs)]
        assert served(tree, "a", elements) <= max([start, *others, *shared_starts(elements, kept, gone)])


def shared_starts(elements, kept, gone):
    """Starts of sequences that lost a part: what comes before it is still there, and may be shared."""
    return [
        min(common(elements, other), min((o.start for o in owned if o.owner in gone), default=len(other)))
        for other, owned in kept
    ]


def test_what_stands_before_a_deleted_part_stays():
    tree = PrefixCache(SHAPE, PLENTY, page_tokens=4)
    first, second = [1, 1, 1, 5, 5, 5, 9], [1, 1, 1, 5, 5, 6, 9]
    insert(tree, "a", first, [Owned(3, 6, 50)])
    insert(tree, "a", second, [Owned(3, 6, 60)])
    tree.drop({60})
    assert served(tree, "a", second) == 5, "the two tokens that both passages begin with are the other's too"
    assert served(tree, "a", first) == 7
    tree.drop({50})
    assert served(tree, "a", first) == served(tree, "a", second) == 3
    assert tree.stats().tokens == 3


def test_the_least_recently_used_end_goes_first():
    tree = PrefixCache(SHAPE, 10 * TOKEN_BYTES, page_tokens=2)
    old, new = [1, 1, 2, 2, 2], [1, 1, 3, 3, 3]
    insert(tree, "a", old)
    insert(tree, "a", new)
    served(tree, "a", old)
    insert(tree, "a", [7, 7, 7])
    assert served(tree, "a", old) == 5
    assert 2 <= served(tree, "a", new) < 5
    assert served(tree, "a", [7, 7, 7]) == 3
    assert tree.stats().evicted_tokens > 0


@pytest.mark.parametrize("missing", [0, 1])
def test_the_budget_holds_to_the_byte(missing):
    """The last token fits exactly, beside others too; with one byte less it does not, or another goes for it."""
    alone = PrefixCache(SHAPE, 3 * TOKEN_BYTES - missing, page_tokens=1)
    assert insert(alone, "a", [1, 2, 3]) == alone.stats().tokens == 3 - missing
    tree = PrefixCache(SHAPE, 5 * TOKEN_BYTES - missing, page_tokens=1)
    insert(tree, "a", [1, 2])
    assert insert(tree, "b", [1, 2, 3]) == 3
    assert (served(tree, "a", [1, 2]), tree.stats().evicted_tokens) == (2 - missing, missing)
    assert tree.stats().num_bytes == (5 - missing) * TOKEN_BYTES


def test_what_is_being_read_is_not_evicted():
    """A node of which an asker reads a part stays whole, and is found, until the asker has done; then it may go."""
    tree = PrefixCache(SHAPE, 6 * TOKEN_BYTES, page_tokens=2)
    read, other = [1, 2, 3, 4], [8, 9]
    insert(tree, "a", read)
    insert(tree, "a", other)
    with tree.match("a", read[:3]):
        served(tree, "a", other)  # used last, and goes all the same
        assert insert(tree, "b", [5, 6, 7]) == 2
        assert (served(tree, "a", read), served(tree, "a", other)) == (4, 0)
    assert insert(tree, "b", [5, 6, 7]) == 3


def test_a_reader_that_fails_leaves_nothing():
    tree = PrefixCache(SHAPE, PLENTY, page_tokens=2)

    def fail(layer, start, stop):
        if start:
            raise MemoryError
        return reader("a", [1, 2, 3])(layer, start, stop)

    with pytest.raises(MemoryError):
        tree.insert("a", [1, 2, 3], fail)
    assert (tree.stats().num_bytes, tree.stats().nodes) == (0, 0)
    assert served(tree, "a", [1, 2, 3]) == 0


@pytest.mark.parametrize("budget", [-1, 1, TOKEN_BYTES - 1])
def test_a_budget_below_one_token_is_refused(budget):
    with pytest.raises(ConfigError, match=rf"{budget} bytes: one token of this model takes {TOKEN_BYTES}"):
        PrefixCache(SHAPE, budget)


def test_nothing_is_kept_without_a_budget():
    tree = PrefixCache(SHAPE, 0)
    assert insert(tree, "a", [1, 2]) == 0
    assert served(tree, "a", [1, 2]) == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_threads(seed):
    """Askers, inserters and deletions at once: nothing wrong is served, and the bytes are watched all the time."""
    tokens = 60
    tree = PrefixCache(SHAPE, tokens * TOKEN_BYTES, page_tokens=3)

    def watch():
        assert tree.stats().num_bytes <= tokens * TOKEN_BYTES

    def work(number):
        random = Random(100 * seed + number)
        for _ in range(50):
            sequence = [random.randrange(3) for _ in range(random.randrange(1, 20))]
            namespace = random.choice("ab")
            with tree.match(namespace, sequence) as lease:
                if random.random() < 0.6:
                    owner = random.randrange(4)
                    insert(tree, namespace, sequence, [Owned(len(sequence) // 2, len(sequence), owner)])
                if random.random() < 0.1:
                    tree.drop({random.randrange(4)})
                check(lease, namespace, sequence)

    with beside(watch):
        at_once(*(partial(work, number) for number in range(6)))
    tree.clear()
    assert (tree.stats().num_bytes, tree.stats().tokens, tree.stats().nodes) == (0, 0, 0)


def test_pinned_tokens_outlive_every_eviction(monkeypatch):
    tree, now = PrefixCache(SHAPE, 8 * TOKEN_BYTES, page_tokens=2), [0.0]
    monkeypatch.setattr("ragcache.engine.caches.prefix_cache.time.monotonic", lambda: now[0])
    insert(tree, "a", [1, 2, 3, 4, 5, 6])
    assert tree.pin("a", [1, 2, 3, 9], 60) == 3
    for first in range(10, 20):
        insert(tree, "a", [first] * 5)
        assert served(tree, "a", [1, 2, 3, 4, 5, 6]) == 3, "what follows a pin is evicted"
    now[0] = 61.0
    for first in range(20, 30):
        insert(tree, "a", [first] * 8)
    assert served(tree, "a", [1, 2, 3]) == 0
    tree.clear()
    assert tree.stats().num_bytes == 0


def test_pins_take_half_of_the_budget(monkeypatch):
    tree, now = PrefixCache(SHAPE, 20 * TOKEN_BYTES), [0.0]
    monkeypatch.setattr("ragcache.engine.caches.prefix_cache.time.monotonic", lambda: now[0])
    for first in (1, 2, 3):
        insert(tree, "a", [first] * 6)
        assert tree.pin("a", [first] * 6, 100 + first) == 6  # the pin before it ends first, and is released
    insert(tree, "a", [4] * 14)
    assert served(tree, "a", [3] * 6) == 6
    assert served(tree, "a", [1] * 6) + served(tree, "a", [2] * 6) == 0
    assert tree.pin("a", [4] * 14, 200) == 10, "no pin takes more"


def test_pins_of_a_namespace_leave_those_of_another():
    tree = PrefixCache(SHAPE, 20 * TOKEN_BYTES)
    insert(tree, "a", [1] * 5)
    assert tree.pin("a", [1] * 5, 60) == 5
    for first in range(2, 6):
        insert(tree, "b", [first] * 5)
        assert tree.pin("b", [first] * 5, 3600 + first) == 5
    insert(tree, "c", [9] * 10)
    assert served(tree, "a", [1] * 5) == 5


def test_a_pin_replaces_those_of_its_beginning():
    tree = PrefixCache(SHAPE, 20 * TOKEN_BYTES)
    for count in range(1, 11):
        insert(tree, "a", [1] * count)
        assert tree.pin("a", [1] * count, 60) == count
    insert(tree, "b", [2] * 10)
    assert served(tree, "a", [1] * 10) == 10


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(namespaces, sequences, st.integers(1, 3)), max_size=20), st.integers(1, 30))
def test_pins_leave_the_budget_and_deletion_as_they_are(steps, tokens):
    tree = PrefixCache(SHAPE, tokens * TOKEN_BYTES, page_tokens=2)
    for namespace, elements, owner in steps:
        insert(tree, namespace, elements, [Owned(0, len(elements), owner)])
        held = tree.pin(namespace, elements, 60)
        assert held <= tokens // 2
        assert served(tree, namespace, elements) >= held
        assert tree.stats().num_bytes <= tokens * TOKEN_BYTES
    tree.drop({1, 2, 3})
    assert (tree.stats().num_bytes, tree.stats().nodes) == (0, 0)
