"""Hooks of the documentation's site (`mkdocs.yml`).

README.md is the home page, the reference is made from the docstrings of all public names, and a link to a file that has
no page is replaced by the file's path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import ragcache

ROOT = Path(__file__).resolve().parent.parent
HOME, REFERENCE, PICTURES = "index.md", "reference.md", "benchmarks/results"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]+)?\)")
DEFINITION = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*):\s+(?=\S)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are not in docs/: home, reference and results."""
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, REFERENCE, content=reference()))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the site, and remove the escapes of bars in code, which only GitHub's tables need."""
    folder = "" if page.file.src_uri == HOME else "docs"
    there = {file.src_uri for file in files}
    markdown = LINK.sub(lambda link: _link(link, folder, there), markdown)
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), markdown)


def _link(link: re.Match[str], folder: str, there: set[str]) -> str:
    picture, text, target, anchor = link.groups(default="")
    if "://" in target:
        return link[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    page = HOME if path == "README.md" else path.removeprefix("docs/")
    if page in there:
        return f"{picture}[{text}]({page}{anchor})"
    return f"{text} (`{path}`)"


def _home(name: str) -> str:
    """Return the module of a public name; for a plug-in's name, the module of its class."""
    return ragcache._HOMES.get(name) or str(getattr(ragcache, name).__module__)


def reference() -> str:
    """Return the page of the reference: every public name, from its module."""
    names = (f"::: {_home(name)}.{name}" for name in ragcache.__all__)
    return "\n\n".join(["# Python", "Every public name of `ragcache`, to be imported from there.", *names, ""])


class Definitions(Extension):
    """Extension that shows the definitions in a docstring as a list, as Markdown would join their lines."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(docstring: str) -> str:
    """Return the docstring with lines `name: meaning`, and their indented further lines, as items of a list."""
    return "\n\n".join(_items(paragraph) for paragraph in docstring.split("\n\n"))


def _items(paragraph: str) -> str:
    items: list[str] = []
    for line in paragraph.split("\n"):
        found = DEFINITION.match(line)
        if found:
            items.append(f"- `{found[1]}`: {line[found.end() :]}")
        elif items and line.startswith(" "):
            items[-1] += f" {line.strip()}"
        else:
            return paragraph
    return "\n".join(items)
