"""Prometheus's figures against the answers that they count, and the log, which names no text."""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_texts import TEXTS
from serving import Served, figures, send, wait_for

import ragcache as rc
from ragcache.server import metrics as metrics_module
from ragcache.server.observe import JsonFormatter

QUESTION = "Where does the cat sit, xylophone?"


def test_time_to_the_first_token_by_phase_and_method(served: Served):
    answers = [served.chat(QUESTION, max_tokens=2, ragcache={"method": method}).json() for method in ("full", "epic")]
    found = figures(served)
    for answer in answers:
        extension = answer["ragcache"]
        method, times = extension["method"], dict(extension["timings"])
        times.pop("total_s")
        times["total_s"] = times.pop("ttft_s")
        for name, seconds in times.items():
            phase = name.removesuffix("_s")
            assert found["ragcache_ttft_seconds_count", method, phase] == 1
            assert found["ragcache_ttft_seconds_sum", method, phase] == pytest.approx(seconds)


def test_the_estimate_of_a_full_prefill_needs_a_full_read(served: Served):
    """Nothing is claimed at the start; then what the server has read in full says so, and how often."""
    extension = served.chat(QUESTION, max_tokens=1).json()["ragcache"]
    assert (extension["full_prefill_estimate_s"], extension["full_prefill_samples"]) == (None, 0)
    told = {"documents": [{"text": " ".join(f"word{number}" for number in range(200))}], "method": "full"}
    told["method_options"] = {"reuse": False}
    extension = served.chat(QUESTION, ragcache=told, max_tokens=1).json()["ragcache"]
    assert extension["full_prefill_samples"] == 1
    assert 0 < extension["full_prefill_estimate_s"] < 60
    assert list(extension)[:4] == ["sources", "prompt_tokens", "computed_tokens", "created_tokens"]


def test_waiting_for_a_slot_is_time_to_the_first_token(serve):
    """What the client sees counts, from the request's arrival, and not what is left of it once there is a slot."""
    served = serve(slots=1)
    endless = {"max_tokens": 4000, "ragcache": {"retrieve": False}}
    with served.stream("Cats?", **endless) as running, ThreadPoolExecutor() as pool:
        lines = running.iter_lines()  # let go of, it would close the stream
        next(lines)
        began = time.perf_counter()
        waiting = pool.submit(served.chat, QUESTION, max_tokens=1)
        wait_for(lambda: served.service.slots.waiting == 1)
        time.sleep(0.5)
        running.close()
        timings = waiting.result().json()["ragcache"]["timings"]
        took = time.perf_counter() - began
    assert 0.5 <= timings["queue_s"] < timings["ttft_s"] <= timings["total_s"] <= took
    found = figures(served)
    for phase, name in (("queue", "queue_s"), ("total", "ttft_s")):
        assert found["ragcache_ttft_seconds_sum", "reposition", phase] == pytest.approx(timings[name], abs=1e-3)


def test_hits_and_misses_by_tier(served: Served, kb):
    first = served.chat(QUESTION, max_tokens=1, ragcache={"k": 2}).json()  # from disk
    assert [source["kv"] for source in first["ragcache"]["sources"]] == ["disk", "disk"]
    served.chat(QUESTION, max_tokens=1, ragcache={"k": 3})  # two from memory
    new = {"documents": [{"text": "Not stored."}]}
    served.chat(QUESTION, max_tokens=1, ragcache=new)  # computed
    served.chat(QUESTION, max_tokens=1, ragcache={"k": 4, "method": "full"})  # reads no block
    found = figures(served)
    assert found["ragcache_kv_hits_total", "disk"] == 3
    assert found["ragcache_kv_hits_total", "memory"] == 2
    assert found["ragcache_kv_misses_total", "memory"] == 4
    assert found["ragcache_kv_misses_total", "disk"] == 1


