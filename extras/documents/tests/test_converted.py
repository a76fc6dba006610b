"""Office documents, e-books, tables, mail, JSON and code, read as ingestion reads them: under its limits."""

import json
import sys
import zipfile
from collections.abc import Mapping
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers import find_files, read_file
from ragcache.ingest.sandbox import IsolatedReader
from ragcache.store.places import PlaceIndex

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
RELATED = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"
HEADING = '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>The Alna</w:t></w:r></w:p>'
POWER = (
    '<w:p><w:r><w:t>It holds 10</w:t></w:r><w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>6</w:t></w:r>'
    "<w:r><w:t> litres.</w:t></w:r></w:p>"
)
SENTENCE = "<w:p><w:r><w:t>It rises near Osby.</w:t></w:r></w:p>"


def zipped(files: dict[str, str | bytes]) -> bytes:
    held = BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return held.getvalue()


def unzipped(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def docx(body: str, more: Mapping[str, str] = MappingProxyType({})) -> bytes:
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    return zipped({
        "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{main}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{PACKAGE}/relationships">'
        f'<Relationship Id="r1" Type="{RELATED}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>',
        **more,
    })  # fmt: skip


def saved(made: Any) -> bytes:
    """Return the bytes of a deck or workbook."""
    held = BytesIO()
    made.save(held)
    return held.getvalue()


def pptx(*titles: str) -> bytes:
    from pptx import Presentation

    deck = Presentation()
    for title in titles:
        slide = deck.slides.add_slide(deck.slide_layouts[5])
        slide.shapes.title.text = title
    return saved(deck)


def xlsx(rows: list[list[object]]) -> bytes:
    from openpyxl import Workbook

    book = Workbook()
    book.active.title = "Rivers"
    for row in rows:
        book.active.append(row)
    return saved(book)


PAGE = '<html xmlns="http://www.w3.org/1999/xhtml"><body><h1>One</h1><p>The Arno.</p></body></html>'


def epub(page: str | bytes = PAGE) -> bytes:
    container = "urn:oasis:names:tc:opendocument:xmlns:container"
    return zipped({
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": f'<container xmlns="{container}" version="1.0"><rootfiles>'
        '<rootfile full-path="book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
        "book.opf": '<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id">'
        '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Rivers of the Vale</dc:title>'
        "<dc:identifier id=\"id\">1</dc:identifier></metadata><manifest>"
        '<item id="one" href="one.xhtml" media-type="application/xhtml+xml"/></manifest>'
        '<spine><itemref idref="one"/></spine></package>',
        "one.xhtml": page,
    })  # fmt: skip


ODF = "urn:oasis:names:tc:opendocument:xmlns"


def odt(body: str, title: str = "") -> bytes:
    names = " ".join(f'xmlns:{name}="{ODF}:{name}:1.0"' for name in ("office", "text", "table", "style"))
    looks = {"T1": 'style:text-position="super 58%"', "T2": 'style:text-line-through-style="solid"', "T3": ""}
    looks["T4"] = 'text:display="none"'
    styles = "".join(
        f'<style:style style:name="{name}"><style:text-properties {look}/></style:style>'
        for name, look in looks.items()
    )
    return zipped({
        "content.xml": f"<office:document-content {names}><office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:body><office:text>{body}</office:text></office:body></office:document-content>",
        "meta.xml": '<meta xmlns:dc="http://purl.org/dc/elements/1.1/">' f"<dc:title>{title}</dc:title></meta>",
    })  # fmt: skip


def table(*rows: list[str]) -> str:
    lines = (f"<table:table-row>{''.join(map(cell, row))}</table:table-row>" for row in rows)
    return f"<table:table>{''.join(lines)}</table:table>"


def cell(text: str, look: str = "") -> str:
    return f"<table:table-cell{look}><text:p>{text}</text:p></table:table-cell>"


def span(style: str, text: str) -> str:
    return f'<text:span text:style-name="{style}">{text}</text:span>'


ODT = (
    "<text:tracked-changes><text:p>Deleted.</text:p></text:tracked-changes>"
    '<text:h text:outline-level="2">The Alna</text:h>'
    f"<text:p>It holds 10{span('T1', '6')} litres &amp; costs {span('T2', '12')}<text:s/>{span('T3', '15')} crowns."
    "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>A note.</text:p></text:note-body>"
    "</text:note> Yes.</text:p><text:list><text:list-item><text:p>Osby</text:p></text:list-item></text:list>"
    f"{table(['river', 'km'], ['Alna', '17'])}"
)
RTF = (
    r"{\rtf1\ansi\ansicpg1252 Caf\'e9 holds 10{\super 6} litres\par and costs {\strike\insrsid7 12} 15 crowns"
    r"{\footnote N.}\par \u26449?}"
)
MAIL = (
    "From: Petra Elley <petra@osby.example>\r\nTo: harbour@osby.example\r\nDate: Fri, 1 May 2020 12:30:00 +0000\r\n"
    "Subject: =?utf-8?q?Caf=C3=A9_at_the_quay?=\r\nMIME-Version: 1.0\r\n"
    "Content-Type: multipart/mixed; boundary=x\r\n\r\n"
    "--x\r\nContent-Type: {}\r\nContent-Transfer-Encoding: 8bit\r\n\r\n{}\r\n"
    "--x\r\nContent-Type: application/pdf\r\nContent-Disposition: attachment; filename=plan.pdf\r\n\r\nno\r\n--x--\r\n"
)
JSON = {"title": "Boats", "note": "first\nsecond", "boats": [{"name": "Möwe", "berth": 3, "owner": None, "sold": "no"}]}

NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {},
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Lengths\n", "\n", "In kilometres."]},
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 1, "source": ["alna = 17"]},
    ],
}
PYTHON = "# Lengths\n\ndef alna():\n    return 17\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("markitdown", reason="needs ragcache-kv[documents]")
    path = tmp_path_factory.mktemp("documents")
    files = {
        "alna.docx": docx(HEADING + SENTENCE),
        "power.docx": docx(POWER),
        "alna.odt": odt(ODT, "Rivers"),
        "bare.odt": odt("<text:p/>"),
        "broken.odt": b"PK",
        "alna.rtf": RTF.encode(),
        "fake.rtf": b"no",
        "plain.eml": MAIL.format("text/plain; charset=iso-8859-1", "Nine o'clock, caf\xe9.").encode("latin-1"),
        "page.eml": MAIL.format("text/html; charset=utf-8", "<p>Room for 10<sup>6</sup>.</p>").encode(),
        "odd.eml": MAIL.format("text/plain; charset=nonsense", "Nine o'clock.").encode(),
        "fake.eml": b"\r\nno mail",
        "boats.json": json.dumps(JSON, ensure_ascii=False).encode(),
        "bare.json": b"{}",
        "broken.json": b'{"a": 1',
        "deep.json": b"[" * 100_000,
        "bare.docx": docx("<w:p/>"),
        "broken.docx": docx(SENTENCE)[:200],
        "deck.pptx": pptx("The Alna", "It rises near Osby"),
        "bare.pptx": pptx(""),
        "table.xlsx": xlsx([["river", "length"], ["Alna", 17]]),
        "bare.xlsx": xlsx([]),
        "book.epub": epub(),
        "notes.ipynb": json.dumps(NOTEBOOK).encode(),
        "table.csv": b"river,length\nAlna,17\n",
        "latin.csv": b"caf\xe9,1\n",
        "alna.py": PYTHON.encode(),
    }
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Document | ReaderError]:
    """Return the documents or errors that a single reading process, with ingestion's limits, makes of each file."""
    reader = IsolatedReader()
    try:
        records = {file.path.name: list(reader.read(file)) for file in find_files([folder]).files}
    finally:
        reader.close()
    assert {len(of_file) for of_file in records.values()} == {1}
    return {name: one for name, (one,) in records.items()}


