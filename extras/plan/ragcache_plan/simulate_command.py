"""simulate."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragcache.cli.flags import Json, option, size_option
from ragcache.cli.terminal import bytes_text, command, print_json, print_table, say, seconds_text
from ragcache.errors import ConfigError, check_kept, check_least
from ragcache_plan.machine_options import RateOptions

if TYPE_CHECKING:
    from ragcache_plan.accesses import Accesses
    from ragcache_plan.simulate import Outcome


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

    def generate(self, bytes_per_token: int) -> Accesses:
        """Raises ConfigError naming the option."""
        from ragcache_plan.accesses import Workload, generated

        found = re.fullmatch(r"(\d+)(?:-(\d+))?", self.tokens.strip())
        if found is None:
            raise ConfigError(f"--chunk-tokens {self.tokens!r} is no number or range; write 256 or 100-500")
        tokens = (int(found[1]), int(found[2] or found[1]))
        return generated(Workload(**{**vars(self), "tokens": tokens, "bytes_per_token": bytes_per_token}))


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
    from ragcache_plan.simulate import simulate as run

    check_least("--question-tokens", question_tokens, 0)
    speed = rates.rates(model)
    requests = stream.generate(_bytes_per_token(stream, model, kept)) if trace is None else recorded(trace)
    budgets = [Budgets(memory_bytes, disk, kv == "eager") for memory_bytes in memory or [2 * 2**30]]
    outcomes = list(
        run(requests, budgets, eviction or list(POLICIES), admission or list(ADMISSIONS), speed, question_tokens)
    )
    if as_json:
        print_json({"outcomes": [outcome.to_json() for outcome in outcomes]})
    else:
        _print_outcomes(requests, outcomes)


def _bytes_per_token(stream: WorkloadOptions, model: str | None, kept: float) -> int:
    """Raises ConfigError for a share that is none."""
    check_kept(kept)
    if stream.bytes_per_token is not None:
        return math.ceil(kept * stream.bytes_per_token)
    if model is None:
        return math.ceil(kept * 131072)
    from ragcache_plan.shape import shape_of

    return math.ceil(kept * shape_of(model).bytes_per_token)


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
