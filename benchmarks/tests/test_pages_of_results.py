"""The pages that are written from the results."""

import re
from pathlib import Path

import pytest

import ragcache as rc
from benchmarks import pages
from benchmarks.pages import COSTS_PAGE, METHODS_PAGE, RESULTS_PAGE, write_section
from ragcache.errors import ConfigError


def test_sections_are_written_anew(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- quality: begin -->\nold\n<!-- quality: end -->\nafter\n")
    write_section(page, "quality", ["| a |", "|---|"])
    assert page.read_text() == "before\n<!-- quality: begin -->\n\n| a |\n|---|\n\n<!-- quality: end -->\nafter\n"
    with pytest.raises(ConfigError, match="has no section <!-- costs"):
        write_section(page, "costs", ["x"])


def test_the_page_of_methods_is_up_to_date(tmp_path: Path):
    """Its table equals the one that the command writes, and every method has a section."""
    page = Path(tmp_path / "methods.md")
    text = METHODS_PAGE.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    write_section(page, "methods", pages.methods_table())
    assert page.read_text(encoding="utf-8") == text
    assert set(re.findall(r"^### `(\w+)`", text, re.M)) == set(rc.METHODS)


def test_pages_are_written_out_of_the_results(tmp_path: Path):
    """The committed pages agree with the committed results."""
    committed = {page: tmp_path / page.relative_to(pages.ROOT) for page in (METHODS_PAGE, COSTS_PAGE, RESULTS_PAGE)}
    for page, copy in committed.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    pages.main(["--out", str(tmp_path)])
    for page, copy in committed.items():
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    assert pages.public_lines(tmp_path) == ["Not measured: run `ragcache eval`."]
