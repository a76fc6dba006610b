"""Prometheus metrics at /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ragcache import Answer, Source
from ragcache.engine.admission import Admission
from ragcache.engine.caches.prefix_cache import PrefixStats
from ragcache.engine.info import Info
from ragcache.engine.loader import LoadCounts
from ragcache.engine.rates import RateFigures
from ragcache.fusion import labelled_name
from ragcache.models.scheduler import PassStats
from ragcache.server.limits import Slots

# From a block in memory to a full prefill on a slow machine.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PASS_SIZES = (1, 2, 4, 8, 16)
COMPUTED = "computed"


class Metrics:
    """Metrics of a server, in a registry of its own, so that two servers in a process do not mix.

    tiers: names of the store's tiers, fastest first
    passes, admission, prefixes: the engine's passes, memory admission and prefix tree
    """

    def __init__(
        self,
        slots: Slots,
        tiers: Sequence[str],
        passes: Callable[[], PassStats],
        admission: Admission,
        prefixes: Callable[[], PrefixStats],
    ) -> None:
        self.tiers = tuple(tiers)
        self.registry = CollectorRegistry()
        self.requests = self._counter("http_requests", "Requests", "route", "method", "status")
        self.seconds = self._histogram("http_request_seconds", "Time of requests, to the end of the answer", "route")
        self.ttft = self._histogram(
            "ttft_seconds", "Time to the first token by phase; phase total is all of it", "phase", "method"
        )
        self.queue_wait = self._histogram("queue_wait_seconds", "Time that questions wait for a slot")
        self.inter_token = self._histogram("inter_token_seconds", "Time between two pieces of an answer")
        self.key_requests = self._counter("key_requests", "Requests by the id of their API key", "key")
        self.key_tokens = self._counter("key_tokens", "Computed and answered tokens by the id of the API key", "key")
        self.hits = self._counter("kv_hits", "KV blocks that a tier had", "tier")
        self.misses = self._counter("kv_misses", "KV blocks that a tier was asked for and did not have", "tier")
        self.tokens = self._counter("tokens", "Tokens: prompt (cached, created and computed); completion", "kind")
        self.store_bytes = self._gauge("store_bytes", "Bytes of KV blocks", "tier")
        self.store_counts = self._gauge("store_size", "What the store holds: documents, passages, tokens", "what")
        self.foreign_counts = self._gauge(
            "foreign_passages", "Passages of no document: whose KV is kept, or was evicted", "state"
        )
        self.foreign_bytes = self._gauge(
            "foreign_bytes", "Cache of passages of no document: passages, prompts, the budget, evicted passages", "what"
        )
        self.tier_rate = self._gauge("tier_bytes_per_second", "Rate of reads from a tier, as measured", "tier")
        self.prefill_rate = self._gauge("prefill_tokens_per_second", "Rate of computing passages, as measured")
        self.loads = self._gauge(
            "loading", "Blocks recomputed though stored; bytes read ahead, and of these wasted", "what"
        )
        for name, help, value in (
            ("queue_length", "Questions that wait for a slot", lambda: slots.waiting),
            ("slots_in_use", "Questions that are being answered", lambda: slots.in_use),
            ("slots", "Questions that can be answered at the same time", lambda: slots.slots),
            ("answer_bytes", "KV that answers in progress have reserved", lambda: admission.reserved_bytes),
            ("answers_waiting", "Questions in a slot that wait for memory", lambda: admission.waiting),
            ("prefix_bytes", "KV of earlier prompts and answers", lambda: prefixes().num_bytes),
            ("prefix_lent_bytes", "Of these, placed contexts", lambda: prefixes().lent_bytes),
        ):
            self._gauge(name, help).set_function(value)
        ProcessCollector("ragcache", registry=self.registry)  # memory, processors and open files
        self.registry.register(_Figures(passes, prefixes))

    def count_answer(self, answer: Answer) -> None:
        # Without the method's options: clients choose them freely, and each value would add a label.
        phases, method = asdict(answer.timings), labelled_name(answer.method)
        phases.pop("total_s")  # of the whole answer; in this metric "total" is the time to the first token
        phases["total_s"] = phases.pop("ttft_s")
        for name, seconds in phases.items():
            self.ttft.labels(name.removesuffix("_s"), method).observe(seconds)
        self._count_blocks(answer.hits)
        usage = answer.usage
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("computed", usage.computed_tokens),
            ("created", usage.created_tokens),
            ("completion", usage.completion_tokens),
        ):
            self.tokens.labels(kind).inc(tokens)

    def _count_blocks(self, sources: Sequence[Source]) -> None:
        """Count hits and misses of blocks. A block is missed by every tier above the tier that had it."""
        for source in sources:
            if source.kv not in (*self.tiers, COMPUTED):
                continue  # the method reads no block
            level = self.tiers.index(source.kv) if source.kv in self.tiers else len(self.tiers)
            for tier in self.tiers[:level]:
                self.misses.labels(tier).inc()
            if source.kv in self.tiers:
                self.hits.labels(source.kv).inc()

    def render(self, info: Info, rates: RateFigures, loads: LoadCounts) -> bytes:
        """Return the metrics in Prometheus's text format."""
        for tier, rate in rates.tiers.items():
            self.tier_rate.labels(tier).set(rate.bytes_s)
        self.prefill_rate.set(rates.prefill_tokens_s or float("nan"))
        for label, count in asdict(loads).items():
            self.loads.labels(label).set(count)
        for tier, count in info.bytes_by_tier.items():
            self.store_bytes.labels(tier).set(count)
        if (foreign := info.foreign) is not None:
            for state, count in (("kept", foreign.passages), ("evicted", foreign.evicted)):
                self.foreign_counts.labels(state).set(count)
            for label, count in (
                ("passages", foreign.bytes),
                ("prompts", foreign.prompt_bytes),
                ("budget", foreign.budget_bytes),
                ("evicted", foreign.evicted_bytes),
            ):
                self.foreign_bytes.labels(label).set(count)
        for label in ("documents", "chunks", "tokens"):
            self.store_counts.labels(label).set(getattr(info, label))
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"ragcache_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"ragcache_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(f"ragcache_{name}", help, labels, registry=self.registry, buckets=BUCKETS)


@dataclass(eq=False)
class _Figures(Collector):
    """Collects figures of the model's passes, and tokens of the prefix tree: requested, matched, and evicted."""

    passes: Callable[[], PassStats]
    prefixes: Callable[[], PrefixStats]

    def collect(self) -> Iterator[Metric]:
        stats, prefixes = self.passes(), self.prefixes()
        cumulative = [(str(size), sum(n for m, n in stats.members.items() if m <= size)) for size in PASS_SIZES]
        total = sum(members * count for members, count in stats.members.items())
        yield HistogramMetricFamily(
            "ragcache_pass_members",
            "Runs of questions that shared a pass of the model",
            buckets=[*cumulative, ("+Inf", stats.passes)],
            sum_value=total,
        )
        yield CounterMetricFamily("ragcache_pass_tokens", "Tokens that ran in these passes", value=stats.tokens)

        tokens = CounterMetricFamily("ragcache_prefix_tokens", "Tokens of the prefix tree", labels=["what"])
        tokens.add_metric(["asked"], prefixes.asked_tokens)
        tokens.add_metric(["matched"], prefixes.matched_tokens)
        tokens.add_metric(["evicted"], prefixes.evicted_tokens)
        yield tokens