@pytest.mark.parametrize(
    ("name", "title", "words"),
    [
        ("alna.docx", "The Alna", ["# The Alna", "It rises near Osby."]),
        ("deck.pptx", "The Alna", ["# The Alna", "# It rises near Osby"]),
        ("table.xlsx", "table.xlsx", ["| river | length |", "| Alna | 17 |"]),
        ("book.epub", "Rivers of the Vale", ["# One", "The Arno."]),
        ("notes.ipynb", "Lengths", ["In kilometres.", "```python\nalna = 17\n```"]),
        ("table.csv", "", ["| river | length |", "| Alna | 17 |"]),
        ("power.docx", "", ["It holds 10^6 litres."]),
        (
            "alna.odt",
            "Rivers",
            ["## The Alna", "10^6 litres & costs ~~12~~ 15 crowns.[1] Yes.\n", "- Osby", "| Alna | 17 |"],
        ),
        ("alna.rtf", "", ["Café holds 10^6 litres\nand costs ~~12~~ 15 crowns[1]\n村\n[1] N."]),
        (
            "plain.eml",
            "Café at the quay",
            [
                "# Café at the quay\n\nFrom: Petra Elley <petra@osby.example>\nTo: ",
                "\n\nNine o'clock, café.\n\nAttached, not read: plan.pdf",
            ],
        ),
        ("page.eml", "Café at the quay", ["Room for 10^6."]),
        ("odd.eml", "Café at the quay", ["Nine o'clock."]),
        (
            "boats.json",
            "Boats",
            [
                "title: Boats\nnote: |-\n  first\n  second\nboats:\n- name: Möwe\n  berth: 3\n  owner: null\n"
                "  sold: 'no'"
            ],
        ),
        ("alna.py", "alna.py", ["```py\n# Lengths", "    return 17\n```\n"]),
    ],
)
def test_each_kind_becomes_a_document_under_its_path(found, folder, name, title, words):
    document, path = found[name], str(folder / name)
    assert isinstance(document, Document), document
    assert (document.id, document.source, document.title) == (path, path, title)
    places = [document.text.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bare.docx", "there is no text in it"),
        ("bare.pptx", "there is no text in it"),
        ("bare.xlsx", "there is no text in it"),
        ("broken.docx", "damaged or encrypted"),
        ("bare.odt", "there is no text in it"),
        ("broken.odt", "damaged or encrypted"),
        ("fake.rtf", "not RTF"),
        ("fake.eml", "neither a sender nor a subject"),
        ("bare.json", "there is no text in it"),
        ("broken.json", "not JSON"),
        ("deep.json", "nested too deeply"),
        ("latin.csv", "not UTF-8"),
    ],
)
def test_what_cannot_be_read_says_why(found, folder, name, reason):
    error = found[name]
    assert isinstance(error, ReaderError), error
    assert (error.path, reason in error.reason) == (str(folder / name), True)


