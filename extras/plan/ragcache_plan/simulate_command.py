"""`ragcache simulate`: budgets and eviction policies compared over a log of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ragcache.cli.flags import Json, option, size_option
from ragcache.cli.terminal import bytes_text, command, print_json, print_table, say, seconds_text
from ragcache.errors import ConfigError, check_least
from ragcache_plan.rate_options import RateOptions

if TYPE_CHECKING:
    from ragcache_plan.accesses import Accesses
    from ragcache_plan.simulation import Outcome


@command
def simulate(
    rates: RateOptions,
    trace: Annotated[Path, typer.Argument(help="A log of requests: `ragcache record`'s, RAGPulse's or Mooncake's.")],
    memory: Annotated[
        list[int] | None, size_option("--memory", "Budget of the memory tier; may be repeated.", "2GiB")
    ] = None,
    room: Annotated[
        list[int] | None, option("--room", "In place of --memory: tokens of KV that it holds; may be repeated.", min=1)
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
    bytes_per_token: Annotated[
        int, option("--bytes-per-token", "Of KV, since a log has lengths alone; see `ragcache plan`.", min=1)
    ] = 131072,
    model: Annotated[str | None, option("--model", "Model that --measure runs.")] = None,
    as_json: Json = False,
) -> None:
    """Replay a log of requests against budgets and policies, without a model.

    Each line also has Belady's optimum, which knows the future, and the time to the first token at the given rates.
    """
    from ragcache.store.eviction import ADMISSIONS, POLICIES
    from ragcache_plan.accesses import recorded
    from ragcache_plan.replay import Budgets
    from ragcache_plan.simulation import simulate as run

    check_least("--question-tokens", question_tokens, 0)
    speed = rates.rates(model)
    if room and memory:
        raise ConfigError("--room and --memory both say how large the memory tier is; give one of them")
    requests = recorded(trace, bytes_per_token)
    sizes = [requests.room(tokens) for tokens in room] if room else memory or [2 * 2**30]
    budgets = [Budgets(memory_bytes, disk, kv == "eager") for memory_bytes in sizes]
    outcomes = list(
        run(requests, budgets, eviction or list(POLICIES), admission or list(ADMISSIONS), speed, question_tokens)
    )
    if as_json:
        print_json({"outcomes": [outcome.to_json() for outcome in outcomes]})
    else:
        _print_outcomes(requests, outcomes)


def _print_outcomes(trace: Accesses, outcomes: list[Outcome]) -> None:
    total = int(trace.num_bytes.sum())
    say(
        f"{trace.requests:,} requests, {len(trace):,} reads of {len(trace.num_bytes):,} blocks, "
        f"{bytes_text(total)} in all"
    )
    columns = ["memory", "eviction", "admission", ">from memory", ">from disk", ">computed", ">optimum", ">tokens",
               ">optimum", ">disk read", ">p50", ">p95", ">p99"]  # fmt: skip
    print_table(columns, [
        (
            bytes_text(one.memory_bytes),
            one.policy,
            one.admission,
            f"{one.hit_rate['memory']:.2%}",
            f"{one.hit_rate['disk']:.2%}",
            f"{one.computed_rate:.2%}",
            _range(one.optimum_rate, one.bound_rate),
            f"{one.token_rate['memory']:.2%}",
            _range(one.optimum_token_rate, one.bound_token_rate),
            bytes_text(one.read_bytes["disk"]),
            *(seconds_text(seconds) for seconds in one.ttft_s.values()),
        )
        for one in outcomes
    ])  # fmt: skip
    say("tokens: the share of the requested tokens that is found in memory")
    say(
        "optimum: hits in memory of a policy that knows the future (Belady)"
        if trace.equal_sizes
        else "optimum, for blocks of unequal size: what Belady's rule reaches, and what no policy exceeds"
    )


def _range(least: float, most: float) -> str:
    return f"{least:.2%}" if least == most else f"{least:.2%}-{most:.2%}"
