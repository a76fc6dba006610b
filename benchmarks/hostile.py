"""Attacks on a server on loopback: the effect of each attack before there was a defence, and now.

    python -m benchmarks hostile
    python -m benchmarks hostile --set seconds=60 --set crowd=100

The server is a separate process, `ragcache serve` with two API keys and default limits. The figures in `BEFORE` were
measured at commit ba45c45c. All attacks together take about two minutes, and open at most 1,200 connections at once.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import socket
import statistics
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

import ragcache as rc
from benchmarks.report import Goal, Result
from benchmarks.runner import Run
from benchmarks.served import ServedStore, bearer
from benchmarks.timing import Ratio, Variant, alternate, ratio
from ragcache.engine.keys import Key

ALICE, BOB = "alice-of-the-benchmark", "bob-of-the-benchmark"
BEFORE = {
    "half headers: /healthz p99, ms": "no answer for a minute",
    "half headers: log, bytes": "548 MB in 62 s",
    "half-open connections left after 12 s": "300 of 300",
    "question of 3.9 MB: seconds to its refusal": "30.7",
    "another key among a crowd / alone": "110",
    "sheet of a few KB: tokens whose KV is computed": "147,857",
    "4 MB of one character: seconds to its refusal": "200",
    "a change while a file is read: seconds": "120",
    "schema of 250 KB: /healthz p99, ms": "1300",
    "requests beyond a key's rate that are answered": "all",
}
BY_KEY = "first token by a key / without keys, processor time"
LIMITS = (100, 1_000_000, 0, 0.2, 3, 0, 10, 2, 100, 0)


@dataclass(frozen=True)
class Settings:
    """seconds: duration of the attack by half headers. crowd: questions of a single key at once. halves, open:
    connections of the attacks by half headers and by half-open connections

    rounds: pairs of questions, by a key and without keys
    """

    seconds: float = 20.0
    crowd: int = 100
    halves: int = 1200
    open: int = 300
    rounds: int = 400


class Server(ServedStore):
    """A server with two API keys."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, *options, key=BOB, RAGCACHE_API_KEYS=f"{ALICE},{BOB}")
        host, port = self.url.removeprefix("http://").split(":")
        self.address = host, int(port)

    def ask(self, key: str, question: str, **fields: Any) -> tuple[int, float]:
        """Return the status and the seconds of a question."""
        body = {"model": self.model, "messages": [{"role": "user", "content": question}], "max_tokens": 16, **fields}
        with httpx.Client(timeout=300, trust_env=False, verify=False) as http:
            started = time.perf_counter()
            status = http.post(f"{self.url}/v1/chat/completions", json=body, headers=bearer(key)).status_code
        return status, time.perf_counter() - started

    def add(self, key: str, **content: Any) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        report = httpx.post(f"{self.url}/v1/documents", headers=bearer(key), timeout=300, trust_env=False, **content)
        return report.json(), time.perf_counter() - started


@contextmanager
def probing(server: Server, times: list[float]) -> Iterator[None]:
    """Ask /healthz every 20 ms on a new connection, and append the milliseconds of each answer; 10,000 for none.

    It asks by a bare socket, because making an HTTP client takes longer than the server takes to answer.
    """
    over = threading.Event()
    request = f"GET /healthz HTTP/1.1\r\nHost: {server.address[0]}\r\nConnection: close\r\n\r\n".encode()

    def probe() -> None:
        while not over.wait(0.02):
            started = time.perf_counter()
            try:
                with socket.create_connection(server.address, timeout=10) as client:
                    client.sendall(request)
                    is_well = client.recv(64).startswith(b"HTTP/1.1 200")
            except OSError:
                is_well = False
            times.append(1000 * (time.perf_counter() - started) if is_well else 10_000.0)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def processor_s(server: Server) -> float:
    """Return the processor time that the server has used, which other work on the machine does not change."""
    stat = Path(f"/proc/{server.process.pid}/stat")
    if not stat.exists():  # not on Linux
        return math.nan
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]


def quiet(server: Server) -> float:
    """Return the p99 of /healthz without an attack."""
    times: list[float] = []
    with probing(server, times):
        time.sleep(5)
    return p99(times)


def half(server: Server, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.create_connection(server.address, timeout=10))
    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127")
    return client


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def half_headers(server: Server, settings: Settings) -> tuple[float, int]:
    """Keep `halves` connections with half a header open, and replace each that the server closes.

    Returns the p99 of /healthz in milliseconds, and the bytes that the server's log has grown by.
    """
    before, times = server.log.stat().st_size, list[float]()
    until = time.monotonic() + settings.seconds
    with ExitStack() as stack, probing(server, times):
        clients = [half(server, stack) for _ in range(settings.halves)]
        while time.monotonic() < until:
            for rank, client in enumerate(clients):
                if not is_open(client):
                    client.close()
                    with suppress(OSError):
                        clients[rank] = half(server, stack)
            time.sleep(0.2)
    return p99(times), server.log.stat().st_size - before


def left_open(server: Server, settings: Settings) -> int:
    with ExitStack() as stack:
        clients = [half(server, stack) for _ in range(settings.open)]
        time.sleep(12)
        return sum(map(is_open, clients))


def crowded(server: Server, settings: Settings) -> float:
    alone = statistics.median(server.ask(BOB, f"Who is in club {rank}?")[1] for rank in range(7))
    with ThreadPoolExecutor(settings.crowd) as pool:
        crowd = [pool.submit(server.ask, ALICE, f"Where is club {rank}?") for rank in range(settings.crowd)]
        time.sleep(alone)
        among = list[float]()
        while len(among) < 7 and not all(one.done() for one in crowd):
            among.append(server.ask(BOB, f"Who was in club {len(among)}?")[1])
    return statistics.median(among) / alone