def test_what_was_deleted_from_an_odt_is_left_out(found):
    assert "Deleted" not in found["alna.odt"].text
    assert found["alna.odt"].text.endswith("\n\n[1] A note.")


def test_a_mails_headers_are_metadata(found):
    metadata = found["plain.eml"].metadata
    assert (metadata["from"], metadata["date"]) == (
        "Petra Elley <petra@osby.example>",
        "Fri, 01 May 2020 12:30:00 +0000",
    )


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.docx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "markitdown", None)
    (error,) = read_file(find_files([tmp_path]).files[0])
    assert isinstance(error, ReaderError)
    assert 'pip install "ragcache-kv[documents]"' in error.reason


def test_cells_keep_their_own_types(tmp_path):
    rows = [
        ["boat", "owner", "berth", "region", "since"],
        ["Heron", None, 3, "NA", datetime(2020, 5, 1)],
        [None, None, None, None, None],
        ["Swan|II", "Petra\nElley", None, True, datetime(2020, 5, 1, 12, 30)],
        ["Teal", 0.1 + 0.2, 1e-7, "007"],
    ]
    path = tmp_path / "boats.xlsx"
    path.write_bytes(xlsx(rows))
    (document,) = read_file(find_files([path]).files[0])
    assert document.text.splitlines() == [
        "## Rivers",
        "| boat | owner | berth | region | since |",
        "| --- | --- | --- | --- | --- |",
        "| Heron |  | 3 | NA | 2020-05-01 |",
        "| Swan\\|II | Petra Elley |  | TRUE | 2020-05-01 12:30:00 |",
        "| Teal | 0.3 | 1e-07 | 007 |  |",
    ]
    assert places_in(document, "| boat", "| Heron", "| Swan", "| Teal") == [
        {"sheet": "Rivers", "row": row} for row in (1, 2, 4, 5)
    ]


