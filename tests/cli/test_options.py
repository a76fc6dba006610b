"""Environment variables, exit statuses, and what goes to which stream; `ragcache serve` and `ragcache chat --web` as
processes: addresses, keys, signals, and options that are refused."""

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import forked
import httpx
import pytest
import typer
from fastapi import FastAPI
from fastapi.testclient import TestClient
from terminal import NAMES, invoke, names
from typer.testing import CliRunner

import ragcache as rc
from ragcache.__main__ import main
from ragcache.cli.commands import COMMANDS, build_app
from ragcache.cli.flags import StoreOptions
from ragcache.cli.terminal import bytes_text, command, printable, seconds_text, size
from ragcache.engine.options import AnswerOptions, StoreConfig
from ragcache.errors import ConfigError, StoreBusyError
from ragcache.models.hub import resolve
from ragcache.server.auth import LOOPBACK
from ragcache.server.run import listen
from ragcache.server.settings import ServerSettings

ENVIRONMENT_PAGE = (
    (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8").partition("## Environment")[2]
)


def all_options() -> Iterator[tuple[str, object]]:
    for name, one in typer.main.get_command(build_app()).commands.items():
        for parameter in one.params:
            if parameter.param_type_name == "option" and "--help" not in parameter.opts:
                yield name, parameter


def test_the_environment_holds_what_a_deployment_sets():
    """The documented variables are those that the commands read, under the option's own name; RAGCACHE_STORE must not
    lead the demo into a store of the user's."""
    found, documented = set(), re.findall(r"`([A-Z_]+)`", ENVIRONMENT_PAGE.split("|---|---|")[1].split("Secrets")[0])
    for name, parameter in all_options():
        flag = next(opt for opt in parameter.opts if opt.startswith("--"))
        plain = flag.removeprefix("--").replace("-", "_").upper()
        assert parameter.envvar in (None, f"RAGCACHE_{plain}"), (name, flag)
        assert parameter.envvar is None or (name, plain) != ("demo", "STORE")
        found |= {plain} if parameter.envvar else set()
    assert {name for name, _ in all_options()} == set(COMMANDS)
    assert found == set(documented)
    assert len(found) <= 40


def test_the_environment_stands_for_options_that_are_not_given(store):
    result = invoke("list", "--json", env={"RAGCACHE_STORE": str(store)})
    assert result.exit_code == 0, result.output
    assert names(document["id"] for document in json.loads(result.stdout)["documents"]) == NAMES
    result = invoke("list", "--store", store, "--json", env={"RAGCACHE_STORE": "/nowhere"})
    assert names(document["id"] for document in json.loads(result.stdout)["documents"]) == NAMES


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["ask", ""], 1, "the question is empty"),
        (["ingest", "docs", "--ray-actors", "2"], 2, "needs --ray"),
        (["ingest", "--ray", "docs/", "more"], 2, "'docs/' is not HOST:PORT"),
        (["ingest", "docs", "--ray", "local", "--ray-actors", "0"], 2, "actors is 0"),
        (["ask", "hi", "--k", "0"], 2, "k is 0"),
        (["ask", "hi", "--method", "telepathy"], 2, "telepathy"),
        (["ask", "hi", "--method", "link"], 2, "no trained link tokens"),
        (["ask", "hi", "--method", "link", "--option", "link-tokens=many"], 2, "'many'"),
        (["ask", "hi", "--method", "link", "--option", "colour=red"], 2, "has no option colour"),
        (["ask", "hi", "--method", "link", "--option", "link_tokens"], 2, "NAME=VALUE"),
        (["ask", "hi", "--option", "ratio=0.15"], 2, "needs --method"),
        (["ask", "hi", "--filter", "{"], 2, "not JSON"),
        (["ask", "hi", "--filter", "[]"], 2, "not a JSON object"),
        (["ask", "hi", "--filter", '{"year": {"$near": 1}}'], 1, "$near"),
        (["ask", "hi", "--temperature", "-1"], 2, "temperature"),
        (["ask", "hi", "--model", "/no/such/model"], 1, "/no/such/model"),
        (["ask", "hi", "--embedder", "contriever"], 1, "contriever"),
        (["ask", "hi", "--dtype", "int3"], 2, "int3"),
        (["ask", "hi", "--device", "abacus"], 2, "abacus"),
        (["list", "--database", "nonsense://"], 2, "nonsense"),
        (["info", "--eviction", "random"], 2, "hyperbolic, lru"),
        (["info", "--admission", "bouncer"], 2, "all, tinylfu"),
        (["serve", "--filter", "{"], 2, "not JSON"),
        (["serve", "--port", "0", "--timeout", "0"], 2, "timeout_s"),
        (["serve", "--port", "0", "--temperature", "-1"], 2, "temperature"),
        (["serve", "--port", "0", "--api-keys-file", "/no/such/file"], 2, "/no/such/file"),
        (["serve", "--port", "0", "--slots", "0"], 2, "slots"),
        (["serve", "--port", "0", "--host", "0.0.0.0"], 2, "API keys are needed"),
    ],
)
def test_errors_are_one_line(store, arguments, status, message):
    result = invoke(*arguments, "--store", store)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--max_tokens", "--max-tokens"),
        ("--top_k", "--k, --top-k"),
        ("--n-predict", "--max-tokens"),
        ("--temp", "--temperature"),
        ("--similarity-top-k", "--k"),
        ("--model-name", "--model"),
    ],
)
def test_a_wrong_option_is_told_the_right_one(wrong, right):
    result = invoke("ask", "hi", wrong, "3")
    assert result.exit_code == 2
    assert f"No such option: {wrong} (Possible options: {right})" in result.stderr


