"""`ragcache census`: how much of a log's prompts could have been read from KV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcache.cli.flags import Json, option
from ragcache.cli.terminal import command, print_json, print_table, say, seconds_text
from ragcache.errors import ConfigError
from ragcache_plan.rate_options import RateOptions


@command
def census(
    rates: RateOptions,
    log: Annotated[Path, typer.Argument(help="Requests: OpenAI's, Open WebUI's, vLLM's or LiteLLM's, or a trace.")],
    model: Annotated[str | None, option("--model", "Model that --measure runs.")] = None,
    as_json: Json = False,
) -> None:
    """Count the shares of prefix, moved, changed and new tokens in a log of requests, without a model."""
    from ragcache_plan.census import SHARES, Census
    from ragcache_plan.request_logs import read_log

    speed, counted = rates.rates(model), Census()
    for request in read_log(log, counted.skipped):
        counted.add(request)
    if not counted.requests:
        reasons = "; ".join(f"{count:,} x {reason}" for reason, count in counted.skipped.items()) or "it is empty"
        raise ConfigError(
            f"{log}: holds no request ({reasons}); give OpenAI's JSON lines, or another log named in --help"
        )
    found = counted.to_json(speed)
    if as_json:
        print_json(found)
        return
    say(f"{found['requests']:,} requests, {found['tokens']:,} tokens (words and signs, or a trace's own)")
    rows = {"all": found["shares"], **found["by_kind"], **found["by_day"]}
    print_table(
        ["", *(f">{name}" for name in SHARES)],
        [(label, *(f"{row[name]:.1f} %" for name in SHARES)) for label, row in rows.items()],
    )
    say(
        f"at {speed.prefill_tokens_s:,.0f} tokens/s, KV of prefixes saves {seconds_text(found['prefix_saves_s'])} of "
        f"prefill, that of moved text {seconds_text(found['moved_saves_s'])} more"
    )
    for reason, count in counted.skipped.items():
        say(f"left out: {count:,} x {reason}")
