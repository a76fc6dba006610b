"""A week of a real service's requests: the share of tokens that each kind of cache finds, and a replay of a slice.

    python -m benchmarks week --trace shared/data/traces/ragpulse
    python -m benchmarks week --trace LOG --requests 32 --start 3600 --speeds 3 5 8 --peers ragcache vllm ragcache-vllm

The whole log is counted without a model, for two caches of the same size: a cache of passages, found by their content,
with system prompts as prefixes; and a cache of whole prefixes. Then `requests` requests of the log go to each peer,
first one after another, then at the log's own times, divided by some of `speeds`: a bisection looks for the speed at
which the 95th percentile of the time to the first token exceeds TWICE that of a single asker. Each part of a prompt is
a run of random tokens of the logged length, the same for the same hash; parts that are not passages are drawn anew for
each speed, so that no peer has answered the prompt before. The weights are random.

`trace`: a directory of RAGPulse or a file of `ragcache record` or of Mooncake; see `ragcache_plan.logs`. Prompts of a
real tokenizer repeat white space and templates, which random tokens do not; no cache here uses such repetitions: only
equal parts are found.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_workers.channel import Answer
from benchmarks.peers_processes import PEERS as ENGINES
from benchmarks.peers_processes import ROOT, PeerError, PeerProcess, PeerSpec, WorkerSettings
from benchmarks.report import Goal, Result, goal_lines, where_line
from benchmarks.runner import Run
from benchmarks.shapes import SHAPES, write_checkpoint
from ragcache.errors import ConfigError, check_choice, check_least
from ragcache.store.eviction import POLICIES, Entry, get_policy
from ragcache_plan.accesses import BYTES_PER_TOKEN, REUSED, from_requests
from ragcache_plan.logs import LoggedRequest, Part, read_log
from ragcache_plan.optimum import optimum
from ragcache_plan.replay import SimulatedTier

OURS, PREFIXES = "passages and prefixes", "prefix cache"
OURS_LIVE = "ragcache reposition"
SERVER = PeerSpec("ragcache-server", "ragcache_server_worker", None, ("reposition",), "ragcache serve,")
PEERS = {spec.name: spec for spec in (*ENGINES.values(), SERVER) if not spec.slow}
ALONE = 10
"""Requests that are answered one after another, to measure the wait of a single asker."""
TWICE = 2.0
SIX_HOURS_S = 6 * 3600.0
DECIDING_ROOM = 690_000
QUANTILES = (50, 95, 99)
SYSTEM_FIRST = ("system", *REUSED)
"""Kinds of parts that precede the parts which differ with every request."""


@dataclass(frozen=True)
class Settings(WorkerSettings):
    """rooms: sizes of the passages' cache, in tokens; prefix_room: size of the system prompts' cache, in tokens
    requests: number of requests to replay, from `start` seconds on; 0: none. answer: most tokens of an answer
    speeds: multiples of the log's own speed, rising
    ingested: read the slice's passages before its first request, by peers that can, as a store does
    shape, dtype: of the model; kv_mib: size of each peer's cache; peers, environments: see the benchmark `peers`
    """

    trace: Path = Path("ragpulse")
    rooms: tuple[int, ...] = (100_000, 200_000, 400_000, DECIDING_ROOM)
    prefix_room: int = DECIDING_ROOM
    requests: int = 0
    start: float = 0.0
    speeds: tuple[float, ...] = (1.0,)
    answer: int = 32
    ingested: bool = True
    peers: tuple[str, ...] = ("ragcache", SERVER.name, "vllm", "ragcache-vllm")
    shape: str = "SmolLM2-135M"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in self.peers:
            check_choice("--peers", name, tuple(PEERS))
        for room in (*self.rooms, self.prefix_room, self.answer):
            check_least("--rooms, --prefix-room and --answer", room, 1)
        check_least("--requests", self.requests, 0)
        if not all(low < high < inf for low, high in pairwise((0, *self.speeds))):
            given = " ".join(f"{speed:g}" for speed in self.speeds)
            raise ConfigError(f"--speeds are {given}; give numbers above 0, each above the one before")


class Counted:
    """Counts of the log's tokens by kind, and of the tokens that a cache finds.

    room, prefix_room: tokens that the caches of passages and of prefixes hold
    periods: for each six hours, the computed share of tokens, and the tokens held in memory and on disk at its end
    """

    def __init__(self, room: int, policy: str, prefix_room: int) -> None:
        self._passages = SimulatedTier("memory", room, get_policy(policy))
        self._prefixes = SimulatedTier("prefixes", prefix_room, get_policy("lru"))
        self._disk = SimulatedTier("disk", None, get_policy("lru"))
        self.asked, self.found = Counter[str](), Counter[str]()
        self.periods: list[dict[str, float]] = []

    def read(self, requests: Sequence[LoggedRequest], reused: Sequence[str]) -> None:
        """Count requests. reused: kinds found by their content at any place; other kinds are found as prefixes"""
        for period, some in groupby(requests, lambda request: int(request.at / SIX_HOURS_S)):
            before = self.asked.total(), self.found.total()
            for request in some:
                self._request(request, reused)
            asked, found = self.asked.total() - before[0], self.found.total() - before[1]
            self.periods.append(
                {
                    "hours": (period + 1) * SIX_HOURS_S / 3600,
                    "computed": 1 - found / asked,
                    "memory_tokens": self._passages.ledger.used_bytes + self._prefixes.ledger.used_bytes,
                    "disk_tokens": self._disk.ledger.used_bytes,
                }
            )

    def _request(self, request: LoggedRequest, reused: Sequence[str]) -> None:
        path, leads, unbroken, missing = "", True, True, dict[str, Entry]()
        for part in request.parts:
            self.asked[part.kind] += part.num_tokens
            if part.kind in reused:
                entry = Entry(part.hash, part.num_tokens, part.num_tokens)
                if self._passages.get(entry):
                    self.found[part.kind] += part.num_tokens
                else:
                    missing[part.hash] = entry
                leads = False  # a prefix ends where the first passage begins
            elif leads:
                path += f"/{part.hash}"
                entry = Entry(path, part.num_tokens, part.num_tokens)
                unbroken = unbroken and self._prefixes.get(entry)
                if unbroken:
                    self.found[part.kind] += part.num_tokens
                else:
                    self._prefixes.put(entry)
        for entry in missing.values():
            self._passages.put(entry)
            self._disk.put(entry)

    def to_json(self) -> dict[str, Any]:
        found = {kind: self.found[kind] / asked for kind, asked in self.asked.items()}
        return {"found": found, "computed": 1 - self.found.total() / self.asked.total(), "periods": self.periods}


def count(settings: Settings, requests: Sequence[LoggedRequest]) -> dict[str, Any]:
    """Return the figures of the whole log: for each room, the counts by policy and by prefixes, and the optimum."""
    trace, rooms = from_requests(requests, 1), []
    for room in settings.rooms:
        rows = {}
        for policy in POLICIES:
            counted = Counted(room, policy, settings.prefix_room)
            counted.read(requests, REUSED)
            rows[policy] = counted.to_json()
        prefixes = Counted(1, "lru", room + settings.prefix_room)
        prefixes.read(requests, ())
        best = optimum(trace, room)
        bounds = [tokens / max(1, trace.total_tokens) for tokens in (best.tokens, best.bound_tokens)]
        rooms.append({"room": room, "policies": rows, PREFIXES: prefixes.to_json(), "optimum": bounds})
        _say(f"counted with room for {room:,} tokens")
    return {
        "requests": len(requests),
        "span_s": requests[-1].at - requests[0].at,
        "tokens": dict(counted.asked),
        "rooms": rooms,
    }


# A slice, sent to the peers at its own times


def slice_of(settings: Settings, requests: Sequence[LoggedRequest]) -> tuple[list[LoggedRequest], int]:
    """Return the requests to replay, and the number of requests too long for the shape.

    Raises ConfigError if no request is left.
    """
    longest = int(SHAPES[settings.shape]["max_position_embeddings"]) - settings.answer
    due = [request for request in requests if request.at >= settings.start][: settings.requests]
    fit = [request for request in due if request.num_tokens <= longest]
    if not fit:
        raise ConfigError(f"--start {settings.start:g}: no request of at most {longest:,} tokens follows")
    return fit, len(due) - len(fit)


def prompt_of(request: LoggedRequest, settings: Settings, salt: str = "") -> dict[str, Any]:
    """Return the prompt in a worker's form: parts that may recur as passages, all others as the suffix.

    salt: seed of the parts that are not passages
    """
    draw = cache(partial(_ids, int(SHAPES[settings.shape]["vocab_size"]), settings.seed))

    def ids(part: Part) -> list[int]:
        return draw(part.hash if part.kind in REUSED else salt + part.hash, part.num_tokens)

    first = [ids(part) for part in request.parts if part.kind in SYSTEM_FIRST]
    rest = [id for part in request.parts if part.kind not in SYSTEM_FIRST for id in ids(part)]
    return {"passages": first, "suffix": rest or draw(salt, 1)}


def _ids(vocab_size: int, seed: int, hash: str, count: int) -> list[int]:
    drawn: list[int] = (
        np.random.default_rng([seed, zlib.crc32(hash.encode())]).integers(vocab_size, size=count).tolist()
    )
    return drawn


def replay(settings: Settings, requests: Sequence[LoggedRequest], run: Run) -> dict[str, Any]:
    """Return the figures of each peer and variant. A peer that does not run is named with the reason."""
    write_checkpoint(run.workdir / "model", settings.shape, settings.seed, sharp=True)
    due, left_out = slice_of(settings, requests)
    longest = max(request.num_tokens for request in due) + settings.answer
    known = _ingested(due, settings) if settings.ingested else []
    rows: dict[str, Any] = {}
    missing: dict[str, str] = {}
    config = settings.config(run.workdir / "model", settings.dtype, longest, 8)
    for name in settings.peers:
        variant = PEERS[name].variants[0]
        row = PEERS[name].labels()[variant]
        directory = run.workdir / row.replace(" ", "-")
        try:
            with PeerProcess(PEERS[name], settings.environments.resolve(), config, directory) as peer:
                peer.ask(variant, [{"passages": [[1] * 16], "suffix": [2]}], 2)
                if known:
                    peer.read(known)
                rows[row] = speeds_of(peer, variant, due, settings)
        except PeerError as error:
            missing[row] = str(error).replace(str(ROOT), ".")
    span_s = due[-1].at - due[0].at
    return {"rows": rows, "not_run": missing, "requests": len(due), "left_out": left_out, "span_s": span_s}


def speeds_of(peer: PeerProcess, variant: str, requests: Sequence[LoggedRequest], settings: Settings) -> dict[str, Any]:
    """Return a single asker's wait for the first token, the figures by speed, and the answers/s at TWICE that wait.

    A bisection looks for the speed at which the wait exceeds that limit. The answers/s are interpolated between speeds;
    below the slowest and above the fastest speed they are that speed's.
    """
    lengths = [request.num_tokens for request in requests]
    tokens = [max(1, min(request.output_tokens, settings.answer)) for request in requests]
    single = [
        peer.ask(variant, [prompt_of(request, settings, "alone")], count)[0]
        for request, count in zip(requests[:ALONE], tokens, strict=False)
    ]
    alone = _quantiles(single)
    limit_s = TWICE * alone["p95"]
    by_speed = dict[float, Any]()
    within, beyond = 0, len(settings.speeds)  # speeds[:within] keep the limit, speeds[beyond:] exceed it
    while within < beyond:
        speed = settings.speeds[middle := (within + beyond) // 2]
        at = [(request.at - requests[0].at) / speed for request in requests]
        _say(f"{peer.spec.name} {variant}: {len(requests)} requests in {at[-1]:.0f} s")
        prompts = [prompt_of(request, settings, f"{speed:g}") for request in requests]
        by_speed[speed] = row = replayed(peer.replay(variant, prompts, tokens, at), at, lengths)
        kept = row["first_s"]["p95"] <= limit_s
        within, beyond = (middle + 1, beyond) if kept else (within, middle)
    speeds = {f"{speed:g}": by_speed[speed] for speed in sorted(by_speed)}
    return {"alone_s": alone, "speeds": speeds, "at_twice": answers_at(speeds, limit_s)}


def answers_at(by_speed: Mapping[str, Any], limit_s: float) -> float:
    """Return the answers/s at which the 95th percentile of the time to the first token is `limit_s`, interpolated."""
    waits = np.maximum.accumulate([row["first_s"]["p95"] for row in by_speed.values()])
    return float(np.interp(limit_s, waits, [row["answers_per_s"] for row in by_speed.values()]))


def _ingested(requests: Sequence[LoggedRequest], settings: Settings) -> list[list[int]]:
    """Return the token ids of each passage of the requests, once."""
    parts = {part.hash: part for request in requests for part in request.parts if part.kind in REUSED}
    vocab_size = int(SHAPES[settings.shape]["vocab_size"])
    return [_ids(vocab_size, settings.seed, part.hash, part.num_tokens) for part in parts.values()]


def replayed(answers: Sequence[Answer], at: Sequence[float], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the figures of a replay. at: arrivals in seconds; lengths: tokens of the prompts

    behind_s: how far the replay fell behind: seconds from the last arrival to the last answer, less those of the
        fastest answer
    """
    ends = [start + answer.total_s for start, answer in zip(at, answers, strict=True)]
    return {
        "first_s": _quantiles(answers),
        "answers_per_s": len(answers) / max(ends),
        "found": sum(answer.reused for answer in answers) / sum(lengths),
        "behind_s": max(0.0, max(ends) - at[-1] - min(answer.total_s for answer in answers)),
    }