MISUSED = [
    (["ingest", "docs", "--store", "/no/where", "--kv-kept", "1.5"], "above 0"),
    (["ingest", "docs", "--store", "/no/where", "--kv-task", "names"], "--kv-kept"),
    (["list", "--memory", "3 apples"], "apples"),
    (["ask"], "question"),
    (["ask", "x", "--on-overflow", "cry"], "cry"),
    (["serve", "--max-body", "3 apples"], "apples"),
    (["serve", "--port", "65536"], "--port"),
    (["serve", "--port", "0", "--host", "nowhere.invalid", "--store", "/no/where"], "nowhere.invalid"),
]


@pytest.mark.parametrize(("arguments", "word"), MISUSED)
def test_misuse_has_status_2(arguments, word):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout, word in result.stderr) == (2, "", True), result.stderr


def test_the_error_tree_becomes_exit_statuses():
    app = typer.Typer()

    @app.command()
    @command
    def act(kind: str) -> None:
        raise {"config": ConfigError, "busy": StoreBusyError, "key": KeyboardInterrupt, "bug": ZeroDivisionError}[kind](
            "first\n second"
        )

    results = {kind: CliRunner().invoke(app, [kind]) for kind in ("config", "busy", "key", "bug")}
    assert {kind: result.exit_code for kind, result in results.items()} == {
        "config": 2,
        "busy": 1,
        "key": 130,
        "bug": 1,
    }
    assert results["busy"].stderr == "error: first second\n"
    assert isinstance(results["bug"].exception, ZeroDivisionError)  # a bug keeps its traceback


def test_writers_wait_as_long_as_they_are_told(store):
    from ragcache.store.directory import StoreLayout

    with StoreLayout(store).writer():
        started = time.monotonic()
        result = invoke("delete", "arno", "--store", store, "--wait", "0.2")
        assert time.monotonic() - started < 20
    assert result.exit_code == 1
    assert "another process" in result.stderr


def test_a_real_process_keeps_json_clean_and_dies_quietly(store):
    # By full prefill: on a slow machine the model's own default says that nobody has checked it.
    question = ("ask", "Cat?", "--store", store, "--method", "full", "--max-tokens", 2, "--json")
    done = forked.run(forked.COMMAND, *question, env=_environment())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hits"]
    assert done.stderr == ""  # not a terminal: no bars


# A shell starts its background jobs with SIGINT ignored, and they pass that on.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + forked.COMMAND


def test_an_interrupt_ends_with_status_130(store):
    chat = ("chat", "--store", store, "--method", "full", "--max-tokens", 1)
    with forked.Forked(INTERRUPTIBLE, *chat, env=_environment()) as process:
        process.stdin.write("Dogs?\n")
        while "read by" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        assert process.stdout.readline() == "\n"  # the next question is waited for
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().splitlines() == ["error: interrupted; what was stored stays"]
        assert process.wait() == 130


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAGCACHE_")}


