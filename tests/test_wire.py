"""Names that never change: what users, clients, dashboards and files of earlier versions call things by.

`wire.json` beside this file holds them. A name that is gone from it, or means something else, breaks somebody. A new
name is added to it by one command, which prints what differs:

    python -m tests.test_wire
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

import ragcache as rc
from ragcache.cli.commands import build_app
from ragcache.codecs import CODECS
from ragcache.engine.verdict import MethodVerdict, Verdict, save_verdict
from ragcache.kv.block_key import block_key
from ragcache.models.trained_tokens import TrainedTokens
from ragcache.server.app import create_app
from ragcache_demo.bag_of_words import BagOfWords

FILE = Path(__file__).with_name("wire.json")
ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("ragcache", "integrations", "extras", "apps")
Wire = dict[str, dict[str, str]]
"""Section -> name -> what is said about it."""

RECIPES: dict[str, dict[str, Any]] = {
    "isolated": {"name": "isolated", "bos": False},
    "bos": {"name": "isolated", "bos": True},
    "prefix": {"name": "prefix", "bos": False},
    "lone markers": {"name": "isolated", "bos": False, "markers": [5, 6]},
    "markers": {"name": "prefix", "bos": False, "markers": [[5, 6], [7]]},
    "neighbours": {"name": "isolated", "bos": False, "neighbours": 3},
    "kept": {"name": "isolated", "bos": False, "kept": 0.3},
    "kept for a task": {"name": "prefix", "bos": False, "kept": 0.5, "task": "Answer."},
}
LINK = {"link_tokens": 2, "link_slots": 4, "first_link_id": 100}
SECTIONS: list[dict[str, Any]] = [
    {"version": 1, "recipe": "isolated", **section}
    for section in (
        {"method": "link", **LINK, "kv_start_id": 50, "kv_end_id": 51},
        {"method": "markers", "doc_start_id": 60, "doc_end_id": 61, "positions": "composite"},
        {"method": "reposition"},
    )
]
CHECKED: dict[str, Any] = {
    "model": "mini", "source": "made up", "questions": 2, "thresholds": {"kl_answer": 0.5}, "neighbours": 0,
    "methods": [
        {"name": "reposition", "options": {}, "recipe": "isolated", "safe": False, "reason": "", "computed_share": 0.1,
         "figures": {"kl_answer": 0.9}},
        {"name": "epic", "options": {"first_tokens": 3}, "recipe": "isolated", "safe": True, "reason": "",
         "computed_share": 0.2, "figures": {"kl_answer": 0.1}},
    ],
}  # fmt: skip


def test_no_name_changes(wire):
    changed = differences(json.loads(FILE.read_text(encoding="utf-8")), wire)
    assert not changed, "new names are added by `python -m tests.test_wire`; others never change:\n" + "\n".join(
        changed
    )


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_are_read_and_written_as_ever(recipe):
    assert rc.Recipe.from_json(recipe).to_json() == recipe


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_of_config_json_are_read_and_written_as_ever(section):
    assert TrainedTokens.read(section).section() == section


@pytest.fixture(scope="module")
def wire(tmp_path_factory) -> Wire:
    return collect(tmp_path_factory.mktemp("wire"))


def differences(frozen: Wire, found: Wire) -> list[str]:
    lines = []
    for section in sorted(frozen.keys() | found.keys()):
        old, new = frozen.get(section, {}), found.get(section, {})
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                lines.append(f"gone:    {section}: {name}: {old[name]}")
            elif name not in old:
                lines.append(f"new:     {section}: {name}: {new[name]}")
            elif old[name] != new[name]:
                lines.append(f"changed: {section}: {name}: {old[name]} -> {new[name]}")
    return lines


def collect(directory: Path) -> Wire:
    """Every name, as this version has it. directory: a new store goes there."""
    return {
        "commands": dict(commands()),
        "environment": dict.fromkeys(sorted(environment()), ""),
        "methods": {name: " ".join(field.name for field in fields(method)) for name, method in rc.METHODS.items()},
        "codecs": dict.fromkeys(CODECS, ""),
        "recipes": {name: json.dumps(rc.Recipe.from_json(recipe).to_json()) for name, recipe in RECIPES.items()},
        "block keys": dict(block_keys()),
        "config.json": {field.name: "" for field in fields(TrainedTokens)} | {"version": ""},
        **of_a_server(directory / "kb"),
    }


def commands() -> Iterator[tuple[str, str]]:
    """Options and arguments by command; the variable of each, and its default where that is a name."""
    for command, found in get_command(build_app()).commands.items():
        yield command, ""
        for place, param in enumerate(found.params):
            argument = param.param_type_name == "argument"
            flags = f"argument {place}" if argument else " ".join([*param.opts, *param.secondary_opts])
            default = param.default if isinstance(param.default, str) else ""
            several = "several" if param.nargs == -1 or getattr(param, "multiple", False) else ""
            required = "required" if param.required else ""
            said = (param.envvar or "", default and f"= {default}", several, required)
            yield f"{command} {flags}", " ".join(filter(None, said))


def environment() -> set[str]:
    """Variables that the code names."""
    everything = (file for folder in SHIPPED for file in (ROOT / folder).rglob("*.py"))
    files = (file for file in everything if "tests" not in file.relative_to(ROOT).parts)
    found = {
        name for file in files for name in re.findall(r'"(RAGCACHE_[A-Z0-9_]+)"', file.read_text(encoding="utf-8"))
    }
    return found | {word for _, said in commands() for word in said.split() if word.startswith("RAGCACHE_")}


def block_keys() -> Iterator[tuple[str, str]]:
    """Keys over made-up ids: of every recipe, for a tenant, of other ids and of neighbours."""

    def key(recipe: str, chunk: list[int], *more: Any) -> str:
        return block_key("0123", rc.Recipe.from_json(RECIPES[recipe]), [1, 2, 3], chunk, *more)

    near = [[20, 21], [30]]
    for name in RECIPES:
        yield name, key(name, [10, 11, 12], "", near)
    yield "isolated, a tenant", key("isolated", [10, 11, 12], "Ünal & sons")
    yield "prefix, another chunk", key("prefix", [12, 11, 10, 0, 128_000])
    yield "neighbours, none found", key("neighbours", [10, 11, 12])


def of_a_server(path: Path) -> Wire:
    """What a server says after two questions, and the files that its store then has."""
    lm = rc.load_lm("mini")
    with rc.RagCache.open(path, model=lm, embedder=BagOfWords()) as kb:
        kb.ingest([rc.Document("a", "The cat sits."), rc.Document("b", "The dog barks.")])
    # Written by hand, as an earlier version did: `auto` reads it.
    (path / "verdicts.json").write_text(
        json.dumps({"version": 1, "verdicts": {lm.fingerprint: {"fingerprint": lm.fingerprint, **CHECKED}}})
    )
    with rc.RagCache.open(path, model=lm, embedder=BagOfWords(), method="auto") as kb:
        read = kb.method
        app = create_app(kb)
        with TestClient(app, base_url="http://localhost") as client:
            for question in ("Where does the cat sit?", "What barks?"):  # the second one finds its passages in memory
                message = {"role": "user", "content": question}
                body = {"model": "mini", "messages": [message], "max_tokens": 2}
                asked = client.post("/v1/chat/completions", json=body)
                assert asked.status_code == 200, asked.text
            text = client.get("/metrics").text
    methods = [MethodVerdict(**method) for method in CHECKED["methods"]]
    save_verdict(path, Verdict(fingerprint="0123", **{**CHECKED, "methods": methods}))
    verdicts = json.loads((path / "verdicts.json").read_text())
    verdicts["verdicts"] = {"*": verdicts["verdicts"]["0123"]}
    rates = json.loads((path / "rates.json").read_text())
    for name in ("tiers", "decode_bytes_s"):
        rates["rates"][name] = {"*": next(iter(rates["rates"][name].values()), None)}
    return {
        "http": dict(routes(app.openapi())),
        "fields": dict(schema_fields(app.openapi())),
        "metrics": metrics(text),
        "rates.json": dict.fromkeys(keys(rates), ""),
        "verdicts.json": {"the one of before": f"auto is {read}"} | dict.fromkeys(keys(verdicts), ""),
        "ragcache.json": dict.fromkeys(keys(json.loads((path / "ragcache.json").read_text())), ""),
    }


def routes(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Operations with their parameters, the content types of their bodies and the statuses that they answer with."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parameters = sorted(f"{one['in']} {one['name']}" for one in operation.get("parameters", ()))
            bodies = sorted(operation.get("requestBody", {}).get("content", ()))
            yield f"{method.upper()} {path}", ", ".join([*parameters, *bodies, *sorted(operation["responses"])])


def schema_fields(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields by schema, whether they are required, and the words that they may hold."""
    for schema, found in document["components"]["schemas"].items():
        for name, field in found.get("properties", {}).items():
            said = [*(["required"] if name in found.get("required", ()) else []), *words(field)]
            yield f"{schema}.{name}", " ".join(said)


