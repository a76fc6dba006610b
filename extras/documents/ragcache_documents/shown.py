"""Word documents and presentations as their programs show them, for converters that read the files' markup.

Hidden text and hidden slides are left out; text boxes, page headers and footers, automatic numbers and the marks of
raised and struck text are written into the text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from io import BytesIO
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring
from zipfile import ZipFile

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_MC = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_R = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_OFF = ("0", "false", "off", "none")
_SLIDE = re.compile(r"ppt/slides/slide\d+\.xml")
_ROMAN = {1000: "m", 900: "cm", 500: "d", 400: "cd", 100: "c", 90: "xc", 50: "l", 40: "xl", 10: "x", 9: "ix", 5: "v",
          4: "iv", 1: "i"}  # fmt: skip
_MOST_LEVELS = 9
Trees = dict[str, Element]


def as_shown(data: bytes, suffix: str) -> bytes:
    """Return the file, changed so that it holds the text that is shown.

    Raises BadZipFile, KeyError or ParseError if the file is damaged.
    """
    with ZipFile(BytesIO(data)) as archive:
        names = archive.namelist()
        changed = _document(archive, names) if suffix == ".docx" else _slides(archive, names)
        held = BytesIO()
        with ZipFile(held, "w") as made:
            for name in dict.fromkeys(names):
                made.writestr(name, tostring(changed[name]) if name in changed else archive.read(name))
    return held.getvalue()


def _related(archive: ZipFile, part: str) -> dict[str, tuple[str, str]]:
    """Return the part's relationships: kind and path of each by its id."""
    folder, name = posixpath.split(part)
    path = f"{folder}/_rels/{name}.rels"
    found = fromstring(archive.read(path)) if path in archive.namelist() else Element("none")
    return {
        one.get("Id", ""): (
            one.get("Type", "").rpartition("/")[2],
            posixpath.normpath(posixpath.join(folder, one.get("Target", ""))).lstrip("/"),
        )
        for one in found
    }


def _is_on(element: Element | None, attribute: str = f"{_W}val") -> bool:
    return element is not None and element.get(attribute, "1") not in _OFF


# Presentations


def _slides(archive: ZipFile, names: Iterable[str]) -> Trees:
    changed: Trees = {}
    for name in filter(_SLIDE.fullmatch, names):
        changed[name] = slide = fromstring(archive.read(name))
        if not _is_on(slide, "show"):  # emptied, not removed: later slides keep their numbers
            notes = [path for kind, path in _related(archive, name).values() if kind == "notesSlide"]
            changed.update({path: fromstring(archive.read(path)) for path in notes})
            for tree in [slide, *(changed[path] for path in notes)]:
                for shapes in tree.iter(f"{_P}spTree"):
                    shapes[:] = shapes[:2]  # properties of the group, which are no shapes
        for run in slide.iter(f"{_A}r"):
            _mark(run)
        for table in slide.iter(f"{_A}tbl"):
            _fill_down(table)
    return changed


def _mark(run: Element) -> None:
    """Mark raised and struck text as in Markdown made from HTML: `10^6`, `~~12~~`."""
    look, text = run.find(f"{_A}rPr"), run.find(f"{_A}t")
    if look is None or text is None or not text.text or not text.text.strip():
        return
    is_word = re.fullmatch(r"[^\W\d]{2,}", text.text.strip())  # 1st, 2nd
    if re.match("[1-9]", look.get("baseline", "0")) and not is_word:
        text.text = f"^{text.text}"
    if look.get("strike", "noStrike") != "noStrike":
        text.text = f"~~{text.text}~~"


def _fill_down(table: Element) -> None:
    """Repeat a merged cell's text in the rows that it covers, and escape bars in cells."""
    above: list[Element] = []
    for row in table.iter(f"{_A}tr"):
        cells = row.findall(f"{_A}tc")
        for rank, cell in enumerate(cells):
            for text in cell.iter(f"{_A}t"):
                text.text = (text.text or "").replace("|", "\\|")
            if _is_on(cell, "vMerge") and cell.get("vMerge") and rank < len(above):
                cell[:] = [deepcopy(child) for child in above[rank]]
        above = cells


# Word


