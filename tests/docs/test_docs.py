"""What README and docs say is so: code runs, commands and options exist, links and paths lead somewhere, tables are
complete, and the types, threads and traces of docs/architecture.md are those of the package."""

import importlib
import re
import shlex
import sys
import threading
import tomllib
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import typer
import yaml
from families import random_prompt, save_tiny

import ragcache as rc
from ragcache.cli.commands import build_app
from ragcache.engine.doctor import DoctorReport
from ragcache.engine.info import Info
from ragcache.store.records import StoredDocument
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_plan.shape import KVShape

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "ragcache" / "mini" / "config.json"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = typer.main.get_command(build_app()).commands


def python_blocks() -> list:
    found = []
    for name, text in TEXTS.items():
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 2
            found.append(pytest.param(name, line, match[1], id=f"{name}:{line}"))
    return found


@pytest.mark.parametrize(("name", "line", "code"), python_blocks())
def test_python_blocks_run(name, line, code, tmp_path, monkeypatch, models_once):
    if ("RagCache.open" in code or '"mini"' in code) and not MINI.is_file():
        pytest.skip("the bundled mini model is not here (ragcache/mini)")
    for page in ("people/wilhelm-wersen.md", "clubs/hiking-club-heron.md"):  # all of it takes a minute to ingest
        part = Path("examples", "corpus", page)
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).symlink_to(ROOT / part)
    monkeypatch.chdir(tmp_path)
    run("\n" * (line - 1) + code, name)


