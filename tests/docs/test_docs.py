"""What README and docs say is so: code runs, commands and options exist, links and paths lead somewhere, tables are
complete, the threads and traces of docs/architecture.md are those of the package, and the worked examples of
CONTRIBUTING.md do what the page says: each is put where it says, and used."""

import importlib
import re
import shlex
import sys
import tomllib
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
import yaml
from blocks import DTYPES, make_block, make_key
from families import assert_same, load_tiny, oracle_logits, random_prompt, save_tiny

import ragcache as rc
from ragcache import codecs, fusion, plugins
from ragcache.cli.commands import build_app
from ragcache.codecs.block_file import read_block, write_block
from ragcache.engine.doctor import DoctorReport
from ragcache.engine.info import Info
from ragcache.errors import ConfigError, ReaderError
from ragcache.ingest import readers
from ragcache.kv.cache_shape import LayerShape
from ragcache.plugins import Registry
from ragcache.store.records import StoredDocument
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


@pytest.mark.parametrize("words", shell_commands())
def test_commands_are_understood_and_scripts_are_there(words):
    program, *arguments = words
    if program == "ragcache":
        COMMANDS[arguments[0]].make_context(arguments[0], arguments[1:])  # parses, and does not run
    else:
        assert (ROOT / program).is_file(), program
        assert (ROOT / program).stat().st_mode & 0o111


def test_commands_of_workflows_and_templates_are_understood():
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github").rglob("*.yml"))}
    names = {"test", "newcomer", "Bug report", "Feature request"}
    assert {yaml.safe_load(text)["name"] for text in texts.values()} == names
    asked = [shlex.split(line) for text in texts.values() for line in re.findall(r"(?:bin/|`)ragcache ([^`\n]+)", text)]
    assert len(asked) == 2
    for command, *arguments in asked:
        assert command == "--help" or COMMANDS[command].make_context(command, arguments)
    workflow = yaml.safe_load(texts["test.yml"])["jobs"]
    scripts = [step["run"] for step in workflow["test"]["steps"] if "run" in step]
    assert scripts == ["scripts/test"]
    extras = yaml.safe_load(texts["newcomer.yml"])["jobs"]["extra"]["strategy"]["matrix"]["extra"]
    assert f"ALL=({' '.join(extras)})" in (ROOT / "scripts" / "newcomer").read_text(encoding="utf-8")
    least = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert f">={workflow['test']['strategy']['matrix']['python'][0]}" == least


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_pages_and_headings(name):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?", TEXTS[name]):
        if "://" not in target:
            page = (ROOT / name).parent.joinpath(target) if target else ROOT / name
            assert page.exists(), target
            assert not anchor or anchor in anchors(page.read_text(encoding="utf-8")), f"{target}#{anchor}"


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
    stated = re.search(r"^Options: (.*)$", text, re.M)
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
    assert {f.name for f in fields(rc.Answer)} - {"reasons"} <= promised["ask"], "reasons is a function"
    assert {f.name for f in fields(rc.Usage)} <= promised["ask"]
    assert {f.name for f in fields(rc.IngestReport)} <= promised["ingest"]


def test_the_kv_of_models_is_what_their_shapes_make():
    row = r"^\| `[\w./-]+` \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) MB \|$"
    rows = re.findall(row, TEXTS["docs/models.md"], re.M)
    assert len(rows) == TEXTS["docs/models.md"].split("## What to look for")[0].count("| `")
    for layers, heads, width, megabytes in rows:
        shape = KVShape(int(layers), int(heads), int(width), dtype="bfloat16")
        assert float(megabytes) == round(1000 * shape.bytes_per_token / 1e6, 1)


# docs/architecture.md: the threads have these names, and the two traces name functions that are there.


PACKAGE = ROOT / "ragcache"


def part_called(title: str, page: str = "docs/architecture.md") -> str:
    return TEXTS[page].split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_thread_of_the_package_is_in_the_table():
    named = re.findall(r"`(ragcache-[\w-]+)`", part_called("Which thread owns what"))
    remotes = PACKAGE.parent / "integrations" / "remote"
    sources = [path.read_text(encoding="utf-8") for folder in (PACKAGE, remotes) for path in folder.rglob("*.py")]
    started = {name for text in sources for name in re.findall(r'name(?:_prefix)?="(ragcache-[\w-]+)"', text)}
    assert set(named) == started


@pytest.mark.parametrize("title", ["A question, call by call", "A document, call by call"])
def test_a_trace_names_functions_that_are_there(title):
    form = r"^(\d+)\. `([\w.]+)` \(`([\w/]+)\.py`(?:, `ragcache-[\w-]+`)?\): \S"
    lines = re.findall(form, part_called(title), re.M)
    assert [int(line[0]) for line in lines] == list(range(1, 1 + len(re.findall(r"^\d+\. ", part_called(title), re.M))))
    for _, name, file in lines:
        attrgetter(name)(importlib.import_module(f"ragcache.{file.replace('/', '.')}"))