def places_in(document: Document, *words: str) -> list[dict[str, object]]:
    """Return, for each of `words`, the place of the text from there to the end of its line."""
    index = PlaceIndex(document.text, document.places)
    starts = [document.text.index(word) for word in words]
    return [index.between(start, (document.text + "\n").index("\n", start)) for start in starts]


def test_slides_and_rows_are_numbered_as_programs_show_them(found, tmp_path):
    deck = found["deck.pptx"]
    assert places_in(deck, "# The Alna", "# It rises near Osby") == [{"slide": 1}, {"slide": 2}]
    fake = read(tmp_path / "fake.pptx", pptx("<!-- Slide number: 7 -->", "Two"))
    assert places_in(fake, "# Two") == [{"slide": 2}]
    table = read(tmp_path / "a.csv", 'sep=;\nriver;length\n\nAlna;17\n"Ar\nno";4\n')
    assert places_in(table, "| river", "| Alna", "| Ar no") == [{"row": row} for row in (1, 3, 4)]


TITLE = (
    '<w:p><w:pPr><w:pStyle w:val="Titel"/></w:pPr><w:r><w:t>Rivers </w:t></w:r><w:r><w:t>of the Vale</w:t></w:r></w:p>'
)
STYLES = f'<w:styles xmlns:w="{W}"><w:style w:styleId="Titel"><w:name w:val="Title"/></w:style></w:styles>'


@pytest.mark.parametrize(
    ("body", "stated", "title"),
    [
        (TITLE + HEADING, "Old", "Rivers of the Vale"),
        (HEADING, "Rivers", "Rivers"),
        (HEADING, "Word Document", "The Alna"),
        (HEADING, "", "The Alna"),
        (HEADING, "<", "The Alna"),
    ],
)
def test_a_documents_own_title_is_before_its_first_heading(tmp_path, body, stated, title):
    dc = "http://purl.org/dc/elements/1.1/"
    core = f'<p xmlns:dc="{dc}"><dc:title>{stated}</dc:title></p>'
    data = docx(body, {"word/styles.xml": STYLES, "docProps/core.xml": core})
    assert read(tmp_path / "a.docx", data).title == title


def test_decks_and_workbooks_have_the_title_that_they_state(tmp_path):
    for suffix, make in (("pptx", pptx("The Alna")), ("xlsx", xlsx([["river"], ["Alna"]]))):
        core = '<p xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Rivers\nof the Vale</dc:title></p>'
        titled = zipped({**unzipped(make), "docProps/core.xml": core})
        assert read(tmp_path / f"a.{suffix}", titled).title == "Rivers of the Vale"


def read(path: Path, data: bytes | str) -> Document | ReaderError:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    (record,) = read_file(find_files([path]).files[0])
    return record


def test_json_is_read_as_it_is_written(tmp_path):
    """Numbers keep their digits, repeated names are kept, and no character becomes an escape."""
    long = "9" * 5000
    numbers = f'"price": 1.10, "exact": 0.1234567890123456789012, "far": 1e400, "count": {long}, "none": NaN'
    given = (
        "{" + numbers + ', "name": "first", "name": "second", "text": "one \\n\\ttwo", "tab": "a\\tb", "said": "1.10"}'
    )
    assert read(tmp_path / "a.json", given).text.splitlines() == [
        "price: 1.10",
        "exact: 0.1234567890123456789012",
        "far: 1e400",
        f"count: {long}",
        "none: NaN",
        "name: first",
        "name: second",
        "text: |-",
        "  one ",
        "  \ttwo",
        "tab: 'a\tb'",
        "said: '1.10'",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("river;km;note\nAlna;3,50;x,y\n", ["| river | km | note |", "| Alna | 3,50 | x,y |"]),
        ("river\tkm\nAlna\t3\n", ["| river | km |", "| Alna | 3 |"]),
        ("sep=|\nriver|km\nAlna;|3,5\n", ["| river | km |", "| Alna; | 3,5 |"]),
        ('river,km\nAlna,"1,200"\n', ["| river | km |", "| Alna | 1,200 |"]),
        ('river,km\n"a;b",1\n"c;d",2\n', ["| river | km |", "| a;b | 1 |", "| c;d | 2 |"]),
        (
            'river,note\n\nAlna,"two\nlines | bars",more\n',
            ["| river | note |  |", "| Alna | two lines \\| bars | more |"],
        ),
        ("rivers\nAlna, the long one\n", ["| rivers |  |", "| Alna | the long one |"]),
    ],
)
def test_lists_are_told_apart_by_their_own_separator(tmp_path, text, lines):
    head, _, *rows = read(tmp_path / "a.csv", text).text.splitlines()
    assert [head, *rows] == lines