def run(code: str, name: str) -> dict[str, object]:
    """Run a block as a file of its own; returns the names that it made."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names


def test_the_method_that_the_docs_write_is_the_real_one(tmp_path):
    text = TEXTS["docs/architecture.md"]
    code = next(m[1] for m in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S) if "class Reposition" in m[1])
    names = run(code, "docs/architecture.md")
    lm = rc.load_lm(save_tiny("llama", str(tmp_path)))
    prompt = random_prompt(3)
    written = rc.fuse(lm, prompt, method=names["Reposition"](), recipe="isolated")
    torch.testing.assert_close(written.next_logits, rc.fuse(lm, prompt, method="reposition").next_logits)
    plain = rc.fuse(lm, prompt, method=names["Cooled"](temperature=1.0))
    limit = rc.fuse(lm, prompt, method="ape", temperature=1.0, scale=1.0)
    torch.testing.assert_close(plain.next_logits, limit.next_logits)
    cooled = rc.fuse(lm, prompt, method=names["Cooled"]())
    assert not torch.allclose(cooled.next_logits, limit.next_logits)


def shell_commands() -> list:
    found = []
    for name, text in TEXTS.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.match(r"    (ragcache [a-z]|scripts/[a-z])", line):
                words = shlex.split(line, comments=True)
                found.append(pytest.param(words, id=f"{name}:{number}"))
    return found


@pytest.mark.parametrize("words", [p for p in shell_commands() if p.values[0][0] == "ragcache"])
def test_ragcache_commands_are_understood(words):
    _, command, *arguments = words
    COMMANDS[command].make_context(command, arguments)  # parses, and does not run


@pytest.mark.parametrize("words", [p for p in shell_commands() if p.values[0][0] != "ragcache"])
def test_scripts_are_there(words):
    script = ROOT / words[0]
    assert script.is_file(), script
    assert script.stat().st_mode & 0o111


def test_commands_of_workflows_and_templates_are_understood():
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github").rglob("*.yml"))}
    assert {yaml.safe_load(text)["name"] for text in texts.values()} == {"test", "Bug report", "Feature request"}
    asked = [shlex.split(line) for text in texts.values() for line in re.findall(r"(?:bin/|`)ragcache ([^`\n]+)", text)]
    assert len(asked) == 4
    for command, *arguments in asked:
        assert command == "--help" or COMMANDS[command].make_context(command, arguments)
    workflow = yaml.safe_load(texts["test.yml"])["jobs"]
    scripts = [step["run"] for step in workflow["test"]["steps"] if "run" in step]
    assert scripts == ["scripts/test"]
    least = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert f">={workflow['test']['strategy']['matrix']['python'][0]}" == least


def test_there_are_commands_to_check():
    assert len(shell_commands()) > 10


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#\s]+)", TEXTS[name]):
        if "://" not in target:
            assert (ROOT / name).parent.joinpath(target).exists(), target


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_anchors_are_headings(name):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", TEXTS[name]):
        if "://" not in target:
            page = (ROOT / name).parent.joinpath(target) if target else ROOT / name
            assert anchor in anchors(page.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_the_tree_names_what_is_there():
    tree = TEXTS["docs/architecture.md"].split("## Where things are")[1].split("##")[0]
    inside = None
    for indent, path in re.findall(r"^    ( *)(\S+/|\S+\.py)", tree, re.M):
        inside = path if not indent else inside
        whole = path if not indent else f"{inside}{path}"
        if whole == "ragcache/mini/" and not MINI.is_file():
            continue
        assert (ROOT / whole).exists(), whole
    named = set(re.findall(r"^      (\S+?)(?:/|\.py) ", tree, re.M))
    there = {path.stem for path in (ROOT / "ragcache").iterdir() if not path.name.startswith(("_", "py."))}
    assert there <= named, there - named


def test_the_tree_of_the_readme_has_every_folder_in_at_most_30_lines():
    short, long = (
        TEXTS[page].split("## Where things are")[1].split("##")[0] for page in ("README.md", "docs/architecture.md")
    )
    assert len(re.findall(r"^    .+", short, re.M)) <= 30
    outer = r"^    (\w+)/\s"
    assert set(re.findall(outer, short, re.M)) == set(re.findall(outer, long, re.M))
    named = [name for names in re.findall(r"^      ((?:\S+/ +)+)", short, re.M) for name in names.split()]
    found = [{path.name for path in (ROOT / "ragcache").glob(name.rstrip("/"))} for name in named]
    assert all(found), named
    folders = {path.name for path in (ROOT / "ragcache").iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert set().union(*found) == folders


def test_the_table_of_methods_is_complete():
    table = TEXTS["README.md"].split("## Methods")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(rc.METHODS)


def section(command: str) -> str:
    """What the page of the command line says of one command."""
    return re.split(r"^## ", TEXTS["docs/cli.md"].split(f"\n## `{command}`\n")[1], flags=re.M)[0]


def rows_of(text: str) -> set[str]:
    """Options in the first column of the tables."""
    cells = re.findall(r"^\| (`--.*?`) \| ", text, re.M)
    return {flag for cell in cells for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", cell)}


def test_the_page_of_the_command_line_has_every_command():
    text = TEXTS["docs/cli.md"]
    assert re.findall(r"^## `(\w+)`$", text, re.M) == list(COMMANDS)
    assert re.findall(r"^\| \[`(\w+)(?: [A-Z.]+)?`\]\(#\1\) \| ", text, re.M) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_section_of_a_command_has_its_options_and_an_example(command):
    text = section(command)
    assert f"\n    ragcache {command}" in text
    documented = rows_of(text)
    stated = re.search(r"^Options: (.*) and$", text, re.M)
    for group in re.findall(r"#(\w+)-options", stated[1] if stated else ""):
        documented |= rows_of(TEXTS["docs/cli.md"].split(f"\n## {group.capitalize()} options\n")[1].split("\n## ")[0])
    parameters = COMMANDS[command].params
    flags = {flag for p in parameters for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")}
    assert documented | {"--help"} == flags | {"--help"}


def test_json_fields_are_documented():
    found = {command: re.search(r"^JSON: .*?(?=\n## |\Z)", section(command), re.M | re.S) for command in COMMANDS}
    rows = {command: match[0] for command, match in found.items() if match}
    assert set(rows) == {c for c in COMMANDS if any("--json" in p.opts for p in COMMANDS[c].params)}
    promised = {command: set(re.findall(r"`(\w+)`", row)) for command, row in rows.items()}
    assert promised["info"] == {f.name for f in fields(Info)} | {"store", "rates"}
    assert promised["doctor"] == {f.name for f in fields(DoctorReport)} | {"sound"}
    assert promised["list"] == {f.name for f in fields(StoredDocument)} | {"documents", "state"}
    assert promised["methods"] == set(rc.MethodInfo._fields) | {"methods"}
    assert {f.name for f in fields(rc.Answer)} <= promised["ask"]
    assert {f.name for f in fields(rc.Usage)} <= promised["ask"]
    assert {f.name for f in fields(rc.IngestReport)} <= promised["ingest"]


def test_the_kv_of_models_is_what_their_shapes_make():
    row = r"^\| `[\w./-]+` \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) MB \|$"
    rows = re.findall(row, TEXTS["docs/models.md"], re.M)
    assert len(rows) == TEXTS["docs/models.md"].split("## What to look for")[0].count("| `")
    for layers, heads, width, megabytes in rows:
        shape = KVShape(int(layers), int(heads), int(width), dtype="bfloat16")
        assert float(megabytes) == round(1000 * shape.bytes_per_token / 1e6, 1)


# docs/architecture.md: the classes exist, the threads have these names, and a question and a document pass the calls of
# the two traces in their order, each on its thread.


PACKAGE = ROOT / "ragcache"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CALLER = "the caller's"


def part_called(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_ten_types_are_classes_of_their_files():
    rows = re.findall(r"^- `(\w+)` \(`([\w/]+)\.py`\): \S", part_called("Ten types"), re.M)
    assert len(rows) == 10
    for name, module in rows:
        owner = importlib.import_module(f"ragcache.{module.replace('/', '.')}")
        assert getattr(owner, name).__module__ == owner.__name__


def test_every_thread_of_the_package_is_in_the_table():
    named = re.findall(r"`(ragcache-[\w-]+)`", part_called("Which thread owns what"))
    remotes = PACKAGE.parent / "integrations" / "remote"
    sources = [path.read_text(encoding="utf-8") for folder in (PACKAGE, remotes) for path in folder.rglob("*.py")]
    started = {name for text in sources for name in re.findall(r'name(?:_prefix)?="(ragcache-[\w-]+)"', text)}
    assert set(named) == started


Calls = dict[str, list[str]]
"""By thread, every call of the package's functions in order: `file:qualified name`."""