def _quantiles(answers: Sequence[Answer]) -> dict[str, float]:
    """Return quantiles of the seconds to the first token, by name ("p50")."""
    firsts = [answer.first_s for answer in answers]
    return {f"p{q}": float(np.percentile(firsts, q, method="inverted_cdf")) for q in QUANTILES}


def measure(settings: Settings, run: Run) -> Iterator[Result]:
    """Yield the counts of the whole log, then the result with the replay."""
    requests = list(read_log(settings.trace))
    if not requests:
        raise ConfigError(f"--trace {settings.trace}: there is no request in it")
    figures = count(settings, requests)
    yield run.result(figures=figures, goals=list(goals(figures)))
    if settings.requests:
        figures = {**figures, "replay": replay(settings, requests, run)}
        yield run.result(figures=figures, goals=list(goals(figures)), settings=replace(settings))


def goals(figures: Mapping[str, Any]) -> Iterator[Goal]:
    for row in figures["rooms"]:
        ours = row["policies"][next(iter(POLICIES))]
        if row["room"] == DECIDING_ROOM:
            found = ours["found"].get("passage", 0.0)
            yield Goal(f"passage tokens found, room for {DECIDING_ROOM:,}", "at least", 0.9, found, True)
            yield Goal("prompt tokens computed", "at most", 0.32, ours["computed"], True)
        if row["room"] == 200_000:
            yield Goal("passage tokens found, room for 200,000", "at least", 0.76, ours["found"]["passage"], True)
    rows = figures.get("replay", {}).get("rows", {})
    if {OURS_LIVE, "vllm"} <= set(rows):
        own, other = rows[OURS_LIVE], rows["vllm"]
        common = next(speed for speed in own["speeds"] if speed in other["speeds"])  # the middle one always is
        first, theirs = (row["speeds"][common]["first_s"]["p50"] for row in (own, other))
        yield Goal("p50 of the first token / vLLM's with prefix caching", "at most", 0.35, first / theirs, True, 1)
        share = own["at_twice"] / other["at_twice"]
        yield Goal("answers/s at twice one asker's first token / vLLM's", "at least", 2.5, share, True, 1)