def test_tokens(served: Served):
    answers = [served.chat(question, max_tokens=3).json() for question in (QUESTION, "Dogs?")]
    found = figures(served)
    for kind, count in (
        ("prompt", lambda answer: answer["usage"]["prompt_tokens"]),
        ("completion", lambda answer: answer["usage"]["completion_tokens"]),
        ("cached", lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"]),
        ("computed", lambda answer: answer["ragcache"]["computed_tokens"]),
        ("created", lambda answer: answer["ragcache"]["created_tokens"]),
    ):
        assert found["ragcache_tokens_total", kind] == sum(map(count, answers))


def test_requests_by_route_and_status(served: Served):
    served.chat(QUESTION, max_tokens=1)
    served.chat(QUESTION, n=0)
    served.http.get("/v1/documents/cats")
    served.http.get("/v1/documents/nobody")
    served.http.get("/no/such/route")
    served.http.request("BREW", "/v1/store")
    found = figures(served)
    assert found["ragcache_http_requests_total", "POST", "/v1/chat/completions", "200"] == 1
    assert found["ragcache_http_requests_total", "POST", "/v1/chat/completions", "400"] == 1
    assert found["ragcache_http_requests_total", "GET", "/v1/documents/{id:path}", "200"] == 1
    assert found["ragcache_http_requests_total", "GET", "/v1/documents/{id:path}", "404"] == 1
    assert found["ragcache_http_requests_total", "GET", "other", "404"] == 1
    assert not any("BREW" in name or "nobody" in name for key in found for name in key)
    assert found["ragcache_http_request_seconds_count", "/v1/chat/completions"] == 2


def test_the_store(served: Served, kb):
    found = figures(served)
    info = kb.info()
    assert found["ragcache_store_bytes", "disk"] == info.bytes_by_tier["disk"] > 0
    assert found["ragcache_store_size", "documents"] == len(TEXTS)
    assert found["ragcache_store_size", "tokens"] == info.tokens
    assert found["ragcache_slots",] == 8


FERRY = (
    "A ferry goes from Brenholm to the island every second hour, but not on Sundays, when its captain rests at home."
)


def test_kv_of_no_document(serve, kb):
    """As it is kept, and evicted for want of room; and a prompt's source names the user's own document."""
    report = kb.precompute(rc.Document("ferry#2", FERRY, {"page_label": "4", "title": "Ferries"}, source="ferry.pdf"))
    served = serve(figures_s=0)
    found = figures(served)
    assert found["ragcache_foreign_passages", "kept"] == 1
    assert found["ragcache_foreign_passages", "evicted"] == 0
    assert found["ragcache_foreign_bytes", "passages"] == report.kv_bytes > 0
    assert found["ragcache_foreign_bytes", "budget"] == 10 << 30
    answer = served.chat(f"{FERRY}\n\nWhen?", max_tokens=1, ragcache={"retrieve": False}).json()
    [source] = answer["ragcache"]["sources"]
    assert {name: source[name] for name in ("chunk_id", "document_id", "title", "source", "place")} == {
        "chunk_id": "ferry#2",
        "document_id": "ferry.pdf",
        "title": "Ferries",
        "source": "ferry.pdf",
        "place": "p. 4",
    }
    kb.store.kv.foreign.delete(report.handles[0])  # as the budget does
    found = figures(served)
    assert (found["ragcache_foreign_passages", "kept"], found["ragcache_foreign_passages", "evicted"]) == (0, 1)
    assert found["ragcache_foreign_bytes", "evicted"] > 0


def test_scrapes_do_not_walk_the_disk(serve, monkeypatch):
    served = serve(figures_s=1000)
    figures(served)
    monkeypatch.setattr(served.service.kb, "info", None)
    figures(served)
    served.http.get("/v1/store").raise_for_status()


@pytest.fixture
def lines(caplog) -> Callable[[], list[dict]]:
    """Return a function that reads the server's log as it is written."""
    caplog.set_level(logging.INFO, "ragcache.server")
    written = JsonFormatter().format
    return lambda: [json.loads(written(one)) for one in caplog.records if one.name.startswith("ragcache.server")]


BODIES = [
    ("/v1/chat/completions", "application/json"),
    ("/v1/embeddings", "application/json"),
    ("/v1/documents", "application/json"),
    ("/v1/documents", "multipart/form-data; boundary=x"),
]


def test_a_client_that_hangs_up_within_its_body_is_no_failure(served: Served, lines):
    """499 as nginx counts it, and no trace: nothing here has failed."""
    for number, (route, kind) in enumerate(BODIES):
        with send(served, route, b"--x\r\n", kind, length=100_000):
            time.sleep(0.2)
        wait_for(lambda number=number: len(lines()) > number)
        assert [lines()[number][name] for name in ("event", "level", "route", "status")] == [
            "request",
            "info",
            route,
            499,
        ]
    counted = figures(served)
    assert counted["ragcache_http_requests_total", "POST", "/v1/embeddings", "499"] == 1
    assert counted["ragcache_http_requests_total", "POST", "/v1/documents", "499"] == 2


def test_a_line_a_request(served: Served, lines, caplog):
    for stream in (False, True):
        caplog.clear()
        answer = served.chat(QUESTION, max_tokens=3, stream=stream)
        wait_for(lines)
        (line,) = lines()
        assert line["request_id"] == answer.headers["x-request-id"]
        assert (line["event"], line["level"]) == ("request", "info")
        assert (line["route"], line["method"], line["status"]) == ("/v1/chat/completions", "POST", 200)
        assert line["usage"]["completion_tokens"] == 3
        assert 0 < line["timings"]["ttft_s"] <= line["seconds"]
        assert line["fusion"] == "reposition"


def test_the_log_holds_no_text_and_no_key(serve, lines, kb, monkeypatch):
    served = serve(api_keys=["secret-key"])
    served.http.headers["Authorization"] = "Bearer secret-key"
    served.chat(QUESTION, max_tokens=3)
    served.chat(QUESTION, max_tokens=3, stream=True)
    served.chat(QUESTION, ragcache={"filter": {"xylophone": "xylophone"}})
    served.chat(QUESTION, ragcache={"documents": [{"text": "xylophone"}]}, max_tokens=1)
    served.http.post("/v1/documents", json={"documents": [{"id": "x", "text": "xylophone " * 9}]})
    served.http.post("/v1/documents", files=[("files", ("a.txt", b"xylophone"))])
    served.http.post("/v1/embeddings", json={"model": "bag-of-words", "input": "xylophone"})
    served.http.get("/v1/documents/xylophone")
    served.http.get("/v1/models", headers={"Authorization": "Bearer xylophone"})

    def broken(*_args: object, **_options: object) -> None:
        raise ValueError(f"cannot read {TEXTS['cats']} xylophone")

    monkeypatch.setattr(kb.lm, "run", broken)
    monkeypatch.setattr(kb.embedder, "embed_query", broken)
    failed = served.chat(QUESTION)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "internal_error"
    wait_for(lambda: len(lines()) >= 11)
    whole = json.dumps(lines())
    assert "xylophone" not in whole
    assert "cat sat" not in whole
    assert "secret-key" not in whole
    assert failed.headers["x-request-id"] in whole
    (failure,) = [line for line in lines() if line["event"] == "failure"]
    assert failure["error"] == "ValueError"
    assert any("broken" in step for step in failure["trace"])


def test_a_failure_in_mid_stream_is_told_in_the_stream(served: Served, kb, lines, monkeypatch):
    whole, passes = kb.lm.scheduler.forward, []

    def forward(pieces):
        passes.append(1)
        if len(passes) > 2:
            raise ValueError("no more xylophone")
        return whole(pieces)

    monkeypatch.setattr(kb.lm.scheduler, "forward", forward)
    answer = served.chat(QUESTION, max_tokens=9, stream=True)
    assert answer.status_code == 200
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
    assert last["error"]["code"] == "internal_error"
    assert "xylophone" not in answer.text.partition('"ragcache"')[2].partition("error")[2]
    wait_for(lambda: len(lines()) == 2)
    assert lines()[-1]["error"] == "internal_error"


def test_the_prefix_tree(served: Served):
    options = {"method": "full", "k": 2}
    answers = [served.chat(QUESTION, max_tokens=1, ragcache=options).json() for _ in range(2)]
    found = figures(served)
    prompts = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
    assert found["ragcache_prefix_tokens_total", "asked"] == prompts
    assert found["ragcache_prefix_tokens_total", "matched"] >= cached > 0
    assert found["ragcache_prefix_tokens_total", "evicted"] == 0
    assert found["ragcache_prefix_bytes",] > 0


def test_waits_tokens_memory_and_keys_are_measured(serve, caplog):
    caplog.set_level(logging.INFO, "ragcache.server")
    served = serve(api_keys=("alice-secret", "bob-secret"), open_metrics=True)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Cats?"}], "max_tokens": 6}
    for key, count in (("alice-secret", 2), ("bob-secret", 1)):
        for _ in range(count):
            headers = {"Authorization": f"Bearer {key}"}
            assert served.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    found = figures(served)
    ids = {key: hashlib.sha256(key.encode()).hexdigest()[:8] for key in ("alice-secret", "bob-secret")}
    assert found["ragcache_key_requests_total", ids["alice-secret"]] == 2
    assert found["ragcache_key_requests_total", ids["bob-secret"]] == 1
    assert found["ragcache_key_tokens_total", ids["bob-secret"]] > 6
    assert found["ragcache_queue_wait_seconds_count",] == 3
    assert found["ragcache_inter_token_seconds_count",] > 3
    assert found["ragcache_process_resident_memory_bytes",] > 1 << 20
    logged = [record.fields for record in caplog.records if record.msg == "request"]
    assert [one["key"] for one in logged if "key" in one] == [ids["alice-secret"]] * 2 + [ids["bob-secret"]]
    assert "alice-secret" not in str([record.__dict__ for record in caplog.records])


def test_the_dashboard_and_the_alarms_name_metrics_that_exist(shared: Served):
    root = Path(__file__).parents[2]
    dashboard = json.loads((root / "deploy" / "grafana.json").read_text())
    alarms = (root / "docs" / "operating.md").read_text()
    text = shared.http.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    used = {name for one in (*expressions, alarms) for name in re.findall(r"\bragcache_\w+", one)}
    for name in used:
        assert name in kinds or kinds.get(name.removesuffix("_bucket")) == "histogram", name
    groups = [group for one in expressions for group in re.findall(r"by \(([^)]*)\)", one)]
    labels = {label for group in groups for label in group.split(", ")}
    source = Path(metrics_module.__file__).read_text()
    assert all(f'"{label}"' in source for label in labels - {"le"})