def _document(archive: ZipFile, names: Iterable[str]) -> Trees:
    main = "word/document.xml"
    of = {
        name: fromstring(archive.read(f"word/{name}.xml"))
        for name in ("styles", "numbering")
        if f"word/{name}.xml" in names
    }
    changed: Trees = {
        name: fromstring(archive.read(name))
        for name in (main, "word/footnotes.xml", "word/endnotes.xml")
        if name in names
    }
    styles = {style.get(f"{_W}styleId", ""): style for style in of.get("styles", ())}
    body = changed[main].find(f"{_W}body")
    if body is not None:
        _add_margins(archive, body, _related(archive, main))
    for tree in changed.values():
        _drop_hidden(tree, styles)
        _lift_boxes(tree)
    if "numbering" in of:
        _Numbers(of["numbering"], styles).write(changed[main])
        for level in of["numbering"].iter(f"{_W}lvl"):  # its numbers are in the text now
            level[:] = [child for child in level if child.tag != f"{_W}pStyle"]
        changed["word/numbering.xml"] = of["numbering"]
    return changed


def _add_margins(archive: ZipFile, body: Element, related: Mapping[str, tuple[str, str]]) -> None:
    """Put the pages' headers in front of the text and their footers after it, each text once, without page numbers."""
    said, margins = set[str](), {"header": list[Element](), "footer": list[Element]()}
    referred = [one.get(f"{_R}id", "") for kind in margins for one in body.iter(f"{_W}{kind}Reference")]
    for kind, path in dict.fromkeys(related[id] for id in referred if id in related):
        for block in fromstring(archive.read(path)):
            text = " ".join("".join(one.text or "" for one in block.iter(f"{_W}t")).split())
            fields = "".join(one.text or "" for one in block.iter(f"{_W}instrText"))
            fields += "".join(one.get(f"{_W}instr", "") for one in block.iter(f"{_W}fldSimple"))
            if not any(map(str.isalnum, text)) or text in said or "PAGE" in fields:
                continue
            said.add(text)
            plain = SubElement(Element("block"), f"{_W}p")
            SubElement(SubElement(plain, f"{_W}r"), f"{_W}t").text = text
            margins[kind if kind in margins else "header"].append(plain)
    end = len(body) - (len(body) > 0 and body[-1].tag == f"{_W}sectPr")
    body[end:end] = margins["footer"]
    body[:0] = margins["header"]


def _drop_hidden(tree: Element, styles: Mapping[str, Element]) -> None:
    hidden = {name for name, style in styles.items() if _is_on(style.find(f"{_W}rPr/{_W}vanish"))}
    for parent in list(tree.iter()):
        for run in parent.findall(f"{_W}r"):
            look = run.find(f"{_W}rPr")
            own = None if look is None else look.find(f"{_W}vanish")
            style = None if look is None else look.find(f"{_W}rStyle")
            by_style = style is not None and style.get(f"{_W}val") in hidden
            if _is_on(own) or (own is None and by_style):
                parent.remove(run)


def _lift_boxes(tree: Element) -> None:
    """Put the paragraphs of text boxes after the paragraph that holds the box."""
    for twins in tree.iter(f"{_MC}AlternateContent"):
        choice, older = twins.find(f"{_MC}Choice"), twins.find(f"{_MC}Fallback")
        if choice is not None and older is not None and choice.find(f".//{_W}txbxContent") is not None:
            twins.remove(older)
    for parent in list(tree.iter()):
        for paragraph in parent.findall(f"{_W}p"):
            boxes = list(paragraph.iter(f"{_W}txbxContent"))
            place = list(parent).index(paragraph) + 1
            parent[place:place] = [block for box in boxes for block in box]
            for box in boxes:
                box.clear()


class _Level(NamedTuple):
    start: int
    format: str
    text: str