def markdown(found: Mapping[str, Any]) -> list[str]:
    """Return the page of a result."""
    figures = found["figures"]
    tokens = figures["tokens"]
    total = sum(tokens.values())
    kinds = ", ".join(f"{kind} {count / total:.1%}" for kind, count in tokens.items())
    lines = ["# A week of a real service", "", where_line(found), ""]
    lines += [f"{figures['requests']:,} requests, {total:,} prompt tokens: {kinds}.", ""]
    lines += [
        "| room, tokens of passages | cache | system | passage | history | all tokens computed |",
        "|" + "---|" * 6,
    ]
    for row in figures["rooms"]:
        shown = {**{f"{OURS}, {name}": one for name, one in row["policies"].items()}, PREFIXES: row[PREFIXES]}
        for name, one in shown.items():
            shares = " | ".join(f"{one['found'].get(kind, 0):.2%}" for kind in ("system", "passage", "history"))
            lines.append(f"| {row['room']:,} | {name} | {shares} | {one['computed']:.2%} |")
        low, high = row["optimum"]
        lines.append(
            f"| {row['room']:,} | Belady's rule, and the bound of every policy | | {low:.2%} to {high:.2%} | | |"
        )
    lines += ["", *_replay_lines(figures["replay"], found["settings"])] if "replay" in figures else []
    held = figures["rooms"][-1]["policies"][next(iter(POLICIES))]["periods"][:: max(1, int(24 * 3600 / SIX_HOURS_S))]
    lines += ["", f"Held with room for {figures['rooms'][-1]['room']:,}, at {BYTES_PER_TOKEN:,} bytes a token:", ""]
    lines += ["| hours | memory, GB | disk, GB | computed in these six hours |", "|---|---|---|---|"]
    for one in held:
        sizes = " | ".join(f"{one[tier] * BYTES_PER_TOKEN / 1e9:.1f}" for tier in ("memory_tokens", "disk_tokens"))
        lines.append(f"| {one['hours']:.0f} | {sizes} | {one['computed']:.1%} |")
    return [*lines, "", *goal_lines(found)]