def test_a_formula_without_a_saved_value_stands_itself(tmp_path):
    rows = [["km", "twice"], [17, "=A2*2"], [None, None], [3, 4]]
    assert "| 17 | =A2*2 |\n| 3 | 4 |" in read(tmp_path / "a.xlsx", xlsx(rows)).text


def test_array_formulas_read_the_same_every_time(tmp_path):
    from openpyxl.worksheet.formula import ArrayFormula, DataTableFormula

    rows = [["km", ArrayFormula("B1:B2", "=A2:A3*2")], [17, DataTableFormula("B2", dt2D=True, r1="A2", r2="A3")]]
    text = read(tmp_path / "a.xlsx", xlsx(rows)).text
    assert text.splitlines()[1:] == ["| km | =A2:A3*2 |", "| --- | --- |", "| 17 | =TABLE(A2,A3) |"]


@pytest.mark.parametrize(
    ("value", "number_format", "shown"),
    [
        (0.25, "0%", "25%"),
        (0.285, "0%", "29%"),
        (0.1255, "0.0#%", "12.55%"),
        (1234, "00000", "01234"),
        (5551234, "(00) 000-0000", "(00) 555-1234"),
        (1234.5, '#,##0.00\\ "€"', "1234.50 €"),
        (12, "[$EUR-407] #,##0.00", "EUR 12.00"),
        (-12, '"$"#,##0_);[Red]("$"#,##0)', "($12)"),
        (-3, '0.0" km"', "-3.0 km"),
        (timedelta(hours=36), "[h]:mm", "36:00"),
        (timedelta(hours=1, seconds=5), "[h]:mm:ss", "1:00:05"),
        (0.5, "# ?/?", "0.5"),
        (1500000, '#,##0.0,,"M"', "1500000"),
        (12.5, "General", "12.5"),
    ],
)
def test_cells_read_as_their_format_shows(tmp_path, value, number_format, shown):
    from openpyxl import Workbook

    book = Workbook()
    book.active.cell(1, 1, value).number_format = number_format
    assert read(tmp_path / "a.xlsx", saved(book)).text.splitlines()[1] == f"| {shown} |"


def test_a_csv_cell_may_be_longer_than_pythons_limit(tmp_path):
    long = "It rowed to Osby. " * 8000
    assert f"| Swan | {long.strip()} |" in read(tmp_path / "a.csv", f"boat,log\nSwan,{long}\n").text


def mail(body: str, kind: str = "multipart/mixed; boundary=x") -> str:
    return f"From: a@osby.example\nSubject: Quay\nMIME-Version: 1.0\nContent-Type: {kind}\n\n{body}"


def part(kind: str, body: str, more: str = "", boundary: str = "x") -> str:
    return f"--{boundary}\nContent-Type: {kind}\n{more}\n{body}\n"