@pytest.mark.parametrize(
    ("text", "count"), [("17", 17), ("2GiB", 2**31), ("1.5 KiB", 1536), ("3mb", 3 * 10**6), (64, 64), ("0", 0)]
)
def test_sizes(text, count):
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 parsecs", "nan"])
def test_no_sizes(text):
    with pytest.raises(typer.BadParameter, match="is not a size"):
        size(text)


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\tc\nd\udcff") == "a\\x1b[2Jb\tc\nd\\udcff"
    assert printable("Ärger 好 🙂") == "Ärger 好 🙂"


def test_units():
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 * 2**30, 3 * 2**40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0.0123, 1.5)] == ["12.3 ms", "1.50 s"]


# The engine's options by other names on the command line; Ctrl-C cancels.
ELSEWHERE = {"method_options": ["option"], "cancelled": [], "sampling": ["seed", "max_tokens"]}


@pytest.mark.parametrize("name", ["ask", "chat", "serve"])
def test_no_option_of_the_engine_is_absent(name):
    known = {*rc.GenerationOptions.__annotations__, *rc.RetrieveOptions.__annotations__, "k"}
    wanted = {given for one in known for given in ELSEWHERE.get(one, [one])}
    found = {parameter.name for command, parameter in all_options() if command == name}
    assert wanted <= found
    assert ("context" in found) == (name != "ask")


def test_options_reach_the_engine():
    given = {
        "search": "hybrid",
        "mmr_lambda": 0.5,
        "fetch_k": 9,
        "rerank": True,
        "score_threshold": 0.1,
        "order": "shared",
        "hint": False,
        "reasoning_effort": "low",
        "enable_thinking": True,
        "thinking_budget": 7,
    }
    told = {"filter": {"year": 2024}, "chat_template_kwargs": {"a": 1}}
    options = AnswerOptions(k=3, seed=4, max_tokens=7, on_overflow="trim", **given, **told).call_options()
    assert options == {**given, **told, "k": 3, "on_overflow": "trim", "sampling": rc.Sampling(seed=4, max_tokens=7)}
    assert AnswerOptions().call_options()["sampling"].max_tokens is None, "answers end by themselves"


def test_options_of_every_kind_are_read_into_a_group():
    """A size, JSON, several texts, a choice, a flag: as the fields' types are, and their defaults else."""
    app, found = typer.Typer(), []

    @app.command()
    @command
    def act(store: StoreOptions, answer: AnswerOptions) -> None:
        found.append((store, answer))

    told = "--memory 3GiB --load never --stop a --stop b --no-hint --filter {}"
    for arguments in ([], told.format('{"a":1}').split()):
        result = CliRunner().invoke(app, arguments, env={name: None for name in os.environ if "RAGCACHE" in name})
        assert result.exit_code == 0, result.output
    given = StoreOptions(memory_bytes=3 << 30, load="never")
    answer = AnswerOptions(stop=("a", "b"), hint=False, filter={"a": 1})
    assert found == [(StoreOptions(), AnswerOptions()), (given, answer)]


def test_every_field_of_a_stores_config_is_an_option_but_these():
    """read_only and is_shared are the command's to say."""
    found = {parameter.name for command, parameter in all_options() if command == "ask"}
    assert {one.name for one in fields(StoreConfig)} - found == {"is_shared", "read_only"}


def test_an_answer_may_take_so_long(store):
    late = invoke("ask", "Cat?", "--store", store, "--timeout", "1e-6")
    assert (late.exit_code, late.stdout) == (1, "")
    assert "no answer within 1e-06 s" in late.stderr
    bad = invoke("ask", "Cat?", "--store", store, "--timeout", "0")
    assert (bad.exit_code, "must be above 0" in bad.stderr) == (2, True)
    assert invoke("chat", "--store", store, "--timeout", "1e-6", input="Cat?\n").stderr.count("no answer within") == 1


LIGHT = [
    ["info", "--store", "STORE"],
    ["list", "--store", "STORE"],
    ["delete", "--store", "STORE", "club"],
    ["methods"],
    ["plan", "--model", "MODEL", "--documents", "9", "--tokens", "900"],
    ["simulate", "--help"],
    ["ask", "--help"],
    ["look"],
]


