"""`ragcache ask` asks the server that runs over its store, and opens the store itself where there is none to ask."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from serving import serving
from typer.testing import CliRunner

import ragcache as rc
from ragcache.cli.client import FILE, KEY, Address, announced
from ragcache.cli.commands import build_app
from ragcache.cli.terminal import printable
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords

QUESTION, SECRET = "Where does the cat sit?", "a-secret"
OPTIONS = ("--k", 2, "--max-tokens", 8)


@pytest.fixture(scope="module")
def store(made, tmp_path_factory):
    return shutil.copytree(made, tmp_path_factory.mktemp("asked") / "kb")


@pytest.fixture(scope="module")
def kb(lm, store):
    with rc.RagCache.open(store, model=lm, method="reposition", embedder=BagOfWords()) as kb:
        yield kb


@pytest.fixture(scope="module")
def served(kb):
    with serving(kb, ServerSettings(drain_s=5, api_keys=(SECRET,))) as served:
        yield served


@pytest.fixture
def address(served, store):
    address = Address(served.url, served.app.state.service.chat_model, "its weights")
    with announced(store, address):
        yield address


@pytest.fixture
def opened(monkeypatch, store):
    """Stores that a command opens itself; it ends there."""
    found = []

    def open_one(path, **options):
        found.append(path)
        raise rc.RagCacheError("opened here")

    monkeypatch.setattr(rc.RagCache, "open", open_one)
    return found


def ask(store, *arguments, key=SECRET):
    env = {**{name: None for name in os.environ if name.startswith("RAGCACHE_")}, KEY: key}
    return CliRunner().invoke(build_app(), ["ask", QUESTION, "--store", str(store), *map(str, arguments)], env=env)


def test_the_server_is_asked_and_the_answer_is_the_stores(kb, store, address, opened):
    right = [kb.ask(QUESTION, 2, sampling=rc.Sampling(8)) for _ in range(2)][1]
    told = ask(store, *OPTIONS)
    assert (told.exit_code, told.stderr, opened) == (0, "", [])
    assert told.stdout.startswith(printable(right.text).rstrip("\n") + "\n")
    assert [f"[{rank}] {hit.chunk.title}" in told.stdout for rank, hit in enumerate(right.hits, 1)] == [True, True]
    found, own = json.loads(ask(store, *OPTIONS, "--json").stdout), right.to_json()
    assert found.keys() == own.keys()
    times = found.pop("timings"), own.pop("timings")
    assert times[0].keys() == times[1].keys()
    kinds = [[hit.pop("kv") for hit in one["hits"]] for one in (found, own)]
    assert kinds[0] == kinds[1]
    assert found == own


def test_its_options_are_those_of_the_call(kb, store, address, opened):
    given = ("--method", "epic", "--option", "first_tokens=3", "--stop", "a", "--search", "text", "--order", "shared")
    right = kb.ask(
        QUESTION, 2, sampling=rc.Sampling(8, stop=("a",)), search="text", order="shared",
        method="epic", method_options={"first_tokens": 3},
    )  # fmt: skip
    found = json.loads(ask(store, *OPTIONS, *given, "--model", "its weights", "--json").stdout)
    assert (found["text"], found["method"]) == (right.text, "epic(first_tokens=3)")
    assert [hit["chunk_id"] for hit in found["hits"]] == [hit.chunk.id for hit in right.hits]
    assert opened == []


@pytest.mark.parametrize(
    ("arguments", "key", "reason"),
    [
        (("--model", "another"), SECRET, r"has its own model; opening the store"),
        (("--memory", "1GiB", "--system", "x"), SECRET, r"has its own memory_bytes, system; opening"),
        ((), "wrong", r"refused \(401: the API key is wrong\); opening the store"),
        ((), None, r"refused \(401: an API key is needed.*\); opening the store"),
        (("--mmr-lambda", 7), SECRET, r"refused \(400: .*\); opening the store"),
        (("--local",), SECRET, ""),
    ],
)
def test_what_it_cannot_be_asked_is_asked_here(store, address, opened, arguments, key, reason):
    told = ask(store, *arguments, key=key)
    assert (told.exit_code, len(opened)) == (1, 1)
    said, _, error = told.stderr.strip().rpartition("\n")
    assert "opened here" in error
    assert re.search(reason, said) if reason else said == ""
    assert SECRET not in told.output
    assert SECRET not in (store / FILE).read_text()


def test_a_server_that_is_gone_is_said_once(store, address, opened):
    """Its file is there and nobody holds its lock: it was killed."""
    left = (store / FILE).read_bytes()
    gone = store.parent / "killed"
    gone.mkdir(exist_ok=True)
    (gone / FILE).write_bytes(left)
    assert f"{address.url} is gone; opening the store" in ask(gone).stderr
    assert not (gone / FILE).exists()
    assert "gone" not in ask(gone).stderr
    assert len(opened) == 2


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"url": 3}'])
def test_a_damaged_file_is_no_server(tmp_path, opened, text):
    (tmp_path / FILE).write_bytes(text)
    assert "cannot be read" in ask(tmp_path).stderr
    assert len(opened) == 1


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "http://example.org", "nowhere", "http://127.0.0.1:9"])
def test_the_key_goes_to_this_machine_alone(tmp_path, opened, url):
    with announced(tmp_path, Address(url, "m", "m")):
        told = ask(tmp_path)
    reason = "does not answer" if url.startswith("http://127") else "no address of this machine's own"
    assert reason in told.stderr
    assert len(opened) == 1


def test_the_first_of_two_servers_is_the_one(store, address):
    with announced(store, address._replace(url="http://127.0.0.1:1")):
        assert json.loads((store / FILE).read_text())["url"] == address.url
    assert json.loads((store / FILE).read_text())["url"] == address.url


def test_nothing_heavy_is_imported_to_ask_a_server(store, address):
    code = (
        "import sys; from ragcache.cli.commands import build_app\n"
        f"try: build_app()(['ask', {QUESTION!r}, '--store', {str(store)!r}, '--max-tokens', '2'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'faiss') if name in sys.modules])"
    )
    env = {**os.environ, KEY: SECRET}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr
    assert "score" in done.stdout