ALTERNATIVE = "multipart/alternative; boundary=x"
PDF = part("application/pdf", "no", "Content-Disposition: attachment; filename=plan.pdf\n")


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (mail("K\u016f\u0148.", "text/plain; charset=us-ascii"), ["K\u016f\u0148."]),
        (mail("K\u016f\u0148.", "text/plain"), ["K\u016f\u0148."]),
        (mail("K\xf9\xf2.", "text/plain; charset=windows-1250").encode("latin-1"), ["K\u016f\u0148."]),
        (mail(part("text/plain", " ") + part("text/html", "<p>Nine.</p>") + "--x--", ALTERNATIVE), ["Nine."]),
        (mail(part("text/plain", "Nine.") + part("text/html", "<p>Nine.</p>") + "--x--", ALTERNATIVE), ["Nine."]),
        (
            mail(part("text/plain", "Nine.") + part("image/png", "no") + part("text/plain", "Ten.") + "--x--"),
            ["Nine.", "Ten.", "Attached, not read: image/png"],
        ),
        (
            mail(
                part("text/plain", "Nine.", boundary="y")
                + part("multipart/mixed; boundary=x", part("text/html", "<p>Nine.</p>") + PDF + "--x--", boundary="y")
                + "--y--",
                "multipart/alternative; boundary=y",
            ),
            ["Nine.", "Attached, not read: plan.pdf"],
        ),
        (
            mail(
                part("text/html", "<p>Nine.</p>") + part("image/png", "no", "Content-ID: <1>\n") + "--x--",
                "multipart/related; boundary=x",
            ),
            ["Nine."],
        ),
        (mail("no", "application/pdf; name=plan.pdf"), ["Attached, not read: plan.pdf"]),
        (mail(part("message/rfc822", "From: b@osby.example\n\nTen.") + "--x--"), ["From: b@osby.example", "Ten."]),
    ],
)
def test_all_that_a_mail_says_is_read_or_named(tmp_path, data, texts):
    assert read(tmp_path / "a.eml", data).text.split("\n\n") == ["# Quay", "From: a@osby.example", *texts]


def test_a_mail_in_another_encoding_than_it_states_is_refused(tmp_path):
    data = mail("Caf\xe9.", "text/plain; charset=utf-8").encode("latin-1")
    assert "state its encoding" in read(tmp_path / "a.eml", data).reason
    nested = "".join(f"--{rank}\nContent-Type: multipart/mixed; boundary={rank + 1}\n\n" for rank in range(2000))
    assert "nested too deeply" in read(tmp_path / "b.eml", mail(nested, "multipart/mixed; boundary=0")).reason


def test_cells_of_an_odt_keep_their_columns(tmp_path):
    empty, covered = '<table:table-cell table:number-columns-repeated="2"/>', "<table:covered-table-cell/>"
    rows = (f"{empty}{cell('third')}", f"{cell('wide')}{covered}{cell('last')}")
    body = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    text = read(tmp_path / "a.odt", odt(f"<table:table>{body}</table:table>")).text
    assert text.splitlines()[::2] == ["|  |  | third |", "| wide |  | last |"]


def test_an_odt_needs_no_more_than_its_text(tmp_path):
    content = unzipped(odt('<text:h text:outline-level="9">Deep</text:h>'))["content.xml"]
    document = read(tmp_path / "a.odt", zipped({"content.xml": content}))
    assert (document.text, document.title) == ("###### Deep", "Deep")


def test_bytes_of_rtf_are_of_its_own_encoding(tmp_path):
    assert read(tmp_path / "a.rtf", b"{\\rtf1\\ansi\\ansicpg1250 k\xf9\\'f2}").text == "k\u016f\u0148"


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-16"])
def test_pages_of_a_book_may_be_in_another_encoding(tmp_path, encoding):
    page = f'<?xml version="1.0" encoding="{encoding}"?>' + PAGE.replace("The Arno.", "Caf\xe9 Arno.")
    assert "Caf\xe9 Arno." in read(tmp_path / "a.epub", epub(page.encode(encoding))).text


def words(text: str, look: str = "") -> str:
    return f'<w:r><w:rPr>{look}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


@pytest.mark.parametrize(
    ("look", "is_hidden"),
    [("<w:vanish/>", True), ('<w:vanish w:val="0"/>', False), ('<w:rStyle w:val="Draft"/>', True)],
)
def test_hidden_text_of_word_is_left_out(tmp_path, look, is_hidden):
    style = '<w:style w:styleId="Draft"><w:rPr><w:vanish/></w:rPr></w:style>'
    styles = {"word/styles.xml": f'<w:styles xmlns:w="{W}">{style}</w:styles>'}
    data = docx(f"<w:p>{words('It is 12. ')}{words('Raise it.', look)}</w:p>", styles)
    assert read(tmp_path / "a.docx", data).text == ("It is 12." if is_hidden else "It is 12. Raise it.")


