"""Exact KV, found by the tokens that lead to it: a radix tree over sequences.

The KV that a causal model computes for a token depends only on that token and the tokens before it, so the KV of a
sequence serves every sequence that begins with it, unchanged and in place: keys stay rotated to their positions 0, 1,
... vLLM's automatic prefix caching finds whole blocks of 16 tokens by hash; this tree follows RadixAttention (SGLang,
arXiv 2312.07104) and matches to the token.

The elements of a sequence are ints that the caller defines: token ids, or ids that also encode how a token was read, if
reading it in another way gives other KV. Sequences of different namespaces never match.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from ragcache.engine.caches.prefix_nodes import (
    Elements,
    End,
    Node,
    Owned,
    Page,
    Slice,
    clip,
    common_length,
    cut,
    ends_along,
    reaching,
)
from ragcache.errors import ConfigError
from ragcache.kv.block import KVBlock, empty_block
from ragcache.kv.cache_shape import CacheShape
from ragcache.kv.exact import Read
from ragcache.kv.state import State

PAGE_TOKENS = 128


@dataclass(frozen=True)
class PrefixStats:
    """Counters of a PrefixCache.

    num_bytes:      bytes held now, including those lent
    tokens, nodes:  held now, in the tree alone
    asked_tokens:   tokens of all sequences matched so far
    matched_tokens: how many of these were found
    evicted_tokens: tokens evicted so far
    lent_bytes:     bytes of the tree's budget that others hold now: contexts of earlier prompts
    """

    num_bytes: int
    tokens: int
    nodes: int
    asked_tokens: int
    matched_tokens: int
    evicted_tokens: int
    lent_bytes: int


@dataclass(eq=False, repr=False)
class PrefixMatch:
    """The KV of the first `num_tokens` elements of a sequence, held until it is released. Use it as a context manager.

    If a document that it was computed over is deleted, the tree drops it at once; its bytes count until the release.
    """

    _tree: PrefixCache
    _node: Node | None
    _slices: list[Slice]
    _ends: list[tuple[int, End]]

    def __post_init__(self) -> None:
        self.num_tokens = sum(one.stop - one.start for one in self._slices)
        self.cut(self.num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Use at most `num_tokens` of the tokens; with recurrent layers, the most that end at a stored state."""
        self.num_tokens = min(self.num_tokens, max(0, num_tokens))
        if self._tree.shape.states:
            self.num_tokens = max((at for at, _ in self._ends if at <= self.num_tokens), default=0)

    @property
    def states(self) -> Sequence[State]:
        return next((end.content for at, end in self._ends if at == self.num_tokens), ())

    def copy_layer(self, layer: int, keys: Tensor, values: Tensor, first: int = 0) -> None:
        """Copy a layer's rotated keys, and values, of the tokens from `first` on into `keys` and `values`.

        keys, values: [num_kv_heads, n, head_dim]; at most n tokens are copied
        """
        end = 0
        for page, start, stop in cut(self._slices, first, min(first + keys.shape[1], self.num_tokens)):
            here, end = slice(end, end + stop - start), end + stop - start
            keys[:, here].copy_(page.content.layer_keys(layer)[:, start:stop])
            values[:, here].copy_(page.content.layer_values(layer)[:, start:stop])

    def block(self, start: int, stop: int) -> KVBlock:
        """Return the rotated keys, and values, of tokens [start, stop) in all layers, copied to host memory."""
        block = empty_block(self._tree.shape, stop - start)
        for layer in range(block.num_layers):
            self.copy_layer(layer, block.layer_keys(layer), block.layer_values(layer), start)
        return block.map(Tensor.cpu)

    def release(self) -> None:
        """Release the KV. A second call does nothing."""
        self._tree._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


class _Pin(NamedTuple):
    """A sequence's first tokens that are not evicted. until: when the pin ends, by `time.monotonic`"""

    namespace: str
    elements: Elements
    lease: PrefixMatch
    until: float


