"""Answers over long pages at small size, the laws that the bundled models show, and the sections of the docs."""

import json
import re
from pathlib import Path

import pytest

import ragcache as rc
from benchmarks import pages
from benchmarks.pages import COSTS_PAGE, METHODS_PAGE, RESULTS_PAGE, write_section
from benchmarks.runner import main
from ragcache.errors import ConfigError


def rows_of(directory: Path, model: str, *arguments: str) -> dict[str, dict[str, object]]:
    """By method, what the model answers over four pages, each asked of its own context."""
    result = main("quality", ["--models", model, "--passages=4", "--out", str(directory), *arguments])
    assert result.to_json() == json.loads((directory / "quality.json").read_text(encoding="utf-8"))
    return {row["method"]: row for row in result.figures[model]["rows"]}


@pytest.mark.slow
def test_a_run_writes_its_table_and_goes_on(tmp_path: Path) -> None:
    given = ["--methods", "reposition,epic", "--kinds", "single", "--questions=4"]
    first = rows_of(tmp_path, "mini-base", *given)
    assert first.keys() == {"no passages", "full", "reposition", "epic"}
    assert first["full"]["accuracy"][0] >= 0.75, "the model knows nearly all of them"
    assert first["full"]["computed_share"] == 1.0
    assert 0 < first["reposition"]["computed_share"] < first["epic"]["computed_share"] < 0.9
    page = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert "| `epic` | 4 |" in page
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    assert rows_of(tmp_path, "mini-base", *given).keys() == first.keys()
    assert path.read_bytes().splitlines(keepends=True)[: len(lines) - 2] == lines[:-2]
    assert len(path.read_bytes().splitlines()) == len(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"), [("mini", "link"), ("mini-base", "reposition:neighbours=1")], ids=["link", "behind"]
)
def test_what_leans_across_pages_is_answered(tmp_path: Path, model: str, method: str) -> None:
    """Answered with trained link tokens, and where pages were read behind those before them in their document;
    blocks that know nothing of each other guess among two."""
    rows = rows_of(tmp_path, model, "--methods", f"{method},reposition", "--kinds", "leaning", "--questions=16")
    assert rows[method]["accuracy"][0] >= 0.75
    assert rows["reposition"]["accuracy"][0] <= 0.6
    assert rows[method]["computed_share"] < 0.15


def test_sections_are_written_anew(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- quality: begin -->\nold\n<!-- quality: end -->\nafter\n")
    write_section(page, "quality", ["| a |", "|---|"])
    assert page.read_text() == "before\n<!-- quality: begin -->\n\n| a |\n|---|\n\n<!-- quality: end -->\nafter\n"
    with pytest.raises(ConfigError, match="has no section <!-- costs"):
        write_section(page, "costs", ["x"])


def test_the_page_of_methods_is_up_to_date(tmp_path: Path):
    """Its table of methods is the one that the command writes, and every method has a part of its own."""
    page = Path(tmp_path / "methods.md")
    text = METHODS_PAGE.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    write_section(page, "methods", pages.methods_table())
    assert page.read_text(encoding="utf-8") == text
    assert set(re.findall(r"^### `(\w+)`", text, re.M)) == set(rc.METHODS)


def test_pages_are_written_out_of_the_results(tmp_path: Path):
    """The committed pages hold what the committed results say."""
    committed = {page: tmp_path / page.relative_to(pages.ROOT) for page in (METHODS_PAGE, COSTS_PAGE, RESULTS_PAGE)}
    for page, copy in committed.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    pages.main(["--out", str(tmp_path)])
    for page, copy in committed.items():
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    assert pages.public_lines(tmp_path) == ["Not measured: run `ragcache eval`."]
