"""Options of `plan` and `simulate`: how fast the machine is, stated or measured."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragcache.cli.flags import Json, option, size_option
from ragcache.cli.terminal import bytes_text, command, print_json, print_table, say, seconds_text
from ragcache.errors import ConfigError, check_least

if TYPE_CHECKING:
    from ragcache_plan.accesses import Accesses
    from ragcache_plan.plan import Corpus, Demand, Plan, Prices
    from ragcache_plan.rates import MachineRates
    from ragcache_plan.replay import Outcome
    from ragcache_plan.shape import KVShape


@dataclass(frozen=True)
class ShapeOptions:
    """Model whose KV it is."""

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
        """Raises ConfigError naming the option, ModelNotFoundError, UnsupportedModelError."""
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
class RateOptions:
    """How fast the machine is. Without any: an 8B model on an A100."""

    prefill_rate: Annotated[
        float | None, option("--prefill-rate", "Tokens that a prefill reads in a second.", show_default="5646")
    ] = None
    memory_rate: Annotated[
        float | None,
        option("--memory-rate", "Bytes of KV a second from host memory to their place.", show_default="24e9"),
    ] = None
    disk_rate: Annotated[float | None, option("--disk-rate", "Bytes of KV a second from disk.", show_default="3e9")] = (
        None
    )
    measure: Annotated[bool, option("--measure", "Measure on this machine what is not given; loads --model.")] = False
    device: Annotated[str, option("--device", "Where --measure runs the model: auto, cuda, xpu, mps or cpu.")] = "auto"

    def rates(self, model: str | None) -> MachineRates:
        """Raises ConfigError naming the option."""
        from ragcache_plan.rates import MachineRates, measure_rates

        found = MachineRates()
        if self.measure:
            if model is None:
                raise ConfigError("--measure runs the model; say which with --model")
            from ragcache.models.load import load_lm

            found = measure_rates(load_lm(model, device=self.device), Path())
        return MachineRates(
            found.prefill_tokens_s if self.prefill_rate is None else self.prefill_rate,
            found.attention_share if self.prefill_rate is None else 0.0,
            found.memory_bytes_s if self.memory_rate is None else self.memory_rate,
            found.disk_bytes_s if self.disk_rate is None else self.disk_rate,
        )


# plan.


@dataclass(frozen=True)
class CorpusOptions:
    """The corpus, and the requests over it."""

    documents: Annotated[int, option("--documents", "Documents of the corpus.")]
    tokens: Annotated[int, option("--tokens", "Tokens of a document.")]
    chunk_tokens: Annotated[int, option("--chunk-tokens", "Tokens of a passage.")] = 256
    kept: Annotated[float, option("--kv-kept", "Share of each passage's KV that is stored; see `ragcache ingest`.")] = 1
    requests: Annotated[int, option("--requests", "Requests a month.")] = 100_000
    request_tokens: Annotated[int, option("--request-tokens", "Tokens of a whole prompt, passages and question.")] = (
        1310
    )
    question_tokens: Annotated[int, option("--question-tokens", "Of them, those that are always run.")] = 30
    zipf: Annotated[float, option("--zipf", "Exponent of the passages' popularity; 0: all are read alike.")] = 0.8
    tier: Annotated[
        Literal["memory", "disk", "remote"], option("--tier", "Where a request's KV comes from, for the estimate.")
    ] = "disk"
    replicas: Annotated[
        int, option("--replicas", "Machines that answer, each with a memory and a disk; a remote store is shared.")
    ] = 1
    network_rate: Annotated[
        float, option("--network-rate", "Bytes of KV a second from a remote store; never measured.")
    ] = 1.25e9
    fused_s: Annotated[
        float | None, option("--fused-s", "Seconds to the first token with stored KV, in place of the estimate.")
    ] = None

    def corpus(self) -> Corpus:
        from ragcache_plan.plan import Corpus

        return Corpus(self.documents, self.tokens, self.chunk_tokens, self.kept)

    def demand(self) -> Demand:
        from ragcache_plan.plan import Demand

        return Demand(
            self.requests, self.request_tokens, self.question_tokens, self.fused_s, self.zipf, self.tier, self.replicas
        )


@dataclass(frozen=True)
class PriceOptions:
    """Prices, in any one currency."""

    gpu_hour: Annotated[float, option("--gpu-hour", "Price of a GPU hour.")] = 1.79
    gb_month: Annotated[float, option("--gb-month", "Price of 10^9 bytes for a month.")] = 0.023
    gb_transfer: Annotated[float, option("--gb-transfer", "Price of reading 10^9 bytes from a remote store.")] = 0.0
    months: Annotated[float, option("--months", "Months for which precomputed KV is kept.")] = 12.0

    def prices(self) -> Prices:
        from ragcache_plan.plan import Prices

        return Prices(self.gpu_hour, self.gb_month, self.months, self.gb_transfer)


@command
def plan(
    model: ShapeOptions,
    corpus: CorpusOptions,
    rates: RateOptions,
    prices: PriceOptions,
    memory: Annotated[int, size_option("--memory", "Host memory for KV.", "2GiB")] = 2 * 2**30,
    as_json: Json = False,
) -> None:
    """Say what a corpus takes: bytes by codec, precomputation, money, where stored KV breaks even, what to choose.

    Rates and prices that are not given are those of KVLink's authors: Llama-3.1-8B on an A100, 1.79 USD an hour,
    0.023 USD for a GB a month.
    """
    from ragcache_plan.plan import make_plan
    from ragcache_plan.replay import advise_policy

    shape, wanted, asked, paid = model.shape(), corpus.corpus(), corpus.demand(), prices.prices()
    speed = replace(rates.rates(model.model), network_bytes_s=corpus.network_rate)
    found = make_plan(shape, wanted, asked, speed, paid)
    policy = advise_policy(found, wanted, asked, speed, memory)
    if as_json:
        print_json({**found.to_json(), "memory_bytes": memory, **policy._asdict()})
        return
    _print_plan(found, asked)
    for reason in (*found.reasons, policy.reason):
        say(f"- {reason}")


def _print_plan(found: Plan, asked: Demand) -> None:
    shape = found.shape
    rows = [
        ("model", str(shape)),
        ("raw KV", f"{shape.bytes_per_token:,} bytes a token, {shape.bytes_per_token / 1000:,.1f} MB for 1,000 tokens"),
        ("corpus", f"{found.corpus_tokens:,} tokens in {found.chunks:,} passages"),
        ("precomputation", f"{_duration(found.precompute_s)}, {found.precompute_cost:,.2f} once"),
        (
            "full prefill",
            f"{seconds_text(found.full_s)} to the first token; {asked.requests:,} requests a month take "
            f"{found.full_gpu_hours:,.1f} GPU hours, {found.full_cost:,.2f}",
        ),
    ]
    for name, value in rows:
        say(f"{name:<16}{value}")
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


def _duration(seconds: float) -> str:
    return seconds_text(seconds) if seconds < 3600 else f"{seconds / 3600:,.1f} hours"


# simulate.


@dataclass(frozen=True)
class WorkloadOptions:
    """The stream of requests where no trace is given: fields are those of Workload."""

    requests: Annotated[int, option("--requests", "Requests to generate.")] = 200_000
    k: Annotated[int, option("--k", "Passages of a request.")] = 5
    blocks: Annotated[int, option("--blocks", "Passages of the corpus.")] = 100_000
    zipf: Annotated[float, option("--zipf", "Exponent of the passages' popularity; 0: all are read alike.")] = 0.8
    drift: Annotated[int, option("--drift", "After so many requests the hottest passage is the coldest; 0: never.")] = 0
    session: Annotated[float, option("--session", "Mean requests of a session, which reads passages again.")] = 1.0
    sticky: Annotated[float, option("--sticky", "Chance that a session's next request reads a passage again.")] = 0.5
    tokens: Annotated[str, option("--chunk-tokens", "Tokens of a passage: 256, or a range 100-500.")] = "256"
    bytes_per_token: Annotated[
        int | None,
        option("--bytes-per-token", "KV of a token; --model's if not given.", show_default="131072"),
    ] = None
    seed: Annotated[int, option("--seed", "The same stream for the same seed.")] = 0

    def generate(self, bytes_per_token: int, bytes_per_block: int) -> Accesses:
        """Raises ConfigError naming the option."""
        from ragcache_plan.accesses import Workload, generated

        found = re.fullmatch(r"(\d+)(?:-(\d+))?", self.tokens.strip())
        if found is None:
            raise ConfigError(f"--chunk-tokens {self.tokens!r} is no number or range; write 256 or 100-500")
        tokens = (int(found[1]), int(found[2] or found[1]))
        sizes = {"bytes_per_token": bytes_per_token, "bytes_per_block": bytes_per_block}
        return generated(Workload(**{**vars(self), "tokens": tokens, **sizes}))


@command
def simulate(
    stream: WorkloadOptions,
    rates: RateOptions,
    trace: Annotated[Path | None, typer.Argument(help="What a store recorded with --trace.")] = None,
    memory: Annotated[
        list[int] | None, size_option("--memory", "Budget of the memory tier; may be repeated.", "2GiB")
    ] = None,
    disk: Annotated[int | None, size_option("--disk", "Budget of the disk tier.", "keeps all")] = None,
    eviction: Annotated[
        list[str] | None, option("--eviction", "Policy; may be repeated.", show_default="all of them")
    ] = None,
    admission: Annotated[
        list[str] | None, option("--admission", "Admission filter; may be repeated.", show_default="all of them")
    ] = None,
    kv: Annotated[
        Literal["eager", "lazy"], option("--kv", "Blocks are on disk at the start, or made on first use.")
    ] = "eager",
    question_tokens: Annotated[int, option("--question-tokens", "Tokens that are run for every request.")] = 30,
    model: Annotated[str | None, option("--model", "Whose KV it is, and what --measure runs.")] = None,
    kept: Annotated[float, option("--kv-kept", "Share of each generated passage's KV that is stored.")] = 1,
    as_json: Json = False,
) -> None:
    """Replay a recorded or generated trace against budgets and policies, without a model.

    Beside each stands Belady's optimum, which knows the future, and the time to the first token that the rates give.
    """
    from ragcache.store.eviction import ADMISSIONS, POLICIES
    from ragcache_plan.accesses import recorded
    from ragcache_plan.replay import Budgets
    from ragcache_plan.replay import simulate as run

    check_least("--question-tokens", question_tokens, 0)
    speed = rates.rates(model)
    requests = generate_accesses(stream, model, kept) if trace is None else recorded(trace)
    budgets = [Budgets(memory_bytes, disk, kv == "eager") for memory_bytes in memory or [2 * 2**30]]
    outcomes = list(
        run(requests, budgets, eviction or list(POLICIES), admission or list(ADMISSIONS), speed, question_tokens)
    )
    if as_json:
        print_json({"outcomes": [outcome.to_json() for outcome in outcomes]})
    else:
        _print_outcomes(requests, outcomes)


def generate_accesses(stream: WorkloadOptions, model: str | None, kept: float) -> Accesses:
    """The options' own stream, with the sizes of the model's blocks. Raises ConfigError for a share that is none."""
    from ragcache_plan.plan import check_kept

    check_kept(kept)
    if stream.bytes_per_token is not None or model is None:
        stated = 131072 if stream.bytes_per_token is None else stream.bytes_per_token
        return stream.generate(math.ceil(kept * stated), 0)
    from ragcache_plan.stated import shape_of

    shape = shape_of(model)
    return stream.generate(math.ceil(kept * shape.bytes_per_token), shape.state_bytes)


def _print_outcomes(trace: Accesses, outcomes: list[Outcome]) -> None:
    total = int(trace.num_bytes.sum())
    say(
        f"{trace.requests:,} requests, {len(trace):,} reads of {len(trace.num_bytes):,} blocks, "
        f"{bytes_text(total)} in all" + (f"; {trace.never_read:,} more are never read" if trace.never_read else "")
    )
    columns = ["memory", "eviction", "admission", ">from memory", ">from disk", ">computed", ">optimum", ">disk read",
               ">p50", ">p95", ">p99"]  # fmt: skip
    print_table(columns, [
        (
            bytes_text(one.memory_bytes),
            one.policy,
            one.admission,
            f"{one.hit_rate['memory']:.2%}",
            f"{one.hit_rate['disk']:.2%}",
            f"{one.computed_rate:.2%}",
            f"{one.optimum_rate:.2%}" if one.optimum_exact else f"{one.optimum_rate:.2%}-{one.bound_rate:.2%}",
            bytes_text(one.read_bytes["disk"]),
            *(seconds_text(seconds) for seconds in one.ttft_s.values()),
        )
        for one in outcomes
    ])  # fmt: skip
    say(
        "optimum: hits in memory of a policy that knows the future (Belady)"
        if trace.equal_sizes
        else "optimum, for blocks of unequal size: what Belady's rule reaches, and what no policy exceeds"
    )
