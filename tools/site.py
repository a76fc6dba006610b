"""What the documentation's site (`mkdocs.yml`) makes of the project: README is its home, the reference comes from the
docstrings of all public names, and a link to a file that has no page becomes the file's path."""

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
    """Add what is no file of docs/."""
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, REFERENCE, content=reference()))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the site, and what GitHub's tables need escaped and these do not."""
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
    """The module that has a public name; a plug-in's is where its class is."""
    return ragcache._HOMES.get(name) or str(getattr(ragcache, name).__module__)


def reference() -> str:
    """A page with every public name, by the module that it is from."""
    names = (f"::: {_home(name)}.{name}" for name in ragcache.__all__)
    return "\n\n".join(["# Python", "Every public name of `ragcache`, to be imported from there.", *names, ""])


class Definitions(Extension):
    """Shows the definitions in a docstring as a list: Markdown would join their lines."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(docstring: str) -> str:
    """The docstring with `name: what it is`, lines that follow indented, as items of a list."""
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