def sheet() -> bytes:
    """Return a workbook of a few kilobytes whose 900 cells show one long shared string."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    relations = "http://schemas.openxmlformats.org/package/2006/relationships"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kinds = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    cells = "".join(f'<row r="{row}"><c r="A{row}" t="s"><v>0</v></c></row>' for row in range(1, 901))
    parts = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kinds}.sheet.main+xml"/>'
        f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kinds}.sharedStrings+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kinds}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{relations}"><Relationship Id="r1" Type="{office}/officeDocument" '
        'Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets><sheet name="a" sheetId="1" '
        'r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{relations}"><Relationship Id="r1" '
        f'Type="{office}/worksheet" Target="worksheets/sheet1.xml"/><Relationship Id="r2" '
        f'Type="{office}/sharedStrings" Target="sharedStrings.xml"/></Relationships>',
        "xl/sharedStrings.xml": f'<sst xmlns="{main}"><si><t>{"river town mill " * 60}</t></si></sst>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{cells}</sheetData></worksheet>',
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return made.getvalue()


def while_reading(server: Server) -> float:
    """Return the seconds of a small change while a large file of nested tags is read."""
    nested = b"<div>" * 400_000 + b"deep" + b"</div>" * 400_000
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.add, ALICE, files={"files": ("nested.html", nested)})
        time.sleep(0.5)
        _, seconds = server.add(BOB, json={"documents": [{"id": "small", "text": "A dog barks at birds."}]})
        reading.result()
    return seconds


def schema(server: Server) -> float:
    fields, times = {f"f{rank}": {"enum": [f"v{rank}_{n}" for n in range(20)]} for rank in range(900)}, list[float]()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": fields}}}
    with probing(server, times):
        server.ask(ALICE, "Who?", response_format=form)
        time.sleep(0.5)
    return p99(times)


def by_key(folder: Path, rounds: int) -> Ratio:
    """Return the processor time to the first token by a key of a single collection, over the time without keys."""
    with rc.RagCache.open(folder, method="reposition") as kb:
        kb.ingest(
            rc.Document(f"d{rank}", f"The club {rank} meets in the old mill at noon. " * 30) for rank in range(30)
        )
        own = frozenset(["default"])
        views = {"none": kb, "key": kb.as_key(Key("key", reads=own, writes=own))}
        asked = itertools.count()

        def ask(name: str) -> dict[str, float]:
            started = time.process_time()
            views[name].ask(f"Where is club {next(asked)}?", k=8, sampling=rc.Sampling(max_tokens=1))
            return {f"{name}, processor": time.process_time() - started}

        samples = alternate([Variant(name, partial(ask, name)) for name in views], rounds, 0, torch.device("cpu"))
        return ratio(samples, "key, processor", "none, processor")


def measure(settings: Settings, run: Run) -> Result:
    found: list[float] = []
    figures: dict[str, Any] = {f"before: {attack}": said for attack, said in BEFORE.items()}
    keys = by_key(run.workdir / "keys", settings.rounds)
    with rc.RagCache.open(run.workdir / "kb") as kb:
        kb.ingest(rc.Document("clubs", "The heron club meets in the old mill. " * 20))
    server = Server(run.workdir)
    try:
        alone = quiet(server)
        figures["/healthz p99 without an attack, ms"] = alone
        before = processor_s(server)
        found += half_headers(server, settings)
        figures["half headers: processor seconds of the server"] = processor_s(server) - before
        found.append(left_open(server, settings))
        before = processor_s(server)
        long = [server.ask(ALICE, "Who was it? " * 325_000) for _ in range(5)]
        figures["question of 3.9 MB: processor seconds of the server"] = (processor_s(server) - before) / len(long)
        found.append(statistics.median(seconds if status == 400 else math.inf for status, seconds in long))
        found.append(crowded(server, settings))
        report, _ = server.add(ALICE, files={"files": ("sheet.xlsx", sheet())})
        found.append(report["tokens"])
        report, seconds = server.add(ALICE, json={"documents": [{"id": "a", "text": "a" * 4_000_000}]})
        found.append(seconds if report["failed"] else math.inf)
        found.append(while_reading(server))
        found.append(schema(server))
    finally:
        server.close()
    limited = Server(run.workdir, "--key-requests", "5")
    try:
        limited.model = server.model
        statuses = [limited.http.get("/v1/models", headers=bearer(ALICE)).status_code for _ in range(10)]
        found.append(statuses.count(200) - 5)
    finally:
        limited.close()
    rows = dict(zip(BEFORE, found, strict=True))
    print("| attack | before | after |\n|---|---|---|")
    for attack, measured in rows.items():
        print(f"| {attack} | {BEFORE[attack]} | {measured:.4g} |")
    # If other work takes the processors, the server answers more slowly without an attack, too.
    bounds = [max(most, 2 * alone) if "p99" in attack else most for attack, most in zip(BEFORE, LIMITS, strict=True)]
    goals = [Goal(attack, "at most", most, rows[attack], True) for attack, most in zip(BEFORE, bounds, strict=True)]
    # Processor time does not depend on the load, so the goal has no pairs.
    goals.append(Goal(BY_KEY, "at most", 1.02, keys.median, True, low=keys.low, high=keys.high))
    return run.result(figures=figures, goals=goals, ratios={BY_KEY: keys})


def failed(result: Result) -> bool:
    """Return whether an attack had more effect than its goal allows."""
    return not all(goal.within for goal in result.goals)