# CONTRIBUTING.md: the worked examples


def example(title: str, language: str = "python") -> str:
    """Return the section's code."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", part_called(title, "CONTRIBUTING.md"), re.M | re.S)
    return code


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Methods with an installed distribution that is made of the page's two pieces."""
    (group, entries), *others = tomllib.loads(example("Add a fusion method", "toml"))["project"]["entry-points"].items()
    assert (group, others) == (plugins.METHODS, [])
    info = tmp_path / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: my-methods\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}", encoding="utf-8")
    (tmp_path / "my_methods.py").write_text(example("Add a fusion method"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fusion, "METHODS", Registry(plugins.METHODS))
    yield
    sys.modules.pop("my_methods", None)


@pytest.mark.usefixtures("plug_in")
def test_the_method_is_found_by_its_entry_point_and_keeps_its_limits(tmp_path):
    lm, oracle = load_tiny("llama", tmp_path)
    prompt = random_prompt(3)
    n = len(prompt.ids)
    full = rc.fuse(lm, prompt, method="stride", every=1)
    assert_same(full.next_logits, oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril()))
    none = rc.fuse(lm, prompt, method="stride", every=0)
    torch.testing.assert_close(none.next_logits, rc.fuse(lm, prompt, fusion.Reposition()).next_logits)
    third = rc.fuse(lm, prompt, method="stride", every=3)
    context = sum(map(len, prompt.chunk_ids))
    assert set(third.computed_tokens) == {len(prompt.suffix_ids) + -(-context // 3)}
    assert "stride" in [row.name for row in rc.methods()]
    with pytest.raises(ConfigError, match="every is -1"):
        rc.fuse(lm, prompt, method="stride", every=-1)


def placed(name: str, code: str, package, folder: Path, monkeypatch):
    """The code as a module of the package, as if its file were there."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    module = importlib.import_module(f"{package.__name__}.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # goes with the test
    return module


@pytest.fixture
def codec(tmp_path, monkeypatch):
    module = placed("int16", example("Add a codec"), codecs, tmp_path, monkeypatch)
    monkeypatch.setitem(codecs.CODECS, "int16", module.Int16Codec)
    return codecs.get_codec("int16")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_a_file_of_the_codec_holds_the_block_within_its_bound(codec, dtype, num_tokens, tmp_path):
    block = make_block(num_tokens, num_tokens=num_tokens, dtype=dtype)
    write_block(tmp_path / "block", make_key(1), block, codec)
    found = read_block(tmp_path / "block", make_key(1))
    for numbers, decoded in ((block.keys, found.keys), (block.values, found.values)):
        assert (decoded.dtype, decoded.shape) == (dtype, numbers.shape)
        error = np.abs(decoded.float().numpy() - numbers.float().numpy()).max(initial=0.0)
        assert error <= codec.error_bound(block)
    shape = LayerShape(*block.key_shape[1:2], block.key_shape[3], block.value_shape[3])
    expected = codec.expected_bytes([shape] * block.num_layers, num_tokens, block.keys.itemsize)
    assert expected == sum(tensor.nbytes for tensor in codec.encode(block).values())


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The documents of a file with this content, by its ending."""
    placed("srt", example("Add a reader"), readers, tmp_path, monkeypatch)
    monkeypatch.setitem(readers.readers(), ".srt", "ragcache.ingest.readers.srt:read_srt")

    def read(content: str) -> list[rc.Document | ReaderError]:
        folder = tmp_path / "films"
        folder.mkdir(exist_ok=True)
        (folder / "Ula.SRT").write_text(content, encoding="utf-8")
        (file,) = readers.find_files([folder]).files
        return list(readers.read_file(file))

    return read


def test_the_reader_gives_what_is_said(read, tmp_path):
    cues = "1\n00:00:01,000 --> 00:00:02,500\nThe river Ula\nis long.\n\n\n2\n00:00:03,000 --> 00:00:04,000\nIs it?\n"
    (document,) = read(f"\ufeff{cues}".replace("\n", "\r\n"))
    assert (document.text, document.title) == ("The river Ula\nis long.\nIs it?", "Ula")
    assert document.id == document.source == readers.file_id(tmp_path / "films" / "Ula.SRT")


@pytest.mark.parametrize("content", ["The river Ula is long.", "1\nThe river Ula is long.\n"])
def test_a_file_of_another_kind_is_named(read, content):
    (error,) = read(content)
    assert isinstance(error, ReaderError)
    assert "has no line of times; save it as SubRip" in str(error)