def test_text_boxes_are_read_after_their_paragraph(tmp_path):
    mc = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    box = f"<w:txbxContent><w:p>{words('Number 5512.')}</w:p></w:txbxContent>"
    twins = "<mc:Choice>{}</mc:Choice><mc:Fallback>{}</mc:Fallback>"
    twins = f'<mc:AlternateContent xmlns:mc="{mc}">{twins}</mc:AlternateContent>'
    drawn, older = f"<w:drawing>{box}</w:drawing>", f"<w:pict>{box}</w:pict>"
    for boxes in (drawn, twins.format(drawn, older), older):
        data = docx(f"<w:p>{words('Due in May.')}<w:r>{boxes}</w:r></w:p>{SENTENCE}")
        assert read(tmp_path / "a.docx", data).text == "Due in May.\n\nNumber 5512.\n\nIt rises near Osby."


def test_headers_and_footers_of_pages_are_read_once(tmp_path):
    page = f"<w:p>{words('Page ')}<w:r><w:instrText>PAGE</w:instrText></w:r>{words('3')}</w:p>"
    refer = "".join(
        f'<w:sectPr><w:{kind}Reference xmlns:r="{RELATED}" r:id="{id}"/></w:sectPr>'
        for kind, id in (("header", "h1"), ("header", "h2"), ("footer", "f1"))
    )
    parts = {"h1": ("header", "Invoice 117"), "h2": ("header", "Invoice 117"), "f1": ("footer", "Bank of Osby")}
    related = "".join(
        f'<Relationship Id="{id}" Type="{RELATED}/{kind}" Target="{id}.xml"/>' for id, (kind, _) in parts.items()
    )
    files = {
        f"word/{id}.xml": f'<w:hdr xmlns:w="{W}">{page}<w:p>{words(text)}</w:p></w:hdr>'
        for id, (_, text) in parts.items()
    }
    files["word/_rels/document.xml.rels"] = f'<Relationships xmlns="{PACKAGE}/relationships">{related}</Relationships>'
    assert (
        read(tmp_path / "a.docx", docx(SENTENCE + refer, files)).text
        == "Invoice 117\n\nIt rises near Osby.\n\nBank of Osby"
    )


def numbered(text: str, level: int, list: int = 1, style: str = "") -> str:
    named = f'<w:pStyle w:val="{style}"/>' if style else ""
    own = "" if list == 0 else f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{list}"/></w:numPr>'
    return f"<w:p><w:pPr>{named}{own}</w:pPr>{words(text)}</w:p>"


def test_automatic_numbers_of_word_are_written_out(tmp_path):
    def level(rank: int, format: str, text: str, more: str = "") -> str:
        looks = f'<w:start w:val="1"/><w:numFmt w:val="{format}"/><w:lvlText w:val="{text}"/>{more}'
        return f'<w:lvl w:ilvl="{rank}">{looks}</w:lvl>'

    kinds = [
        level(0, "decimal", "%1", '<w:pStyle w:val="Clause"/>') + level(1, "decimal", "%1.%2"),
        level(0, "lowerLetter", "(%1)") + level(1, "upperRoman", "%2)"),
        level(0, "bullet", "-"),
    ]
    numbering = "".join(
        f'<w:abstractNum w:abstractNumId="{rank}">{kind}</w:abstractNum>' for rank, kind in enumerate(kinds)
    )
    starts = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="27"/></w:lvlOverride>'
    numbering += "".join(
        f'<w:num w:numId="{rank}"><w:abstractNumId w:val="{kind}"/>{more}</w:num>'
        for rank, kind, more in ((1, 0, ""), (2, 1, ""), (3, 1, starts), (4, 2, ""))
    )
    related = f'<Relationship Id="n" Type="{RELATED}/numbering" Target="numbering.xml"/>'
    files = {
        "word/numbering.xml": f'<w:numbering xmlns:w="{W}">{numbering}</w:numbering>',
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{PACKAGE}/relationships">{related}</Relationships>',
    }
    body = [
        numbered("General.", 0), numbered("Payment.", 0), numbered("Fees.", 1), SENTENCE, numbered("Late fees.", 1),
        numbered("By style.", 0, list=0, style="Clause"), numbered("In winter", 0, 2), numbered("In May", 1, 2),
        numbered("Later", 0, 3), numbered("Point", 0, 4),
    ]  # fmt: skip
    assert read(tmp_path / "a.docx", docx("".join(body), files)).text.split("\n\n") == [
        "1 General.", "2 Payment.", "2.1 Fees.", "It rises near Osby.", "2.2 Late fees.", "3 By style.",
        "(a) In winter", "I) In May", "(aa) Later", "- Point",
    ]  # fmt: skip


