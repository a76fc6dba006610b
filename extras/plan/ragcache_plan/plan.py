"""Costs and savings of precomputed KV, and where it breaks even."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ragcache.errors import ConfigError, check_least
from ragcache_plan.demand import GB, Demand, Prices
from ragcache_plan.rates import MachineRates
from ragcache_plan.shape import CodecSize, KVShape, codec_sizes
from ragcache_plan.zipf import ranks_above, zipf_mass

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Corpus:
    """A corpus of documents of `tokens` tokens each, cut into chunks of `chunk_tokens`. kept: share of KV stored

    Raises ConfigError naming the option.
    """

    documents: int
    tokens: int
    chunk_tokens: int = 256
    kept: float = 1.0

    def __post_init__(self) -> None:
        check_least("--documents", self.documents, 1)
        check_least("--tokens", self.tokens, 1)
        check_least("--chunk-tokens", self.chunk_tokens, 1)
        if not 0 < self.kept <= 1:
            raise ConfigError(f"--kv-kept is {self.kept:g}; give a share above 0, and at most 1 for all KV")

    def encode_s(self, rates: MachineRates) -> float:
        """Return the seconds to encode a chunk, which is read twice if some of its KV is dropped."""
        chunk_tokens = self.num_tokens / self.chunks
        return rates.prefill_s(chunk_tokens if self.kept == 1 else 2 * chunk_tokens)

    @property
    def num_tokens(self) -> int:
        return self.documents * self.tokens

    @property
    def chunks(self) -> int:
        return self.documents * math.ceil(self.tokens / self.chunk_tokens)


@dataclass(frozen=True)
class CodecPlan:
    """A plan for a codec. Costs and GPU hours are those of a month; precomputation is spread over the months that
    blocks are kept.

    corpus_bytes:         KV of all chunks, once
    pays_above_bytes_s:   rate of a disk or network above which a chunk is loaded faster than computed; None: at no rate
    transfer_cost:        reading the KV of all requests from a remote store
    fused_s, fused_share: seconds to the first token, and their share of full prefill's
    reuses_time:          uses after which precomputing a chunk has saved GPU time; None: it never does
    reuses_month:         uses a month from which a stored chunk is cheaper than computing it each time; None: never
    hot_chunks, hot_bytes, hot_cost: number of chunks with at least `reuses_month` uses, their KV, and the total cost if
                          KV is kept only for these chunks
    """

    codec: str
    lossless: bool
    ratio: float
    bytes_per_token: float
    corpus_bytes: float
    pays_above_bytes_s: float | None
    fused_s: float
    fused_share: float
    gpu_hours: float
    gpu_cost: float
    storage_cost: float
    transfer_cost: float
    precompute_cost: float
    total_cost: float
    reuses_time: float | None
    reuses_month: float | None
    hot_chunks: int
    hot_bytes: float
    hot_cost: float

    @property
    def least_cost(self) -> float:
        return min(self.total_cost, self.hot_cost)


@dataclass(frozen=True)
class Plan:
    """A plan for a corpus and a demand. Costs and GPU hours are those of a month.

    precompute_s, precompute_cost: encoding all chunks once
    full_s, full_gpu_hours, full_cost: of full prefill; full_s: to the first token
    codec:   the cheapest codec's name
    keep:    whose KV to store: of "all" chunks, the "hot" chunks, or "none"
    reasons: for this advice, in words
    """

    shape: KVShape
    chunks: int
    corpus_tokens: int
    precompute_s: float
    precompute_cost: float
    full_s: float
    full_gpu_hours: float
    full_cost: float
    codecs: Sequence[CodecPlan]
    codec: str
    keep: str
    reasons: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_token": self.shape.bytes_per_token}


def make_plan(
    shape: KVShape,
    corpus: Corpus,
    demand: Demand,
    rates: MachineRates | None = None,
    prices: Prices | None = None,
    sizes: Sequence[CodecSize] | None = None,
) -> Plan:
    """Return the plans of all codecs, or of those in `sizes`, and the advice to take the cheapest."""
    rates, prices = rates or MachineRates(), prices or Prices()
    sizes = sizes if sizes is not None else codec_sizes(shape, corpus.chunk_tokens, corpus.kept)
    precompute_s = corpus.chunks * corpus.encode_s(rates)
    full_s = rates.prefill_s(demand.request_tokens)
    codecs = [_codec_plan(size, corpus, demand, rates, prices) for size in sizes]
    best = min(codecs, key=lambda plan: (plan.least_cost, not plan.lossless))
    full_cost = prices.gpu(demand.requests * full_s)
    keep = "none" if full_cost <= best.least_cost else "all" if best.hot_chunks == corpus.chunks else "hot"
    return Plan(
        shape=shape,
        chunks=corpus.chunks,
        corpus_tokens=corpus.num_tokens,
        precompute_s=precompute_s,
        precompute_cost=prices.gpu(precompute_s),
        full_s=full_s,
        full_gpu_hours=demand.requests * full_s / 3600,
        full_cost=full_cost,
        codecs=codecs,
        codec=best.codec,
        keep=keep,
        reasons=[*_reasons(best, codecs, keep, full_cost, corpus), *_rate_reasons(best, demand, rates)],
    )


def _codec_plan(size: CodecSize, corpus: Corpus, demand: Demand, rates: MachineRates, prices: Prices) -> CodecPlan:
    chunk_tokens = corpus.num_tokens / corpus.chunks
    chunk_bytes = chunk_tokens * size.bytes_per_token
    corpus_bytes = corpus.num_tokens * size.bytes_per_token
    full_s = rates.prefill_s(demand.request_tokens)
    fused_s = _fused_s(size, demand, rates)
    # Saving of a stored chunk per use: its share of the request's saving.
    uses = demand.requests * demand.context_tokens / chunk_tokens
    saved_s = (full_s - fused_s) * demand.requests / uses
    compute_s = corpus.encode_s(rates)
    kept_for = demand.copies * prices.storage(chunk_bytes) + prices.gpu(compute_s) / prices.months
    saving = prices.gpu(saved_s) - prices.transfer(chunk_bytes, demand.tier)
    reuses_month = kept_for / saving if saving > 0 else None
    hot = 0 if reuses_month is None else ranks_above(demand.zipf, corpus.chunks, reuses_month, uses)
    covered = zipf_mass(demand.zipf, hot) / zipf_mass(demand.zipf, corpus.chunks)
    gpu_s = demand.requests * fused_s
    precompute = prices.gpu(corpus.chunks * compute_s) / prices.months
    storage = demand.copies * prices.storage(corpus_bytes)
    transfer = prices.transfer(demand.requests * demand.context_tokens * size.bytes_per_token, demand.tier)
    return CodecPlan(
        codec=size.name,
        lossless=size.lossless,
        ratio=size.ratio,
        bytes_per_token=size.bytes_per_token,
        corpus_bytes=corpus_bytes,
        pays_above_bytes_s=rates.pays_above(chunk_bytes, chunk_tokens),
        fused_s=fused_s,
        fused_share=fused_s / full_s,
        gpu_hours=gpu_s / 3600,
        gpu_cost=prices.gpu(gpu_s),
        storage_cost=storage,
        transfer_cost=transfer,
        precompute_cost=precompute,
        total_cost=prices.gpu(gpu_s) + storage + transfer + precompute,
        reuses_time=compute_s / saved_s if saved_s > 0 else None,
        reuses_month=reuses_month,
        hot_chunks=hot,
        hot_bytes=hot * chunk_bytes,
        hot_cost=prices.gpu(demand.requests * (full_s - covered * (full_s - fused_s)))
        + covered * transfer
        + hot * kept_for,
    )


def _fused_s(size: CodecSize, demand: Demand, rates: MachineRates) -> float:
    if demand.fused_s is not None:
        return demand.fused_s
    return rates.load_s(demand.context_tokens * size.bytes_per_token, demand.tier) + rates.prefill_s(
        demand.question_tokens
    )


def _reasons(best: CodecPlan, codecs: Sequence[CodecPlan], keep: str, full_cost: float, corpus: Corpus) -> list[str]:
    if keep == "none":
        why = "no chunk is used often enough"
        if best.reuses_month is None:
            why = "loading is no faster than computing" if best.reuses_time is None else "reading it costs more"
        return [f"keep no KV: full prefill costs {full_cost:,.2f} a month, stored KV {best.least_cost:,.2f}: {why}"]
    found = [f"codec {best.codec}: {best.least_cost:,.2f} a month against {full_cost:,.2f} with full prefill"]
    others = [f"{plan.codec} {plan.least_cost:,.2f}" for plan in codecs if plan is not best]
    if others:
        found[0] += f" (others: {', '.join(others)})"
    if not best.lossless:
        found.append(
            f"{best.codec} loses precision, and the time of its decoding is not in these figures: see that answers "
            "stay the same, and give the seconds that you measure as --fused-s"
        )
    if keep == "hot":
        share = best.hot_chunks / corpus.chunks
        found.append(
            f"keep KV of the {share:.1%} of the chunks that are used at least {best.reuses_month:,.1f} times a month: "
            f"{best.hot_cost:,.2f} a month, and {best.total_cost:,.2f} for all chunks"
        )
    else:
        found.append("keep KV of all chunks: keeping fewer would cost more GPU time than it saves in storage")
    return found


def _rate_reasons(best: CodecPlan, demand: Demand, rates: MachineRates) -> list[str]:
    """Return, in words, the effect of the network and of the number of replicas on the plan."""
    found = []
    if demand.tier == "remote" and best.pays_above_bytes_s is not None:
        found.append(
            f"a remote load of {best.codec} pays above {best.pays_above_bytes_s / GB:.2f} GB/s; --network-rate is "
            f"{rates.network_bytes_s / GB:.2f}"
        )
    if (needed := best.gpu_hours / HOURS_A_MONTH) > demand.replicas:
        found.append(
            f"the requests take {needed:,.1f} GPUs all month, even with all KV stored: at least --replicas "
            f"{math.ceil(needed)}"
        )
    return found