class _Numbers:
    """Automatic numbers of paragraphs, which Word counts and its files do not state."""

    def __init__(self, numbering: Element, styles: Mapping[str, Element]) -> None:
        self._styles = styles
        levels = {one.get(f"{_W}abstractNumId"): one for one in numbering.iter(f"{_W}abstractNum")}
        self._levels: dict[str, dict[int, _Level]] = {}
        self._of_style: dict[str, tuple[str, int]] = {}
        for number in numbering.findall(f"{_W}num"):
            id = number.get(f"{_W}numId", "")
            kind = number.find(f"{_W}abstractNumId")
            own = levels.get(kind.get(f"{_W}val")) if kind is not None else None
            found = self._levels[id] = dict(_levels(own)) if own is not None else {}
            for change in number.iter(f"{_W}lvlOverride"):
                rank = _int(change.get(f"{_W}ilvl"), 0)
                found.update(_levels(change))
                start = change.find(f"{_W}startOverride")
                if start is not None and rank in found:
                    found[rank] = found[rank]._replace(start=_int(start.get(f"{_W}val"), 1))
            for level in () if own is None else own.iter(f"{_W}lvl"):
                style = level.find(f"{_W}pStyle")
                if style is not None:
                    self._of_style.setdefault(style.get(f"{_W}val", ""), (id, _int(level.get(f"{_W}ilvl"), 0)))
        self._counts: dict[str, list[int]] = {}

    def write(self, tree: Element) -> None:
        """Write each paragraph's number into its text. Lists with bullets stay as they are."""
        for paragraph in tree.iter(f"{_W}p"):
            id, rank = self._of(paragraph)
            text = self._next(id, rank) if rank in self._levels.get(id, ()) else ""
            if not text:
                continue
            about = paragraph.find(f"{_W}pPr")
            if about is not None:
                about[:] = [child for child in about if child.tag != f"{_W}numPr"]
            run = Element(f"{_W}r")
            SubElement(run, f"{_W}t").text = f"{text} "
            paragraph.insert(0 if about is None else 1, run)

    def _of(self, paragraph: Element) -> tuple[str, int]:
        """Return the list that the paragraph belongs to, by itself or by its style, and its level."""
        named = paragraph.find(f"{_W}pPr/{_W}pStyle")
        style = "" if named is None else named.get(f"{_W}val", "")
        found, seen = paragraph.find(f"{_W}pPr/{_W}numPr"), set[str]()
        while found is None and style and style not in seen:
            if style in self._of_style:
                return self._of_style[style]
            seen.add(style)
            about = self._styles.get(style)
            found = None if about is None else about.find(f"{_W}pPr/{_W}numPr")
            before = None if about is None else about.find(f"{_W}basedOn")
            style = "" if before is None else before.get(f"{_W}val", "")
        if found is None:
            return "", 0
        id, level = found.find(f"{_W}numId"), found.find(f"{_W}ilvl")
        return "" if id is None else id.get(f"{_W}val", ""), 0 if level is None else _int(level.get(f"{_W}val"), 0)

    def _next(self, id: str, rank: int) -> str:
        """Count a paragraph of a list's level, and return its number as text; "" in a list with bullets."""
        levels, counts = self._levels[id], self._counts.setdefault(id, [])
        if levels[rank].format in ("bullet", "none"):
            return ""
        while len(counts) <= rank:
            above = levels.get(len(counts), levels[rank])
            counts.append(above.start - (len(counts) == rank))
        del counts[rank + 1 :]
        counts[rank] += 1

        def number(found: re.Match[str]) -> str:
            own = int(found[1]) - 1
            return _FORMATS.get(levels[own].format, str)(counts[own]) if own in levels and own < len(counts) else ""

        return re.sub(r"%(\d)", number, levels[rank].text)


def _levels(numbering: Element) -> Iterator[tuple[int, _Level]]:
    for level in numbering.iter(f"{_W}lvl"):
        start, format, text = (
            "" if (one := level.find(f"{_W}{name}")) is None else one.get(f"{_W}val", "")
            for name in ("start", "numFmt", "lvlText")
        )
        if (rank := _int(level.get(f"{_W}ilvl"), 0)) < _MOST_LEVELS:
            yield rank, _Level(_int(start, 1), format, text)


def _int(text: str | None, default: int) -> int:
    return int(text) if text and re.fullmatch(r"\d{1,6}", text) else default


def _letters(number: int) -> str:
    """Return Word's letter of a number: after z comes aa, after that bb."""
    rest = max(0, number - 1)
    return chr(ord("a") + rest % 26) * min(rest // 26 + 1, 8)


def _roman(number: int) -> str:
    out, rest = "", min(number, 4999)
    for value, letters in _ROMAN.items():
        out += letters * (rest // value)
        rest %= value
    return out


_FORMATS: Mapping[str, Callable[[int], str]] = {
    "decimalZero": "{:02}".format,
    "lowerLetter": _letters,
    "upperLetter": lambda number: _letters(number).upper(),
    "lowerRoman": _roman,
    "upperRoman": lambda number: _roman(number).upper(),
}