def test_slides_say_what_they_show(tmp_path):
    from pptx import Presentation

    deck = Presentation()
    for title in ("Fees", "Old fees", "Rooms"):
        slide = deck.slides.add_slide(deck.slide_layouts[5])
        slide.shapes.title.text = title
        slide.notes_slide.notes_text_frame.text = f"Say {title}."
    deck.slides[1]._element.set("show", "0")
    line = deck.slides[0].shapes.title.text_frame.paragraphs[0]
    for text, attribute, value in (
        ("10", "", ""),
        ("6", "baseline", "30000"),
        (" or ", "", ""),
        ("12", "strike", "sngStrike"),
    ):
        run = line.add_run()
        run.text = text
        if attribute:
            run.font._element.set(attribute, value)
    grid = deck.slides[2].shapes.add_table(3, 2, 0, 0, 99, 99).table
    for row, cells in enumerate([("pier", "boat"), ("A | B", "Heron"), ("", "Swan")]):
        for column, text in enumerate(cells):
            grid.cell(row, column).text = text
    grid.cell(1, 0).merge(grid.cell(2, 0))
    document = read(tmp_path / "a.pptx", saved(deck))
    assert "Fees10^6 or ~~12~~" in document.text
    assert "Old fees" not in document.text
    assert "| A \\| B | Heron |\n| A \\| B | Swan |" in document.text
    assert places_in(document, "# Rooms") == [{"slide": 3}]


def test_merged_and_hidden_cells_of_a_sheet(tmp_path):
    from openpyxl import Workbook

    book = Workbook()
    sheet = book.active
    for row in (["club", "secret", "member"], ["Heron", 1, "Ann"], [None, 2, "Bo"], [None, 3, "Cy"], ["Swan", 4, "Di"]):
        sheet.append(row)
    sheet.merge_cells("A2:A4")
    sheet.row_dimensions[3].hidden = True
    sheet.column_dimensions["B"].hidden = True
    book.create_sheet("Old").append(["draft"])
    book["Old"].sheet_state = "hidden"
    document = read(tmp_path / "a.xlsx", saved(book))
    assert document.text.splitlines() == [
        "## Sheet", "| club | member |", "| --- | --- |", "| Heron | Ann |", "| Heron | Cy |", "| Swan | Di |",
    ]  # fmt: skip
    assert places_in(document, "| Heron | Cy") == [{"sheet": "Sheet", "row": 4}]


def test_an_odt_says_what_it_shows(tmp_path):
    rows = [
        cell("Heron", ' table:number-rows-spanned="2"') + cell("Ann"),
        "<table:covered-table-cell/>" + cell("Bo"),
    ]
    body = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    body += f'<table:table-row table:visibility="collapse">{cell("Old") * 2}</table:table-row>'
    data = odt(f"<text:p>It is 12.{span('T4', ' Raise it.')}</text:p><table:table>{body}</table:table>")
    text = read(tmp_path / "a.odt", data).text
    assert text.splitlines() == ["It is 12.", "", "| Heron | Ann |", "| --- | --- |", "| Heron | Bo |"]


def test_rtf_leaves_out_what_was_deleted_or_hidden(tmp_path):
    said = r"{\rtf1\ansi It is {\deleted 12}{\revised 15}.\deleted no\deleted0  Now\v  draft \'e9\v0 "
    said += r"{\footnote A {\b bold} note.} ends.}"
    assert read(tmp_path / "a.rtf", said).text == "It is 15. Now[1] ends.\n[1] A bold note."
