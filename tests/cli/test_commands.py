"""Every command, against the library called directly."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
from terminal import NAMES, invoke, names
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.cli.ask import source_line
from ragcache.ingest.report import bytes_text


def json_of(result):
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_ingest_reports_what_it_did(model, folder, tmp_path):
    arguments = ["ingest", folder, "--store", tmp_path / "kb", "--model", model, "--json"]
    first = json_of(invoke(*arguments))
    assert names(sorted(first["added"])) == NAMES
    assert first["computed_tokens"] > first["tokens"] > 0  # each passage behind two others
    again = json_of(invoke(*arguments))
    assert names(sorted(again["unchanged"])) == NAMES
    assert again["added"] == again["updated"] == again["failed"] == []
    assert again["computed_tokens"] == 0


def test_ingest_lists_what_it_cannot_read_and_goes_on(model, folder, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "good.txt").write_text("A good text.")
    paths = [tmp_path / "empty.txt", tmp_path / "absent.md", tmp_path / "good.txt"]
    result = invoke("ingest", *paths, "--store", tmp_path / "kb", "--model", model, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["added"] == [str(tmp_path / "good.txt")]
    assert {row["source"] for row in report["failed"]} == {str(paths[0]), str(paths[1])}
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)


@pytest.mark.slow
def test_ingest_on_a_ray_of_its_own(made, model, folder, tmp_path, monkeypatch):
    """The store that the local pipeline makes; the Ray is gone afterwards."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    root, on_ray = tmp_path / "kb", ("--ray", "local", "--ray-actors", "1")
    result = invoke("ingest", folder, "--store", root, "--model", model, "--json", *on_ray)
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["added"]) == len(NAMES)
    assert not ray.is_initialized()
    with rc.Store.open(made) as here, rc.Store.open(root) as there:
        for document in here.documents():
            ours, theirs = here.chunks_of(document.id), there.chunks_of(document.id)
            assert [(one.text, one.handle) for one in ours] == [(one.text, one.handle) for one in theirs]
        assert here.info().blocks == there.info().blocks > 0