def _replay_lines(replay: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{replay['requests']} requests that the log has in {replay['span_s']:.0f} s, {settings['shape']}, "
        f"{settings['dtype']}; {replay['left_out']} were too long for the shape. Passages "
        f"{'were' if settings['ingested'] else 'were not'} read beforehand. Seconds to the first token; alone: "
        f"{min(ALONE, replay['requests'])} requests one after another. A bisection chose the speeds, to find where p95 "
        "exceeds twice that of alone."
    )
    yield ""
    yield "| replayed by | times as fast | tokens found | p50, s | p95 | p99 | answers/s | behind at the end, s |"
    yield "|" + "---|" * 8
    for name, row in replay["rows"].items():
        yield f"| {name} | alone | | {_seconds(row['alone_s'])} | {row['at_twice']:.2f} at twice p95 | |"
        for speed, one in row["speeds"].items():
            figures = f"{_seconds(one['first_s'])} | {one['answers_per_s']:.2f} | {one['behind_s']:.1f}"
            yield f"| {name} | {speed} | {one['found']:.1%} | {figures} |"
    for name, why in replay["not_run"].items():
        yield f"| {name} | not run: {why} | | | | | | |"


def _seconds(first_s: Mapping[str, float]) -> str:
    return " | ".join(f"{seconds:.2f}" for seconds in first_s.values())


def _say(what: str) -> None:
    print(f"week: {what}", file=sys.stderr, flush=True)
