"""`ragcache plan`: bytes, time and money that a corpus's KV takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ragcache.cli.flags import Json, option
from ragcache.cli.terminal import bytes_text, command, print_json, print_rows, print_table, say, seconds_text
from ragcache.errors import ConfigError
from ragcache_plan.demand import Demand, Prices
from ragcache_plan.rate_options import RateOptions

if TYPE_CHECKING:
    from ragcache_plan.plan import Corpus, Plan
    from ragcache_plan.rates import MachineRates
    from ragcache_plan.shape import KVShape


@dataclass(frozen=True)
class ShapeOptions:
    """Options of the model whose KV is planned."""

    model: Annotated[
        str | None, option("--model", "Bundled name, directory with a config.json or hub id; no weights are read.")
    ] = None
    layers: Annotated[int | None, option("--layers", "In place of --model: layers of the model.")] = None
    kv_heads: Annotated[int | None, option("--kv-heads", "In place of --model: KV heads.")] = None
    head_dim: Annotated[int | None, option("--head-dim", "In place of --model: width of a head.")] = None
    dtype: Annotated[str, option("--dtype", "Of the KV: float32, bfloat16, float16; auto: as config.json says.")] = (
        "auto"
    )

    def shape(self) -> KVShape:
        """Return the KV's shape. Raises ConfigError naming the option, ModelNotFoundError, UnsupportedModelError."""
        from ragcache_plan.shape import KVShape
        from ragcache_plan.stated import shape_of

        stated = {"--layers": self.layers, "--kv-heads": self.kv_heads, "--head-dim": self.head_dim}
        given = [name for name, value in stated.items() if value is not None]
        if self.model is not None:
            if given:
                raise ConfigError(f"{given[0]} and --model both say what the model is; give one of them")
            return shape_of(self.model, self.dtype)
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            missing = next(name for name in stated if name not in given)
            raise ConfigError(f"{missing} is missing: give --model, or --layers, --kv-heads and --head-dim")
        return KVShape(
            self.layers, self.kv_heads, self.head_dim, "bfloat16" if self.dtype == "auto" else self.dtype
        )  # fmt: skip


@dataclass(frozen=True)
class CorpusOptions:
    """Options of the corpus."""

    documents: Annotated[int | None, option("--documents", "Documents of the corpus.")] = None
    tokens: Annotated[int | None, option("--tokens", "Tokens of a document.")] = None
    chunk_tokens: Annotated[int, option("--chunk-tokens", "Tokens of a passage.")] = 256
    kept: Annotated[float, option("--kv-kept", "Share of each passage's KV that is stored; see `ragcache ingest`.")] = 1

    def corpus(self) -> Corpus:
        from ragcache_plan.plan import Corpus

        if self.documents is None or self.tokens is None:
            missing = "--documents" if self.documents is None else "--tokens"
            raise ConfigError(f"{missing} is missing: give --documents and --tokens, or a log as --trace")
        return Corpus(self.documents, self.tokens, self.chunk_tokens, self.kept)


