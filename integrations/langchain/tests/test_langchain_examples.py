"""The examples run, and print the right answers."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def run(tmp_path, capsys):
    def run_one(name: str) -> str:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main(str(tmp_path / "kb"))
        return capsys.readouterr().out

    return run_one


@pytest.mark.slow
def test_chain(run):
    first, second, sources = run("langchain_chain").splitlines()
    town = re.search(r"lives in ([A-Z]\w+ [A-Z]\w+)", (EXAMPLES / "corpus/people/petra-elley.md").read_text())[1]
    assert first.endswith(f"Petra Elley now lives in {town}.")
    assert town in second
    assert "petra-elley" in sources


@pytest.mark.slow
def test_agent(run):
    call, answer = run("agent_tool").splitlines()
    assert call.endswith("4 documents")
    town = re.search(r"lives in ([A-Z]\w+ [A-Z]\w+)", (EXAMPLES / "corpus/people/petra-elley.md").read_text())[1]
    assert town in answer


@pytest.mark.slow
def test_migration(run):
    lines = [
        re.fullmatch(r"(\w+): (.*) \((\d+) of (\d+) tokens read\)", line) for line in run("migrate_faiss").splitlines()
    ]
    before, after = lines
    assert (before[1], after[1]) == ("before", "after")
    assert before[2] == after[2] == "Eva Elden now lives in South Langmere."
    assert before[3] == before[4]
    assert int(after[3]) < int(before[3]) / 2