def test_ingest_in_words(model, folder, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    result = invoke("ingest", folder, tmp_path, "--store", tmp_path / "kb", "--model", model)
    assert result.exit_code == 0, result.output
    assert "4 added, 0 updated, 0 unchanged, 0 failed" in result.stdout
    assert "picture.png" in result.stdout
    blocks = sum(path.stat().st_size for path in (tmp_path / "kb").rglob("*.safetensors"))
    assert "reading for the model " in result.stderr
    assert "toy" not in result.stderr
    assert "their KV takes about" in result.stderr
    assert f"takes {bytes_text(blocks)} on disk" in result.stdout


# The tiny model's own default reads what is quick as text, without any block.
MOVED = ("--method", "reposition")


def test_lazy_ingestion_leaves_the_model_unused(model, folder, tmp_path):
    kb = tmp_path / "kb"
    report = json_of(invoke("ingest", folder, "--store", kb, "--model", model, "--kv", "lazy", "--json"))
    assert report["computed_tokens"] == 0
    assert json_of(invoke("info", "--store", kb, "--json"))["pending"] == len(NAMES)
    answer = json_of(invoke("ask", "Where is the cat?", "--store", kb, *MOVED, "--max-tokens", 1, "--json"))
    assert {hit["kv"] for hit in answer["hits"]} == {"computed"}


WARM = rc.Sampling(max_tokens=12, temperature=0.9, top_p=0.8, top_k=50, seed=7)
RECENT = {"year": {"$gte": 2022}}
LINKS = [[65, 66], [67]]
TOLD = [
    ([], {}),
    (
        ["--method", "full", "--temperature", 0.9, "--top-p", 0.8, "--top-k", 50, "--seed", 7],
        {"method": "full", "sampling": WARM},
    ),
    (["--filter", json.dumps(RECENT), "--k", 1], {"filter": RECENT, "k": 1}),
    (
        ["--method", "link", "--option", f"link_ids={LINKS}", "--k", 2],
        {"k": 2, "method": "link", "method_options": {"link_ids": LINKS}},
    ),
    (["--stop", "e", "--stop", "\ufffd"], {"sampling": rc.Sampling(max_tokens=12, stop=("e", "\ufffd"))}),
]


def test_ask_equals_the_library_with_every_option(store):
    # By a method that is named: what the model's own default reads, and how, depends on the machine.
    plain = {"sampling": rc.Sampling(max_tokens=12), "method": "reposition"}
    asked = ("ask", "Which club?", "--store", store, *MOVED, "--max-tokens", 12, "--json")
    got = [json_of(invoke(*asked, *flags)) for flags, _ in TOLD]
    with rc.RagCache.open(store) as kb:
        expected = [kb.ask("Which club?", **{**plain, **options}).to_json() for _, options in TOLD]
    for found, right, (flags, _) in zip(got, expected, TOLD, strict=True):
        assert (found.keys(), found["timings"].keys()) == (right.keys(), right["timings"].keys())
        for name in ("text", "method", "finish_reason"):
            assert found[name] == right[name], flags
        assert found["usage"]["prompt_tokens"] == right["usage"]["prompt_tokens"]
        # Where the KV came from differs: the first answer left it on disk.
        without = [[{**hit, "kv": None} for hit in answer["hits"]] for answer in (found, right)]
        assert without[0] == without[1]
        assert found["timings"]["total_s"] >= found["timings"]["ttft_s"] > 0
        assert (found["text"] != expected[0]["text"]) == bool(flags), flags


def test_ask_in_words_names_its_sources(store):
    result = invoke("ask", "Where do dogs bark?", "--store", store, *MOVED, "--k", 1, "--max-tokens", 3)
    assert result.exit_code == 0, result.output
    assert re.search(r"\[1\] /\S+/dogs\.txt", result.stdout)
    assert "KV: disk" in result.stdout
    assert "first token after" in result.stdout
    assert "read by reposition: " in result.stdout
    own = invoke("ask", "Where do dogs bark?", "--store", store, "--k", 1, "--max-tokens", 3)
    assert re.search(r"read by epic: \S", own.stdout)


def test_a_source_is_printed_with_its_place():
    hit = {"title": "", "document_id": "travel.pdf", "source": "travel.pdf", "score": 0.5, "kv": "disk"}
    assert source_line({**hit, "place": "p. 3"}) == "travel.pdf, p. 3  score 0.500  KV: disk"
    assert source_line({**hit, "place": ""}) == "travel.pdf  score 0.500  KV: disk"


def test_chat_answers_line_by_line_as_ask_does(store):
    result = invoke(
        "chat", "--store", store, "--max-tokens", 4, "--k", 2, input="Where is the cat?\n\nDogs?\n/exit\nno\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("first token after") == 2
    asked = invoke("ask", "Dogs?", "--store", store, "--max-tokens", 4, "--k", 2)
    assert asked.stdout.split("\n\n")[0] in result.stdout


def test_chat_that_keeps_its_context_is_one_conversation(store):
    result = invoke(
        "chat", "--context", "keep", "--store", store, "--max-tokens", 4, "--k", 1, input="Where is the cat?\nDogs?\n"
    )
    assert result.exit_code == 0, result.output
    options = {"k": 1, "context": "keep", "sampling": rc.Sampling(max_tokens=4)}
    with rc.RagCache.open(store) as kb:
        first = kb.chat([asked := {"role": "user", "content": "Where is the cat?"}], **options)
        said = {"role": "assistant", "content": first.text}
        second = kb.chat([asked, said, {"role": "user", "content": "Dogs?"}], **options)
        assert second.usage.prompt_tokens > first.usage.prompt_tokens
    written = result.stdout.split("first token after")
    for answer, shown, cost in zip((first, second), written, written[1:], strict=False):
        assert answer.text in shown
        assert f"{answer.usage.prompt_tokens} prompt tokens, " in cost


@pytest.mark.parametrize("context", [(), ("--context", "keep")])
def test_chat_survives_a_question_that_is_too_long(store, context):
    """Where the conversation is kept, the turn that failed is no part of it."""
    result = invoke("chat", *context, "--store", store, "--max-tokens", 2, "--k", 1, input="x" * 900 + "\nDogs?\n")
    assert result.exit_code == 0, result.output
    assert "error: the question has" in result.stderr
    assert result.stdout.count("first token after") == 1


def test_pins_hold_until_they_are_taken_back(store):
    pinned = json_of(invoke("pin", "arno", "club", "--store", store, "--json"))["pinned"]
    assert len(pinned) == 2
    assert json_of(invoke("info", "--store", store, "--json"))["pinned"] == 2
    with rc.Store.open(store) as kb:
        assert kb.store.kv.pinned == set(pinned)
    assert json_of(invoke("unpin", "arno", "--store", store, "--json"))["unpinned"] == pinned[:1]
    assert json_of(invoke("info", "--store", store, "--json"))["pinned"] == 1
    unknown = invoke("pin", "nobody", "--store", store)
    assert unknown.exit_code == 1
    assert "'nobody': neither a document nor a chunk" in unknown.stderr
    assert invoke("pin", "arno", "--store", store).stdout == "1 blocks pinned\n"


def test_list_gives_the_documents(store):
    found = json_of(invoke("list", "--store", store, "--json"))["documents"]
    assert names(document["id"] for document in found) == NAMES
    with rc.Store.open(store) as kb:
        assert [asdict(d) | {"state": d.state} for d in kb.documents()] == found
    filtered = json_of(invoke("list", "--store", store, "--filter", '{"year": 2021}', "--json"))["documents"]
    assert [document["id"] for document in filtered] == ["arno"]
    page = json_of(invoke("list", "--store", store, "--limit", 2, "--offset", 1, "--json"))["documents"]
    assert names(document["id"] for document in page) == NAMES[1:3]
    table = invoke("list", "--store", store).stdout.splitlines()
    assert names(line.split()[0] for line in table) == ["id", *NAMES]


def test_delete_deletes_and_names_what_is_not_there(store):
    result = invoke("delete", "arno", "nobody", "--store", store, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"deleted": ["arno"], "missing": ["nobody"]}
    assert result.stderr.startswith("error: nobody: ")
    left = json_of(invoke("list", "--store", store, "--json"))["documents"]
    assert names(document["id"] for document in left) == [name for name in NAMES if name != "arno"]
    assert json_of(invoke("info", "--store", store, "--json"))["documents"] == len(NAMES) - 1


def test_info_counts(store):
    found = json_of(invoke("info", "--store", store, "--json"))
    blocks = list((store / "kv").rglob("*.safetensors"))
    assert (found["documents"], found["chunks"], found["blocks"]) == (len(NAMES), len(NAMES), len(blocks))
    assert found["bytes_by_tier"] == {"memory": 0, "disk": sum(path.stat().st_size for path in blocks)}
    assert found["hit_rate"] is None
    json_of(invoke("ask", "Where is the cat?", "--store", store, *MOVED, "--k", 3, "--max-tokens", 1, "--json"))
    after = json_of(invoke("info", "--store", store, "--json"))
    assert after["hits_by_tier"] == {"memory": 0, "disk": 3}
    assert after["hit_rate"] == 1
    words = invoke("info", "--store", store).stdout
    assert "100.0% of 3 blocks" in words


def test_doctor_repairs_and_says_so(store):
    assert json_of(invoke("doctor", "--store", store, "--json"))["sound"]
    block, *_ = sorted((store / "kv").rglob("*.safetensors"))
    block.write_bytes(block.read_bytes()[:-1])
    report = json_of(invoke("doctor", "--store", store, "--json"))
    assert report["damaged"] == [block.stem]
    assert not report["sound"]
    assert "The store is sound." in invoke("doctor", "--store", store).stdout


def test_methods_are_those_of_the_library():
    found = json_of(invoke("methods", "--json"))["methods"]
    assert [method["name"] for method in found] == list(rc.METHODS)
    assert all(name in invoke("methods").stdout for name in rc.METHODS)


def test_output_that_cannot_be_written_is_one_line():
    program = [sys.executable, "-m", "ragcache", "methods"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written (No space left on device)\n")
    ours, theirs = os.pipe()
    os.close(ours)  # a reader that has left
    done = subprocess.run([*program, "--json"], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.strip() == rc.__version__


@pytest.mark.parametrize("command", ["list", "info", "doctor", "ask"])
def test_no_store_is_made_by_asking_for_one(command, tmp_path):
    result = invoke(command, *(["why?"] if command == "ask" else []), "--store", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "nowhere" in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_dry_run_says_what_a_first_run_would_do(folder, model, tmp_path):
    arguments = ["ingest", folder, "--model", model, "--dry-run", "--store", tmp_path / "new"]
    result = invoke(*arguments)
    assert (result.exit_code, result.stderr.count("error")) == (0, 0), result.output
    told = json_of(invoke(*arguments, "--collection", "red", "--json"))
    assert {str(path) for path in folder.iterdir() if path.suffix == ".md"} <= set(told["added"])
    assert told["computed_tokens"] > 0
    assert not (tmp_path / "new").exists()


def test_ingest_sync_follows_the_folder_and_a_dry_run_says_so_first(store, folder, tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(folder, docs, ignore=shutil.ignore_patterns("*.jsonl"))
    json_of(invoke("ingest", docs, "--store", store, "--json", "--sync"))
    (docs / "cats.md").rename(docs / "felines.md")
    (docs / "dogs.txt").unlink()
    arguments = ["ingest", docs, "--store", store, "--sync"]
    told = json_of(invoke(*arguments, "--dry-run", "--json"))
    assert (told["dry_run"], told["removed"]) == (True, [str(docs / "dogs.txt")])
    assert told["moved"] == [{"from": str(docs / "cats.md"), "to": str(docs / "felines.md")}]
    words = invoke(*arguments)
    assert words.exit_code == 0, words.output
    assert f"move {docs}/cats.md -> {docs}/felines.md" in words.stdout
    assert f"remove {docs}/dogs.txt" in words.stdout
    assert "1 moved, 1 removed" in words.stdout
    again = json_of(invoke(*arguments, "--json"))
    assert (again["moved"], again["removed"], again["computed_tokens"]) == ([], [], 0)
    gone = invoke("ingest", tmp_path / "nowhere", "--store", store, "--sync")
    assert (gone.exit_code, "nothing was changed" in gone.stderr) == (1, True)


def test_list_and_delete_by_source_and_id(store, folder, monkeypatch):
    def listed(*options: object) -> list[str]:
        return names(d["id"] for d in json_of(invoke("list", "--store", store, "--json", *options))["documents"])

    monkeypatch.chdir(folder)
    for source in ("notes.jsonl", "./notes.jsonl", folder / "notes.jsonl", "*.jsonl*", f"{folder}/n*"):
        assert listed("--source", source) == ["arno", "club"], source
    assert listed("--source", ".") == listed("--source", folder) == NAMES
    assert listed("--id", "club", "--id", "*/cats.md") == ["cats.md", "club"]
    assert listed("--source", "notes.jsonl", "--filter", '{"year": 2024}') == ["club"]
    result = invoke(
        "delete", "cats.md", "club", "--source", "dogs.*", "--source", "nothing*", "--store", store, "--json"
    )
    assert result.exit_code == 1
    assert names(json.loads(result.stdout)["deleted"]) == ["cats.md", "club", "dogs.txt"]
    assert json.loads(result.stdout)["missing"] == ["nothing*"]
    assert listed() == ["arno"]
    assert invoke("delete", "--store", store).exit_code == 2
    assert listed() == ["arno"]


def test_reencode_makes_a_store_for_another_model(store, tmp_path):
    other, target = save_tiny_llama(tmp_path / "other", seed=3, positions=768), tmp_path / "kb2"
    report = json_of(invoke("reencode", target, "--store", store, "--model", other, "--json"))
    assert names(sorted(report["added"])) == NAMES
    with rc.Store.open(store) as old, rc.Store.open(target) as new:
        assert new.info().model == str(other)
        assert [one.id for one in new.documents()] == [one.id for one in old.documents()]
    for arguments, said in (((target,), "--model"), ((store, "--model", other), "name another directory")):
        refused = invoke("reencode", *arguments, "--store", store)
        assert (refused.exit_code, said in refused.stderr) == (2, True)


def test_a_store_that_keeps_a_share_of_the_kv(made, folder, model, tmp_path):
    less = tmp_path / "less"
    result = invoke("ingest", folder, "--store", less, "--model", model, "--kv-kept", 0.3)
    assert result.exit_code == 0, result.output
    sizes = [json_of(invoke("info", "--store", path, "--json"))["bytes_by_tier"]["disk"] for path in (made, less)]
    assert sizes[1] < sizes[0]
    other = invoke("ask", "Where is the cat?", "--store", less, "--kv-kept", 0.5)
    assert (other.exit_code, other.stdout) == (1, "")
    assert "kv_kept" in other.stderr


def test_precompute_keeps_kv_alone(model, folder, tmp_path):
    kb, lines = tmp_path / "kb", tmp_path / "passages.jsonl"
    long = (
        "The ferry of Brenholm goes every second hour, but not on Sundays, when its captain rests at home, it is said."
    )
    lines.write_text(
        "".join(
            json.dumps({"id": name, "metadata": {"page_label": name}, "text": f"{name}: {long}"}) + "\n"
            for name in "ab"
        )
    )
    made = json_of(invoke("precompute", lines, "--store", kb, "--model", model, *MOVED, "--json"))
    assert (made["computed"], made["known"], made["failed"]) == (2, 0, [])
    assert (made["budget_bytes"], made["evicted"], made["warning"]) == (10 << 30, 0, "")
    info = json_of(invoke("info", "--store", kb, "--json"))
    assert (info["foreign"]["passages"], info["foreign"]["bytes"]) == (2, made["kv_bytes"])
    told = invoke("info", "--store", kb, "--foreign-cache", "3GiB").output
    assert "3.0 GiB (--foreign-cache)" in told
    assert re.search(r"^foreign passages +\d", told, re.M)
    with rc.RagCache.open(kb, method="reposition", store=rc.StoreConfig(load="always")) as opened:
        assert opened.info().documents == 0
        assert opened.precompute(f"a: {long}", dry_run=True).handles == made["handles"][:1]
        found = opened.complete(f"Read.\n\nb: {long}\n\nWhen?", sampling=rc.Sampling(max_tokens=1)).hits
        assert [(hit.handle, hit.kv) for hit in found] == [(made["handles"][1], "disk")]
        assert [(hit.chunk.id, hit.chunk.place) for hit in found] == [("b", "p. b")]
    lines.write_text(json.dumps({"id": "a", "text": f"a: {long}"}) + "\n")
    again = json_of(invoke("precompute", lines, "--sync", "--store", kb, *MOVED, "--json"))
    assert (again["computed"], again["known"], again["forgotten"]) == (0, 1, made["handles"][1:])
    bad = invoke("precompute", tmp_path / "nothing", "--sync", "--store", kb, *MOVED)
    assert bad.exit_code == 1
    assert "no file or folder of this name" in bad.stderr
    assert json_of(invoke("precompute", lines, "--dry-run", "--store", kb, *MOVED, "--json"))["known"] == 1


def test_precompute_warns_of_a_budget_that_is_too_small(model, folder, tmp_path, caplog):
    told = invoke(
        "precompute", folder, "--store", tmp_path / "kb", "--model", model, *MOVED, "--foreign-cache", "10KiB"
    )
    assert told.exit_code == 0, told.output
    assert "of 10.0 KiB (--foreign-cache)" in told.stdout
    assert "raise StoreConfig(foreign_cache=...) or --foreign-cache from 10.0 KiB to more than" in caplog.text
    words = invoke("info", "--store", tmp_path / "kb", "--foreign-cache", "10KiB").stdout
    assert "raise --foreign-cache to keep them" in words


def test_precompute_cuts_documents_as_ingest_does(model, folder, tmp_path):
    options = ("--model", model, *MOVED, "--chunk-max-tokens", 20)
    json_of(invoke("ingest", folder, "--store", tmp_path / "one", *options, "--json"))
    made = json_of(invoke("precompute", folder, "--split", "--store", tmp_path / "two", *options, "--json"))
    with rc.Store.open(tmp_path / "one") as kb:
        chunks = [chunk for one in kb.documents() for chunk in kb.chunks_of(one.id)]
    assert len(chunks) > len(NAMES)
    assert max(len(chunk.text.encode()) for chunk in chunks) <= 20  # the model's tokens are bytes
    assert set(made["handles"]) == {chunk.handle for chunk in chunks}


def test_pull_says_where_a_model_is_and_how_large(tmp_path):
    directory = save_tiny_llama(tmp_path / "tiny")
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    result = invoke("pull", directory)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{directory} is in {directory}, ")
    found = json.loads(invoke("pull", directory, "--json").stdout)
    assert found == {"model": str(directory), "path": str(directory), "bytes": num_bytes}


def test_a_store_is_read_again_behind_a_primer(store, tmp_path):
    other = tmp_path / "other"
    result = invoke("reencode", other, "--store", store, "--recipe", "isolated")
    assert result.exit_code == 0, result.output
    assert "primer" not in invoke("info", "--store", other).output
    behind = tmp_path / "behind"
    result = invoke("reencode", behind, "--store", other, "--recipe", "primer", "--primer", "64")
    assert result.exit_code == 0, result.output
    assert "primer" in invoke("info", "--store", behind).output


def test_a_primer_that_is_no_file_is_named(store, folder):
    result = invoke("ingest", folder, "--store", store, "--primer", "no.txt")
    assert result.exit_code != 0
    assert "--primer 'no.txt' is none of 64, 128, 256 and no text file" in " ".join(result.output.split())


# Collections and keys


def test_collections_are_filled_listed_asked_and_deleted(model, tmp_path):
    store, file = ("--store", tmp_path / "kb"), tmp_path / "cats.md"
    file.write_text("The cat sat on the mat.")
    json_of(invoke("ingest", file, "--collection", "a", *store, "--model", model, "--json"))
    assert json_of(invoke("collections", *store, "--json")) == {"collections": {"a": 1, "default": 0}, "deleted": []}
    [document] = json_of(invoke("list", "--collection", "a", *store, "--json"))["documents"]
    assert document["collection"] == "a"
    assert json_of(invoke("list", "--collection", "default", *store, "--json"))["documents"] == []
    asked = ("ask", "Where is the cat?", *store, *MOVED, "--max-tokens", 1, "--json", "--collection")
    assert [len(json_of(invoke(*asked, name))["hits"]) for name in ("a", "default")] == [1, 0]
    unknown = invoke("list", "--collection", "b", *store)
    assert unknown.exit_code != 0
    assert "no collection 'b'" in unknown.stderr
    assert invoke("delete", document["id"], "--collection", "default", *store).exit_code == 1
    assert json_of(invoke("collections", "--delete", "a", *store, "--json"))["deleted"] == [document["id"]]
    assert json_of(invoke("collections", *store, "--json"))["collections"] == {"default": 0}


def test_a_key_is_shown_once_and_revoked(tmp_path):
    file = ("--keys", tmp_path / "keys.toml")
    secret = json_of(invoke("keys", "add", "alice", *file, "--read", "a", "--write", "b", "--json"))["secret"]
    assert secret not in (tmp_path / "keys.toml").read_text()
    limits = ("--limit", "requests=60", "--limit", "tokens=1e4")
    told = invoke("keys", "add", "bob", *file, "--read", "*", "--scope", "admin", "--expires", "2030-01-02", *limits)
    assert "bob: rk-" in told.stdout
    rows = json_of(invoke("keys", "list", *file, "--json"))["keys"]
    assert [list(row.values()) for row in rows] == [
        ["alice", "ask write", "a b", "b", "never", ""],
        ["bob", "admin", "*", "", "2030-01-02T00:00:00+00:00", "requests=60 tokens=10000"],
    ]
    for arguments, said in (
        (("add", "alice", "--read", "a"), "a key 'alice' already"),
        (("add", "carol"), "which collections"),
        (("add", "carol", "--read", "../x"), "cannot name a collection"),
        (("add", "carol", "--read", "a", "--scope", "root"), "none of ask, write, admin"),
        (("add", "carol", "--read", "a", "--limit", "speed=3"), "no such limit: 'speed'"),
        (("add", "carol", "--read", "a", "--limit", "tokens=many"), "tokens is 'many'"),
        (("revoke", "carol"), "no key 'carol'"),
        (("add",), "say which key to add"),
    ):
        refused = invoke("keys", *arguments, *file)
        assert refused.exit_code != 0
        assert said in refused.stderr
    assert invoke("keys", "revoke", "alice", *file).exit_code == 0
    assert [row["key"] for row in json_of(invoke("keys", "list", *file, "--json"))["keys"]] == ["bob"]