def test_a_command_without_models_starts_without_their_libraries(store, model):
    """They take seconds to import: this is what keeps such a command's start below one. Each runs in a fork of its own
    of a process that has found the commands and imported what is light. The last one is no command: a look into the
    store by the library."""
    places = {"STORE": str(store), "MODEL": str(model)}
    code = f"""
import io, os, sys
import numpy, sqlalchemy
from ragcache.__main__ import main
from ragcache.cli.commands import build_app
build_app()
heavy = ("torch", "transformers", "sentence_transformers", "huggingface_hub", "tokenizers")
for arguments in {[[places.get(one, one) for one in arguments] for arguments in LIGHT]!r}:
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    sys.argv, out, sys.stdout, status = ["ragcache", *arguments], sys.stdout, io.StringIO(), 0
    try:
        if arguments == ["look"]:
            import ragcache as rc
            with rc.Store.open({str(store)!r}, store=rc.StoreConfig(read_only=True)) as kb:
                print(len(kb.documents()), kb.info().documents)
        else:
            main()
    except SystemExit as end:
        status = end.code
    imported = [name for name in heavy if name in sys.modules]
    print(arguments[0], status, imported, bool(sys.stdout.getvalue()), file=out, flush=True)
    os._exit(0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [f"{name} 0 [] True" for name, *_ in LIGHT]


def test_letters_that_the_output_lacks_are_written_out(store, tmp_path, monkeypatch):
    """Where standard output is not UTF-8: cron, or a pipe on Windows."""
    (tmp_path / "hafen.md").write_text("# 港のページ\n\nThe harbour opens at nine.\n", encoding="utf-8")
    assert invoke("ingest", tmp_path / "hafen.md", "--store", store).exit_code == 0
    out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["ragcache", "list", "--store", str(store)])
    with pytest.raises(SystemExit) as ended:
        main()
    out.flush()
    assert not ended.value.code
    assert "\\u6e2f\\u306e" in out.buffer.getvalue().decode("cp1252")


# Servers


QUESTION = {"model": "ours", "messages": [{"role": "user", "content": "Cat?"}]}


@contextmanager
def process(*arguments: object, **env: str) -> Iterator[tuple[forked.Forked, str, list[str]]]:
    """A running command, the URL that it printed, and its lines on standard error so far."""
    with forked.Forked(forked.COMMAND, *arguments, env={**_environment(), **env}) as running:
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.extend(iter(running.stderr.readline, "")), daemon=True)
        reading.start()
        try:
            url = running.stdout.readline().split()[0:1]
            assert url, errors
            yield running, url[0].removesuffix("/").removesuffix("/v1"), errors
        finally:
            running.kill()
            running.wait()
            reading.join(10)


def test_a_server_from_its_start_to_its_end(tmp_path, model):
    """A store that is not there is made; keys come from file and environment; SIGTERM lets a stream finish."""
    keys = tmp_path / "keys"
    keys.write_text("from-file\n", encoding="utf-8")
    options = ("--store", tmp_path / "new", "--model", model, "--model-name", "ours", "--max-tokens", 3, "--k", 1)
    with process("serve", *options, "--port", 0, "--api-keys-file", keys, RAGCACHE_API_KEYS="from-env") as started:
        running, url, errors = started
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
            assert http.get("/readyz").status_code == 200
            assert http.get("/v1/models").status_code == 401
            http.headers["Authorization"] = "Bearer from-file"
            assert json.loads((tmp_path / "new" / "server.json").read_text())["url"] == url
            added = http.post("/v1/documents", json={"documents": [{"id": "a", "text": "Cats sit."}]})
            assert added.json() == {**added.json(), "added": ["a"]}, errors
            http.headers["Authorization"] = "Bearer from-env"
            answer = http.post("/v1/chat/completions", json=QUESTION).json()
            assert answer["usage"]["completion_tokens"] <= 3
            assert [source["document_id"] for source in answer["ragcache"]["sources"]] == ["a"]
            with http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                running.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.wait(120) == 0
    assert not (tmp_path / "new" / "server.json").exists()
    # With two keys, neither's documents may change what the other's answers rest on.
    near = json.loads(invoke("info", "--store", tmp_path / "new", "--json").stdout)
    assert (near["neighbours"], near["neighbours_from"]) == (2, "document")
    assert all(line.startswith("{") for line in errors), "".join(errors)
    logged = [json.loads(line)["event"] for line in errors]
    assert logged.count("request") >= 4
    assert "draining" in logged
    assert "from-" not in "".join(errors)


def test_a_port_that_is_taken(store):
    with listen("127.0.0.1", 0) as taken:
        result = invoke("serve", "--store", store, "--port", taken.getsockname()[1])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot listen there" in result.stderr


def test_without_the_extra(store, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else real(name))
    for words in (["serve"], ["chat", "--web"]):
        result = invoke(*words, "--store", store)
        assert result.exit_code == 2
        assert 'pip install "ragcache-kv[server]"' in result.stderr


def test_options_are_the_servers_settings(store, monkeypatch):
    made = settings_of(
        monkeypatch,
        *("serve", "--store", store, "--k", 3, "--max-tokens", 9, "--temperature", 0.5, "--stop", "x"),
        *("--filter", '{"a": 1}', "--on-overflow", "trim", "--order", "shared", "--no-hint"),
        *("--context", "keep", "--slots", 2, "--queue", 3, "--timeout", 4, "--drain", 5, "--max-body", "6000"),
        *("--max-upload", "7KiB", "--model-name", "ours", "--open-metrics"),
    )
    assert (made.slots, made.max_queue, made.timeout_s, made.drain_s) == (2, 3, 4.0, 5.0)
    assert (made.max_body_bytes, made.max_upload_bytes) == (6000, 7168)
    assert (made.model_name, made.open_metrics, tuple(made.api_keys)) == ("ours", True, ())
    assert made.allowed_hosts == (LOOPBACK,)
    given = made.answers
    assert (given.k, given.max_tokens, given.temperature, tuple(given.stop)) == (3, 9, 0.5, ("x",))
    assert (given.filter, given.on_overflow) == ({"a": 1}, "trim")
    assert (given.order, given.hint, given.context) == ("shared", False, "keep")


@pytest.mark.parametrize("hosts", [(), ("kb.example", "kb")])
def test_a_server_for_others_needs_keys_and_no_name_of_its_own(store, monkeypatch, hosts):
    named = [word for host in hosts for word in ("--allowed-host", host)]
    assert settings_of(monkeypatch, "serve", "--store", store, *named).allowed_hosts == (*hosts, LOOPBACK)
    env = {"RAGCACHE_API_KEYS": "a b"}
    made = settings_of(monkeypatch, "serve", "--store", store, "--host", "0.0.0.0", *named, env=env)
    assert (made.allowed_hosts, tuple(made.api_keys)) == (hosts, ("a", "b"))


def test_two_keys_over_similar_neighbours_are_warned_of(store, tmp_path, monkeypatch):
    """A trained model needs no neighbours, so that its new store is no reason to warn."""
    trained = shutil.copytree(resolve("mini"), tmp_path / "trained")
    of_trained = ("--store", tmp_path / "new", "--model", trained)
    for keys, options, is_warned in (
        ("one", ("--store", store), False),
        ("one,two", ("--store", store), True),
        ("one,two", of_trained, False),
    ):
        _, errors = app_of(monkeypatch, "serve", *options, env={"RAGCACHE_API_KEYS": keys})
        assert ("make the store with --neighbours-from document" in errors) is is_warned


def test_defaults_are_those_of_the_settings(store, monkeypatch):
    own = {"allowed_hosts": (LOOPBACK,)}
    for words, served in ((["serve"], False), (["chat", "--web"], True)):
        app, _ = app_of(monkeypatch, *words, "--store", store)
        assert app.state.service.settings == ServerSettings(**own)
        page = TestClient(app, base_url="http://localhost").get("/")
        assert page.headers["content-type"].startswith("text/html") is served
    late = settings_of(monkeypatch, "chat", "--web", "--store", store, "--timeout", 7)
    assert late == ServerSettings(**own, timeout_s=7.0)


def settings_of(monkeypatch, *arguments, env=None) -> ServerSettings:
    app, _ = app_of(monkeypatch, *arguments, env=env)
    return app.state.service.settings


def app_of(monkeypatch, *arguments, env=None) -> tuple[FastAPI, str]:
    """The application that a command's server is made with, and what the command logs; the server is not run."""
    made = []

    class NoServer:
        def __init__(self, app, drain_s):
            self.app = app

        def run(self, sockets):
            assert sockets
            made.append(self.app)

    monkeypatch.setattr("ragcache.server.run.Server", NoServer)
    result = invoke(*arguments, "--port", 0, env=env)
    assert result.exit_code == 0, result.output
    return made[0], result.stderr