class Recorder:
    """Writes down calls, of this thread and of those that begin, until it is stopped."""

    def __init__(self) -> None:
        self.calls: Calls = defaultdict(list)
        self._caller = threading.current_thread()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self.calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{PACKAGE}/"):
            thread = threading.current_thread()
            name = CALLER if thread is self._caller else re.sub(r"_\d+$", "", thread.name)
            self.calls[name].append(f"{path.removeprefix(f'{PACKAGE}/')}:{frame.f_code.co_qualname}")


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, Calls]:
    """By title of the trace: of an ingestion of two files, and of a question that is not the model's first."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("Jonas Lansen wears a green hat.", encoding="utf-8")
    (folder / "b.md").write_text("# Ula\n\nThe river Ula is long.", encoding="utf-8")
    store = tmp_path_factory.mktemp("store") / "kb"
    two = rc.Sampling(max_tokens=2)
    with rc.RagCache.open(store, model=rc.load_lm("mini"), embedder=BagOfWords(), method="reposition") as kb:
        with Recorder() as ingestion:
            kb.ingest([folder])
        with Recorder() as question:  # with the thread of the model, which begins here
            kb.ask("Who wears a hat?", k=1, sampling=two)
            for made in question.values():
                made.clear()
            kb.ask("What is long?", k=1, sampling=two)
    return {"A question, call by call": question, "A document, call by call": ingestion}


def stated(title: str) -> list[tuple[str, str]]:
    """Each line's thread and call."""
    form = r"^(\d+)\. `([\w.]+)` \(`([\w/]+\.py)`(?:, `([\w-]+)`)?\): \S"
    lines = re.findall(form, part_called(title), re.M)
    assert [int(line[0]) for line in lines] == list(range(1, 1 + len(re.findall(r"^\d+\. ", part_called(title), re.M))))
    return [(thread or CALLER, f"{file}:{name}") for _, name, file, thread in lines]


@pytest.mark.parametrize("title", ["A question, call by call", "A document, call by call"])
def test_a_trace_is_what_happens(calls, title):
    left = {thread: iter(made) for thread, made in calls[title].items()}
    for thread, call in stated(title):
        assert call in left[thread], f"{call} does not follow in {thread}"  # takes it and all before it
