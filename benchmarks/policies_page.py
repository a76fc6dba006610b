"""The page of the simulator's tables, out of results/policies.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
GIB = 1 << 30


def page(result: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown. result: as the benchmark wrote it."""
    rows, settings, hardware = result["figures"]["rows"], result["settings"], result["hardware"]
    rates, streams = result["figures"]["rates"], result["figures"]["streams"]
    tokens = next(iter(streams.values()))["tokens"][0]
    total = settings["blocks"] * tokens * next(iter(streams.values()))["bytes_per_token"]
    return [
        "# Eviction and admission, simulated",
        "",
        f"{settings['requests']:,} requests for {settings['k']} of {settings['blocks']:,} passages each; with {tokens} "
        f"tokens a passage, {total / GIB:,.0f} GiB of KV (Llama-3-8B, bfloat16). Times are estimates at "
        f"{rates['prefill_tokens_s']:,.0f} tokens/s of prefill, {rates['memory_bytes_s'] / 1e9:g} GB/s from memory and "
        f"{rates['disk_bytes_s'] / 1e9:g} GB/s from disk, nothing at once. `all` and `tinylfu` are admission filters. "
        "The best of a row is bold.",
        "",
        f"`{hardware['command']}`, {hardware['date'][:10]}. Plots: [hits](policies-hits.png), "
        "[time to first token](policies-ttft.png). How to choose: [docs/storage.md](../../docs/storage.md).",
        "",
        *_table("Served from memory, % of reads", rows, lambda row: 100 * row["memory"], max, ".1f", optimum=True),
        "The optimum is Belady's; where passages have several lengths two figures enclose it: what Belady's rule "
        "reaches and what no policy exceeds.",
        "",
        *_table("Read from disk, GiB", rows, lambda row: row["read_bytes"] / GIB, min, ",.0f"),
        *_computed(rows),
        *_table("First token, p50, ms", rows, lambda row: 1000 * row["p50_s"], min, ".0f"),
        *_table("First token, p95, ms", rows, lambda row: 1000 * row["p95_s"], min, ".0f"),
        *_table("First token, p99, ms", rows, lambda row: 1000 * row["p99_s"], min, ".0f"),
        *_streams(streams),
        *_speed(result),
    ]


def _table(
    title: str,
    rows: Rows,
    figure: Callable[[Mapping[str, Any]], float],
    best: Callable[[Sequence[float]], float],
    form: str,
    *,
    optimum: bool = False,
) -> Iterator[str]:
    """A line for each stream and budget, a column for each policy and filter."""
    columns = list(dict.fromkeys((row["policy"], row["admission"]) for row in rows))
    heads = [f"`{policy}`" + ("" if admission == "all" else f" `{admission}`") for policy, admission in columns]
    yield from (f"## {title}", "")
    yield "| stream | memory, of the KV | " + " | ".join(heads) + (" | optimum |" if optimum else " |")
    yield "|---|---|" + "---|" * (len(heads) + optimum)
    for (stream, share), own in groups(rows).items():
        values = [figure(row) for row in own]
        cells = [f"{value:{form}}" for value in values]
        wanted = f"{best(values):{form}}"
        cells = [f"**{cell}**" if cell == wanted and len(set(cells)) > 1 else cell for cell in cells]
        if optimum:
            low, high = 100 * own[0]["optimum"], 100 * own[0]["bound"]
            cells.append(f"{low:.1f}" if own[0]["exact"] else f"{low:.1f} to {high:.1f}")
        yield f"| {stream} | {share:.0%} | " + " | ".join(cells) + " |"
    yield ""


def _computed(rows: Rows) -> Iterator[str]:
    """Computed shares of the streams whose disk does not hold everything."""
    some = [row for row in rows if row["computed"] > 0]
    if some:
        yield from _table("Computed again, % of reads", some, lambda row: 100 * row["computed"], min, ".1f")


def groups(rows: Rows) -> dict[tuple[str, float], list[Mapping[str, Any]]]:
    """By stream and share of the KV that memory holds, in their order."""
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["stream"], row["share"]), []).append(row)
    return found


def _streams(streams: Mapping[str, Any]) -> Iterator[str]:
    heads = ["stream", "Zipf exponent", "requests until the hottest is the coldest", "requests of a session"]
    yield from ("## Streams", "", "| " + " | ".join([*heads, "taken over", "tokens of a passage"]) + " |")
    yield "|---|---|---|---|---|---|"
    for name, one in streams.items():
        session = one["session"]
        least, most = one["tokens"]
        cells = [
            f"{one['zipf']:g}",
            f"{one['drift']:,}" if one["drift"] else "-",
            f"{session:g}" if session > 1 else "-",
            f"{one['sticky']:.0%}" if session > 1 else "-",
            f"{least:,}" if least == most else f"{least:,} to {most:,}",
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""


def _speed(result: Mapping[str, Any]) -> Iterator[str]:
    speed = result["figures"].get("speed")
    if speed is None:
        return
    hardware = result["hardware"]
    yield from (
        "## How fast it is",
        "",
        f"{speed['reads']:,} reads of {speed['blocks']:,} blocks, generated, replayed with `pgdsf` and `tinylfu` and "
        f"compared with the optimum: {speed['wall_s']:.0f} s ({speed['cpu_s']:.0f} s of processor time) on one core of "
        f"{hardware['cpu']}, load {hardware['load_1min']:g} when it began. The goal is a minute.",
    )