class PrefixCache:
    """A radix tree of exact KV, held on the model's device in the model's dtype. Thread-safe.

    budget_bytes is never exceeded, not even briefly: room is reserved before anything is copied. 0 keeps nothing. The
    least recently used leaf is evicted first, from its end and a page at a time; nodes that a request reads (a lease)
    stay, and so do their ancestors.

    page_tokens: tokens of a page, the unit of storage and eviction

    Raises ConfigError for a budget that is negative, or above 0 and too small for a token.
    """

    def __init__(self, shape: CacheShape, budget_bytes: int, *, page_tokens: int = PAGE_TOKENS) -> None:
        self.shape = shape
        self.budget_bytes = budget_bytes
        self.token_bytes = shape.token_bytes
        if budget_bytes < 0 or 0 < budget_bytes < self.token_bytes:
            raise ConfigError(
                f"a prefix budget of {budget_bytes} bytes: one token of this model takes {self.token_bytes}; give 0 "
                "(keep nothing) or more than that"
            )
        self._page_tokens = page_tokens
        self._roots: dict[str, Node] = {}
        # The least recently used node first. A use of a node also counts as a later use of its ancestors, so that the
        # ancestors always come after the node, and the first node is a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._used_bytes = 0  # held and reserved
        self._counts: Counter[str] = Counter()
        self._pins: list[_Pin] = []
        # Re-entrant: while a thread holds the lock, the garbage collector may close an abandoned stream in the same
        # thread, and so release the stream's lease.
        self._lock = threading.RLock()

    def match(self, namespace: str, elements: Sequence[int] | Elements, *, counted: bool = True) -> PrefixMatch:
        """Return the longest held prefix of the sequence. It may end within an edge, and may have no tokens.

        counted: False leaves the match out of the statistics, for callers that store the sequence elsewhere
        """
        wanted = np.asarray(elements, dtype=np.int64)
        with self._lock:
            lease = self._lease(namespace, wanted)
            if counted:
                self._counts["asked"] += len(wanted)
                self._counts["matched"] += lease.num_tokens
            return lease

    def count(self, namespace: str, elements: Sequence[int] | Elements) -> int:
        """Return how many tokens `match` would find, without changing anything."""
        wanted = np.asarray(elements, dtype=np.int64)
        with self._lock:
            path = list(self._walk(namespace, wanted))
            if self.shape.states:
                return max((at for at, _ in ends_along(path)), default=0)
            return sum(shared for _, shared in path)

    def insert(
        self,
        namespace: str,
        elements: Sequence[int] | Elements,
        read: Read,
        owned: Sequence[Owned] = (),
        states: Sequence[State] = (),
    ) -> int:
        """Store the new part of a sequence's KV, as much as there is room for.

        read:   a function of (layer, start, stop) that returns rotated keys and values of these elements,
                [num_kv_heads, stop - start, head_dim] each; called without any lock
        owned:  the owners of the elements; see `drop`
        states: of recurrent layers after the sequence. A state cannot be cut: with such layers, either all of the
                sequence is stored, with its states, or nothing

        Returns how many of the sequence's tokens are held now.
        """
        wanted = np.asarray(elements, dtype=np.int64)
        with self._lock:
            known = self._lease(namespace, wanted)
            start, missing = known.num_tokens, len(wanted) - known.num_tokens
            end = End(tuple(states), sum(one.num_bytes for one in states)) if states and missing else None
            sizes = self._reserve(missing, end)
            if self.shape.states and not sizes:
                known.release()
                return start
        try:
            pages = self._copied(sizes, start, read)
        except BaseException:
            with self._lock:
                self._used_bytes -= sum(sizes) * self.token_bytes + (0 if end is None else end.num_bytes)
                known.release()
            raise
        with self._lock:
            held = self._attach(namespace, wanted[: start + sum(sizes)], start, pages, owned, end)
            known.release()
        return held

    def pin(self, namespace: str, elements: Sequence[int] | Elements, ttl_s: float) -> int:
        """Keep the longest held prefix of the sequence from eviction for `ttl_s` seconds; return its number of tokens.

        A pin replaces earlier pins of a beginning of the same sequence, unless they last longer. All pins together take
        at most half of the budget: beyond that, pins of the namespace that pins most are released, the first to expire
        first, so that no namespace displaces the pins of another. `drop` and `clear` remove pinned tokens, too.
        """
        wanted = np.asarray(elements, dtype=np.int64)[: self.budget_bytes // 2 // self.token_bytes]
        until = time.monotonic() + ttl_s
        with self._lock:
            if (path := list(self._walk(namespace, wanted))) and not self.shape.states:
                self._split(*path[-1])  # what follows the pinned tokens may be evicted
            lease = self._lease(namespace, wanted)
            held = wanted[: lease.num_tokens]
            if not lease.num_tokens:
                lease.release()
                return 0
            self._unpin(
                one.namespace == namespace
                and one.until <= until
                and common_length(one.elements, held) == len(one.elements)
                for one in self._pins
            )
            self._pins.append(_Pin(namespace, held, lease, until))
            while sum(len(one.elements) for one in self._pins) * self.token_bytes > self.budget_bytes // 2:
                pinned = Counter[str]()
                for one in self._pins:
                    pinned[one.namespace] += len(one.elements)
                most = max(pinned, key=lambda name: (pinned[name], name == namespace))
                first = min(one.until for one in self._pins if one.namespace == most)
                self._unpin(one.namespace == most and one.until == first for one in self._pins)
            return len(held) if any(one.lease is lease for one in self._pins) else 0

    def drop(self, owners: Collection[int]) -> int:
        """Remove everything computed over elements of these owners, and everything below it.

        Leased entries become unreachable at once; their memory is freed when the lease is released. Returns how many
        tokens were removed.
        """
        with self._lock:
            before = self._counts["tokens"]
            for node in list(self._order):
                starts = [one.start for one in node.owned if one.owner in owners]
                if starts and node in self._order:
                    self._truncate(node, min(starts))
            self._unpin(self.count(one.namespace, one.elements) < len(one.elements) for one in self._pins)
            return before - self._counts["tokens"]

    def owners(self) -> set[int]:
        """Return the owners of all elements in the tree."""
        with self._lock:
            return {one.owner for node in self._order for one in node.owned}

    def clear(self) -> None:
        with self._lock:
            self._unpin(True for _ in self._pins)
            for root in self._roots.values():
                for child in list(root.children.values()):
                    self._truncate(child, 0)

    def lend(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` of the budget for KV held elsewhere, evicting as needed; `return_lent` returns them.

        Returns whether they could be reserved.
        """
        if num_bytes > self.budget_bytes:
            return False
        with self._lock:
            self._evict(self._used_bytes + num_bytes - self.budget_bytes)
            if self._used_bytes + num_bytes > self.budget_bytes:  # leased nodes are not evicted
                return False
            self._used_bytes += num_bytes
            self._counts["lent"] += num_bytes
            return True

    def return_lent(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes
            self._counts["lent"] -= num_bytes

    def stats(self) -> PrefixStats:
        with self._lock:
            return PrefixStats(
                num_bytes=self._used_bytes,
                tokens=self._counts["tokens"],
                nodes=len(self._order),
                asked_tokens=self._counts["asked"],
                matched_tokens=self._counts["matched"],
                evicted_tokens=self._counts["evicted"],
                lent_bytes=self._counts["lent"],
            )

    # Everything below runs under the lock, except `_copied` and `_release`.

    def _walk(self, namespace: str, wanted: Elements) -> Iterator[tuple[Node, int]]:
        """Yield nodes from the root's child on, each with how many elements (at least one) the sequence shares."""
        node, at = self._roots.get(namespace), 0
        while node is not None and at < len(wanted):
            node = node.children.get(int(wanted[at]))
            if node is None:
                return
            shared = common_length(node.elements, wanted[at:])
            yield node, shared
            if shared < len(node.elements):
                return
            at += shared

    def _lease(self, namespace: str, wanted: Elements) -> PrefixMatch:
        path = list(self._walk(namespace, wanted))
        slices: list[Slice] = []
        for node, shared in path:
            slices += cut(node.slices, 0, shared)
        ends = ends_along(path)
        held: list[Page | End] = [*(one.page for one in slices), *(end for _, end in ends)]
        for page in held:
            page.uses += 1
        for node, _ in reversed(path):
            self._order.move_to_end(node)
        last = path[-1][0] if path else None
        if last is not None:
            last.leases += 1
        return PrefixMatch(self, last, slices, ends)

    def _release(self, lease: PrefixMatch) -> None:
        with self._lock:
            if lease._node is not None:
                lease._node.leases -= 1
            self._let_go(lease._slices, *(end for _, end in lease._ends))
            lease._node, lease._slices, lease._ends = None, [], []

    def _unpin(self, which: Iterable[bool]) -> None:
        """Release some of the pins. which: for each pin, in order, whether to release it"""
        pins, ends = self._pins, list(which)
        self._pins = [one for one, over in zip(pins, ends, strict=True) if not over]
        for one, over in zip(pins, ends, strict=True):
            if over:
                one.lease.release()

    def _let_go(self, slices: Sequence[Slice], *ends: End | None) -> None:
        for one in [*(one.page for one in slices), *ends]:
            if one is not None:
                one.uses -= 1
                self._used_bytes -= 0 if one.uses else one.num_bytes

    def _reserve(self, num_tokens: int, end: End | None) -> list[int]:
        """Reserve room for `num_tokens` tokens, evicting as needed, or for fewer if that does not free enough.

        With recurrent layers, reserve room for all tokens and their states, or for nothing. Returns the tokens of each
        page.
        """
        beside = 0 if end is None else end.num_bytes
        self._evict(self._used_bytes + num_tokens * self.token_bytes + beside - self.budget_bytes)
        free = max(0, (self.budget_bytes - self._used_bytes - beside) // self.token_bytes)
        count = min(num_tokens, free)
        if self.shape.states and (end is None or count < num_tokens):
            return []
        self._used_bytes += count * self.token_bytes + beside
        full, rest = divmod(count, self._page_tokens)
        return [self._page_tokens] * full + ([rest] if rest else [])

    def _evict(self, excess_bytes: int) -> None:
        """Evict pages of the least recently used leaves until `excess_bytes` are freed, or no evictable leaf is left.

        Pins that have expired are released first.
        """
        enough = self._used_bytes - excess_bytes
        if self._pins and excess_bytes > 0:
            now = time.monotonic()
            self._unpin(one.until <= now for one in self._pins)
        while self._used_bytes > enough:
            victim = next((node for node in self._order if not node.children and not node.leases), None)
            if victim is None:
                return
            lost = len(victim.elements) if self.shape.states else victim.slices[-1].stop - victim.slices[-1].start
            self._truncate(victim, len(victim.elements) - lost)
            self._counts["evicted"] += lost

    def _truncate(self, node: Node, keep: int) -> None:
        """Remove all but the first `keep` elements of a node's edge, and all nodes below; with 0, also the node."""
        below = [node.children.popitem()[1] for _ in range(len(node.children))]
        while below:
            gone = below.pop()
            below += gone.children.values()
            gone.children = {}
            self._forget(gone)
        if keep == 0:
            if node.parent is not None:
                del node.parent.children[int(node.elements[0])]
            self._forget(node)
            return
        kept = cut(node.slices, 0, keep)
        for one in kept:
            one.page.uses += 1
        self._let_go(node.slices, node.end)
        self._counts["tokens"] -= len(node.elements) - keep
        node.slices, node.end = kept, None
        node.elements = node.elements[:keep].copy()
        node.owned = clip(node.owned, 0, keep)

    def _forget(self, node: Node) -> None:
        del self._order[node]
        self._let_go(node.slices, node.end)
        self._counts["tokens"] -= len(node.elements)
        node.parent, node.slices, node.end = None, [], None

    def _copied(self, sizes: Sequence[int], start: int, read: Read) -> list[Page]:
        """Return new pages of these sizes with the sequence's KV from `start` on."""
        pages = []
        for size in sizes:
            block = empty_block(self.shape, size)
            for layer in range(self.shape.num_layers):
                keys, values = read(layer, start, start + size)
                block.layer_keys(layer).copy_(keys)
                block.layer_values(layer).copy_(values)
            pages.append(Page(block, block.num_bytes))
            start += size
        return pages

    def _attach(
        self,
        namespace: str,
        wanted: Elements,
        start: int,
        pages: Sequence[Page],
        owned: Sequence[Owned],
        end: End | None,
    ) -> int:
        """Attach the pages, which hold the KV from `start` on, to the current tree. Return how many tokens are held."""
        slices = [Slice(page, 0, page.content.num_tokens) for page in pages]
        for page in pages:  # held here, so that unused pages are freed below
            page.uses += 1
        if end is not None:
            end.uses += 1
        root = self._roots.setdefault(namespace, Node(wanted[:0], [], [], None))
        path = list(self._walk(namespace, wanted))
        at = sum(shared for _, shared in path)
        if start <= at < len(wanted):  # the match may have been deleted since: then nothing fits
            above = self._split(*path[-1]) if path else root
            new = Node(
                elements=wanted[at:].copy(),
                slices=cut(slices, at - start),
                owned=reaching(owned, at, len(wanted)),
                parent=above,
            )
            for one in new.slices:
                one.page.uses += 1
            above.children[int(wanted[at])] = new
            self._order[new] = None
            while above.parent is not None:
                self._order.move_to_end(above)
                above = above.parent
            self._counts["tokens"] += len(new.elements)
            at = len(wanted)
            path = [(new, len(new.elements))]
        if end is not None and at == len(wanted) and path:
            last = self._split(*path[-1])
            if last.end is None:
                last.end = end
                end.uses += 1
        self._let_go(slices, end)
        return at

    def _split(self, node: Node, at: int) -> Node:
        """Return the node whose edge ends after `at` elements of this node: itself, or a new node above it.

        Nothing is copied. The old object stays below, so that leases on it remain valid.
        """
        if at == len(node.elements):
            return node
        parent = node.parent
        above = Node(node.elements[:at].copy(), cut(node.slices, 0, at), clip(node.owned, 0, at), parent)
        below = cut(node.slices, at)
        for one in (*above.slices, *below):
            one.page.uses += 1
        self._let_go(node.slices)
        node.owned = clip(node.owned, at, len(node.elements))
        node.elements, node.slices, node.parent = node.elements[at:].copy(), below, above
        above.children[int(node.elements[0])] = node
        if parent is not None:
            parent.children[int(above.elements[0])] = above
        self._order[above] = None
        return above