@command
def plan(
    model: ShapeOptions,
    corpus: CorpusOptions,
    demand: Demand,
    rates: RateOptions,
    prices: Prices,
    network_rate: Annotated[
        float, option("--network-rate", "Bytes of KV a second from a remote store; never measured.")
    ] = 1.25e9,
    trace: Annotated[
        Path | None, option("--trace", "A log of `ragcache record`, RAGPulse or Mooncake, in place of the corpus.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a corpus takes: bytes by codec, precomputation, money, where stored KV breaks even, what to choose.

    With a log of your own requests, say which memory, disk and cards they take.

    Rates and prices that are not given are those of KVLink's authors: Llama-3.1-8B on an A100, 1.79 USD an hour,
    0.023 USD for a GB a month.
    """
    from ragcache_plan.plan import make_plan

    shape, speed = model.shape(), replace(rates.rates(model.model), network_bytes_s=network_rate)
    if trace is not None:
        _print_sizing(trace, shape, speed, as_json=as_json)
        return
    found = make_plan(shape, corpus.corpus(), demand, speed, prices)
    if as_json:
        print_json(found.to_json())
        return
    _print_plan(found, demand)
    for reason in found.reasons:
        say(f"- {reason}")


def _print_plan(found: Plan, demand: Demand) -> None:
    shape = found.shape
    rows = [
        ("model", str(shape)),
        ("raw KV", f"{shape.bytes_per_token:,} bytes a token, {shape.bytes_per_token / 1000:,.1f} MB for 1,000 tokens"),
        ("corpus", f"{found.corpus_tokens:,} tokens in {found.chunks:,} passages"),
        ("precomputation", f"{_duration(found.precompute_s)}, {found.precompute_cost:,.2f} once"),
        (
            "full prefill",
            f"{seconds_text(found.full_s)} to the first token; {demand.requests:,} requests a month take "
            f"{found.full_gpu_hours:,.1f} GPU hours, {found.full_cost:,.2f}",
        ),
    ]
    print_rows(rows, 16)
    say()
    columns = ["codec", ">bytes/token", ">disk or memory", ">first token", ">GPU hours", ">GPU", ">storage",
               ">transfer", ">precomputed", ">total", ">pays from", ">hot", ">of hot only"]  # fmt: skip
    print_table(columns, [
        (
            one.codec,
            f"{one.bytes_per_token:,.0f}",
            bytes_text(int(one.corpus_bytes)),
            f"{seconds_text(one.fused_s)} ({one.fused_share:.3f} x)",
            f"{one.gpu_hours:,.1f}",
            f"{one.gpu_cost:,.2f}",
            f"{one.storage_cost:,.2f}",
            f"{one.transfer_cost:,.2f}",
            f"{one.precompute_cost:,.2f}",
            f"{one.total_cost:,.2f}",
            "never" if one.reuses_month is None else f"{one.reuses_month:,.1f} uses/month",
            f"{one.hot_chunks / found.chunks:.1%}",
            f"{one.hot_cost:,.2f}",
        )
        for one in found.codecs
    ])  # fmt: skip
    say()


def _print_sizing(trace: Path, shape: KVShape, rates: MachineRates, *, as_json: bool) -> None:
    """Print the sizes that a log takes. Raises TraceError."""
    from ragcache.errors import TraceError
    from ragcache_plan.logs import read_log
    from ragcache_plan.sizing import size_up

    requests = list(read_log(trace))
    if not requests:
        raise TraceError(trace, "there is no request in it")
    found = size_up(requests, shape.bytes_per_token, rates)
    if as_json:
        print_json(asdict(found))
        return
    rest, passages = found.mean_rest, found.passage_tokens / found.prompt_tokens
    say(
        f"{found.requests:,} requests in {_duration(found.span_s)}: {found.prompt_tokens:,} prompt tokens, of them "
        f"{passages:.1%} in {found.passages:,} passages, and {rest:,} others a request"
    )
    say(f"{shape}: {shape.bytes_per_token:,} bytes a token")
    say()
    print_table(["memory", ">tokens", ">passage tokens found", ">prompt tokens computed", ">cards"], [
        (bytes_text(one.num_bytes), f"{one.tokens:,}", f"{one.token_rate:.1%}", f"{one.computed_rate:.1%}", one.cards)
        for one in found.sizes
    ])  # fmt: skip
    say()
    say(f"- memory {bytes_text(found.memory.num_bytes)}: finds {found.memory.token_rate:.1%} of the passages' tokens")
    say(f"- disk {bytes_text(found.disk_bytes)}: every passage of the log once, raw; codecs take less")
    say(
        f"- cards: {found.memory.cards} in the busiest hour, {found.cards_without} without stored KV; prefill alone, "
        f"at {rates.prefill_tokens_s:,.0f} tokens/s each: add those that the answers take"
    )


def _duration(seconds: float) -> str:
    return seconds_text(seconds) if seconds < 3600 else f"{seconds / 3600:,.1f} hours"