def words(field: Mapping[str, Any]) -> list[str]:
    """The values of an enumeration, wherever in a field it stands."""
    own = [field["const"]] if "const" in field else field.get("enum", [])
    inside = [*field.get("anyOf", ()), *([field["items"]] if isinstance(field.get("items"), dict) else [])]
    return [str(value) for value in own] + [word for one in inside for word in words(one)]


def metrics(text: str) -> dict[str, str]:
    """Metrics with their kinds and labels, and the values of labels that are the same on every machine."""
    found = {}
    for family in text_string_to_metric_families(text):
        values: dict[str, set[str]] = defaultdict(set)
        for sample in family.samples:
            for label, value in sample.labels.items():
                values[label].add(value)
        labels = [
            f"{label}({', '.join(sorted(values[label]))})" if label in ("phase", "kind", "what") else label
            for label in sorted(values.keys() - {"le"})
        ]
        if not family.name.endswith("_created"):  # the client library's own
            found[family.name] = " ".join([family.type, *labels])
    return found


def keys(value: Any, above: str = "") -> Iterator[str]:
    """Every key of a JSON value, below those above it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{above}{name}"
            yield from keys(inner, f"{above}{name}.")
    elif isinstance(value, list):
        for inner in value[:1]:
            yield from keys(inner, above)


def main() -> None:
    """Write the names of this version to the file, and print what differs from before."""
    with tempfile.TemporaryDirectory() as directory:
        found = collect(Path(directory))
    before = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    print("\n".join(differences(before, found)) or "nothing differs")


if __name__ == "__main__":
    main()
