"""The documentation's site is complete, loads nothing from other hosts, and its reference has every public name."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import ragcache as rc
from tools.site import as_list

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        # Raises Abort where a page is missing, or a link or an anchor leads nowhere.
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True))
    return directory


@pytest.mark.slow
def test_home_is_the_readme_and_every_page_is_in_it(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")[2].split(":")[0]
    assert first.replace("**", "<strong>", 1).replace("**", "</strong>", 1) in home
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html"' in home


def test_the_reference_has_every_public_name_and_what_it_takes(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    for name in rc.__all__:
        assert re.search(rf'<h2 id="ragcache\w*\.[\w.]*\b{name}"', text), name
    assert re.search(r"<li>\s*(<p>)?<code>score_threshold</code>: leave out chunks", text)


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)="([^"]+)"', text)
        assert [url for url in loaded if "//" in url] == [], page.name


def test_a_file_without_a_page_is_named_and_a_picture_shown(site):
    assert "<code>benchmarks/results/README.md</code>" in (site / "results.html").read_text(encoding="utf-8")
    text = (site / "week.html").read_text(encoding="utf-8")
    picture = re.search(r'src="(benchmarks/results/[\w-]+\.png)"', text)
    assert (site / picture[1]).read_bytes().startswith(b"\x89PNG")


def test_definitions_are_items_and_prose_stays():
    docstring = "Ask.\n\nk:      how many\nmethod: by which\n        passages are read\n\nRaises ConfigError: none."
    expected = "Ask.\n\n- `k`: how many\n- `method`: by which passages are read\n\nRaises ConfigError: none."
    assert as_list(docstring) == expected
    assert as_list("Two things: one.\nand more") == "Two things: one.\nand more"
