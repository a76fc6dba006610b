"""Documents and errors that the readers of web pages and of PDF make of good and bad files."""

import io
import random
import time

import pytest
from pypdf import PdfReader, PdfWriter
from read_files import error_of, read_one, read_path
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.pdfgen import canvas
from reportlab.platypus import Paragraph, SimpleDocTemplate

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode_stated
from ragcache_documents.html import _filled_down, _page_title
from ragcache_documents.pdf import join_wrapped_lines

# HTML

PAGE = """<!doctype html><html><head><title> The  Alna </title><style>p {color: red}</style></head><body>
<nav><a href="/">Home</a></nav><h1>The <em>Alna</em></h1><p>The river
   rises <b>near</b>&nbsp;Osby.<br>It ends in a lake.</p><!-- hidden --><script>alert("x")</script>
<ul><li>First</li><li>Second <p>inner</p></li></ul>
<pre><code>def f():
    return `1`

</code></pre><table><tr><th>Town</th><th>Year</th></tr><tr><td>Osby</td><td>1901</td></tr></table>
<div>Loose <span>words</span></div></body></html>"""


def test_html_becomes_its_visible_text_in_blocks(write):
    document = read_one(write("a.html", PAGE))
    assert document.title == "The Alna"
    assert document.text == (
        "# The Alna\n\nThe river rises near Osby.\nIt ends in a lake.\n\n- First\n\n- Second\n\n  inner\n\n"
        "```\ndef f():\n    return `1`\n```\n\n| Town | Year |\n| --- | --- |\n| Osby | 1901 |\n\nLoose words"
    )


@pytest.mark.parametrize(
    "page",
    [
        "<!-- <title>Old</title> --><head><title>Fees &amp; rules</title></head><p>x",
        "<script>'<title>Old</title>'</script><style><title>Old</title></style><title>Fees &amp; rules</title><p>x",
        "<svg><title>Icon</title></svg><svg/><meta name='<title>Old</title>'><TITLE lang=en>Fees &amp;\n rules</title>",
        "<a><svg><title>Icon</title></svg></a><template><title>Old</title></template><h1>Fees &amp; rules</h1><p>x",
        "<title> </title><h1>Fees &amp; rules</h1><p>x",
        "<p>x<title>Fees &amp; rules</title>",
    ],
)
def test_a_pages_title_is_its_own(write, page):
    assert read_one(write("a.html", page + "<p>y")).title == "Fees & rules"


def test_titles_are_found_in_linear_time(write):
    for part in ("<!--", "<script>", "<svg>", '<a "', "<a '", "<title", "<p>x</p>"):
        page = part * 100_000 + "<p>y"
        started = time.perf_counter()
        _page_title(page)
        assert time.perf_counter() - started < 2, part


def test_html_in_the_encoding_that_it_declares(write):
    page = '<html><head><meta charset="iso-8859-1"></head><body><p>Størrelse</p></body></html>'
    assert read_one(write("a.html", page.encode("latin-1"))).text == "Størrelse"
    assert "declares" in error_of(write("b.html", page.replace("iso-8859-1", "nonsense").encode("latin-1")))
    assert "no text" in error_of(write("c.html", "<html><body><script>1</script></body></html>"))


def test_html_nested_without_end_is_read_or_refused(write):
    (result,) = read_path(write("deep.html", "<div>" * 20_000 + "deep"))
    assert "nested too deeply" in result.reason
    (result,) = read_path(write("fences.html", "<pre>" + "`" * 5 + "\ncode</pre>"))
    assert result.text == "``````\n`````\ncode\n``````"


def test_html_shows_what_the_page_shows(write):
    page = (
        "<p>1. Opening\n hours</p><p># none</p><ol start=3><li>a<li>b</ol><div style='display:none'>a tab</div>"
        "<form><label>Berth</label></form><div class='menu'>Soup</div><blockquote><b>q</b></blockquote>"
        "<pre>1\\. x  \n\\- y</pre>"
    )
    assert read_one(write("a.html", page)).text == (
        "1. Opening hours\n\n\\# none\n\n3. a\n4. b\n\na tab\n\nBerth\n\nSoup\n\n> q\n\n```\n1\\. x  \n\\- y\n```"
    )


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("10<sup>6</sup> litres", "10^6 litres"),
        ("1,200<sup><a href='#n3'>3</a></sup> crowns", "1,200[3] crowns"),
        ("tides<sup><a href='#n1'>[1]</a></sup>", "tides[1]"),
        ("the 2<sup>nd</sup> berth", "the 2nd berth"),
        ("CO<sub>2</sub>", "CO2"),
        ("tides<sup><span><a href='notes.html#n1'>1</a></span></sup>", "tides[1]"),
        ("<a href='#x'>a</a> 10<sup>6</sup> litres", "a 10^6 litres"),
        ("costs <del>12</del> <s>13</s> 15 crowns", "costs ~~12~~ ~~13~~ 15 crowns"),
    ],
)
def test_raised_and_struck_text_joins_no_other(write, markup, text):
    assert read_one(write("page.html", f"<p>{markup}</p>")).text == text


@pytest.mark.parametrize("declared", ["utf-16", "UTF-16LE", "unicode", "utf-32"])
@pytest.mark.parametrize("pad", ["", " "])
def test_a_page_that_declares_utf_16_in_ascii_is_utf_8(write, declared, pad):
    page = f"<head><meta charset='{declared}'></head><body><p>Caf\u00e9 at nine.</p>{pad}</body>"
    assert read_one(write("page.html", page)).text == "Caf\u00e9 at nine."


@pytest.mark.parametrize(
    ("declared", "data", "text"),
    [
        ("iso-8859-1", b"It\x92s 5 \x80.", "It\u2019s 5 \u20ac."),
        ("us-ascii", b"\x81 5 \x80.", "\x81 5 \x80."),
        ("iso-8859-1", "Caf\u00e9".encode(), "Caf\u00e9"),
        ("iso-8859-1", b"\xef\xbb\xbfCaf\xc3\xa9", "Caf\u00e9"),
        ("gb2312", "\u6731\u9555\u57fa".encode("gbk"), "\u6731\u9555\u57fa"),
        ("shift_jis", "\u2460\u9ad9\u6a4b".encode("cp932"), "\u2460\u9ad9\u6a4b"),
        ("x-sjis", "\u6a4b".encode("cp932"), "\u6a4b"),
        ("ks_c_5601-1987", "\ud3b2\uc2dc".encode("cp949"), "\ud3b2\uc2dc"),
        ("windows-1250", b"K\xf9\xf2", "K\u016f\u0148"),
    ],
)
def test_names_of_encodings_mean_what_browsers_mean(declared, data, text):
    assert decode_stated(data, declared, "a") == text


def test_formulas_are_read_once(write):
    drawn = "<span class=katex-html aria-hidden=true><span>r2</span></span>"
    formula = f"<span class=katex><span><math><msup><mi>r</mi><mn>2</mn></msup></math></span>{drawn}</span>"
    assert read_one(write("a.html", f"<p>It is {formula} wide.</p>")).text == "It is r^2 wide."


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ("<tr><td rowspan=2>Heron<td>Ann<tr><td>Bo<tr><td>Swan<td>Di", ["Heron | Ann", "Heron | Bo", "Swan | Di"]),
        (
            "<tr><td>1</td><td rowspan='0'>all</td></tr><tr><td>2</td></tr><tr><td>3</td></tr>",
            ["1 | all", "2 | all", "3 | all"],
        ),
        ("<tr><td rowspan=2 colspan=2>ab</td><td>c</td></tr><tr><td>d</td></tr>", ["ab | | c", "ab | ab | d"]),
        (f"<tr><td rowspan=2>{'x' * 9999}</td><td>c</td></tr><tr><td>d</td></tr>", [f"{'x' * 9999} | c", "| d"]),
        (
            "<tr><td rowspan=2>out</td><td><table><tr><td>in</td></tr></table></td></tr><tr><td>d</td></tr>",
            ["out | in", "out | d"],
        ),
    ],
)
def test_cells_that_span_rows_are_in_each_of_them(write, rows, lines):
    head, _, *rest = read_one(write("a.html", f"<table>{rows}</table>")).text.splitlines()
    assert [line.strip("|").strip() for line in (head, *rest)] == [line.strip() for line in lines]


def test_rows_that_span_are_filled_in_linear_time(write):
    page = "<table>" + "<tr>" + "<td rowspan=65000>cell</td>" * 200 + "<tr><td>x" * 2000 + "</table>"
    started = time.perf_counter()
    assert len(_filled_down(page)) < 200 * 2000 * 20
    assert time.perf_counter() - started < 5


# PDF


def pdf_of(pages: list[str], title: str | None = None) -> bytes:
    stream = io.BytesIO()
    page = canvas.Canvas(stream, pagesize=A4)
    if title:
        page.setTitle(title)
    for text in pages:
        for row, line in enumerate(text.splitlines()):
            page.drawString(72, 760 - 16 * row, line)
        page.showPage()
    page.save()
    return stream.getvalue()


def test_pdf_pages_and_title(write):
    document = read_one(path := write("a.pdf", pdf_of(["Page one.", "Page two."], "The Alna")))
    assert (document.id, document.title, document.text) == (str(path), "The Alna", "Page one.\n\nPage two.")
    assert read_one(write("b.pdf", pdf_of(["Text."]))).title == ""
    assert read_one(write("c.pdf", pdf_of(["Text."], "Microsoft Word - c.docx"))).title == ""


def test_pages_are_called_what_the_pdf_calls_them(write):
    """Blank pages count, too."""
    stream = io.BytesIO()
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf_of(["Preface.", "", "Chapter one.", "More."]))))
    writer.set_page_label(0, 1, style="/r")
    writer.set_page_label(2, 3, style="/D", prefix="A-")
    writer.write(stream)
    document = read_one(write("a.pdf", stream.getvalue()))
    found = [(document.text[place.start :].partition("\n")[0], dict(place.fields)) for place in document.places]
    assert found == [
        ("Preface.", {"page": 0, "page_label": "i"}),
        ("Chapter one.", {"page": 2, "page_label": "A-1"}),
        ("More.", {"page": 3, "page_label": "A-2"}),
    ]
    assert [place.fields["page_label"] for place in read_one(write("b.pdf", pdf_of(["One.", "Two."]))).places] == [
        "1",
        "2",
    ]


def test_pdf_paragraphs_wrapped_by_a_typesetter_are_unwrapped_and_kept_apart(tmp_path):
    style = getSampleStyleSheet()["Normal"]
    paragraphs = [
        " ".join(f"Town{n} has mill number {i}, by the river Alna." for i in range(n)) for n in (7, 10, 11, 12)
    ]
    path = tmp_path / "a.pdf"
    SimpleDocTemplate(str(path), pagesize=A4).build([Paragraph(text, style) for text in paragraphs])
    wrapped = PdfReader(path).pages[0].extract_text().splitlines()
    lines = read_one(path).text.splitlines()
    assert " ".join(lines) == " ".join(paragraphs)
    assert len(wrapped) > 12
    # Every paragraph begins a line, and a line ends only where a sentence does.
    assert all(any(line.startswith(text[:40]) for line in lines) for text in paragraphs)
    assert all(line.endswith("Alna.") for line in lines)


def test_wrapped_lines_join_and_lists_and_short_lines_stay():
    wrapped = "This is a line that was wrapped at the mar-\ngin and goes on to here, where it\nends at last."
    rest = "- an item\n- another\nShort."
    joined = "This is a line that was wrapped at the margin and goes on to here, where it ends at last."
    assert join_wrapped_lines(f"Title\n\n{wrapped}\n{rest}\n") == f"Title\n\n{joined}\n{rest}"
    assert join_wrapped_lines("") == ""


@pytest.mark.parametrize(
    "page",
    [
        "Boat fees 2024\nHeron 9 m 12.50\nSwan 30.00\nOtter 7 m",
        "Petra Elley\n12 Harbour Road\nEast Thornbury upon Osby, near the lake",
    ],
)
def test_pages_of_short_lines_keep_them(page):
    assert join_wrapped_lines(page) == page


def test_what_was_filled_into_a_form_is_read(write):
    stream = io.BytesIO()
    page = canvas.Canvas(stream)
    page.drawString(72, 750, "Application")
    form = page.acroForm
    form.textfield(name="name", value="Petra Elley", tooltip="Full name", x=120, y=690, width=200, height=20)
    form.textfield(name="empty", x=120, y=600, width=200, height=20)
    form.textfield(name="secret", value="hunter2", fieldFlags="password", x=120, y=500, width=200, height=20)
    form.choice(name="boat", value="Heron", options=["Heron", "Swan"], x=120, y=650, width=100, height=20)
    form.checkbox(name="insured", checked=True, x=120, y=550)
    form.checkbox(name="sold", checked=False, x=120, y=530)
    page.save()
    assert read_one(write("a.pdf", stream.getvalue())).text.splitlines() == [
        "Application",
        "Full name: Petra Elley",
        "boat: Heron",
        "insured: Yes",
    ]


def test_pdfs_that_cannot_be_read_say_why(write, tmp_path):
    assert "OCR" in error_of(write("scan.pdf", pdf_of(["", ""])))
    assert "not a PDF" in error_of(write("fake.pdf", "hello"))
    assert "empty" in error_of(write("empty.pdf", b""))
    good = pdf_of(["Some text."])
    assert "damaged" in error_of(write("cut.pdf", good[: len(good) // 3]))
    writer = PdfWriter(clone_from=io.BytesIO(good))
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    assert "password" in error_of(tmp_path / "locked.pdf")


def test_a_pdf_flipped_anywhere_is_read_or_refused_but_never_fatal(write):
    good, rng = pdf_of(["Some text about the Alna.", "More."]), random.Random(4)
    for _ in range(60):
        bad = bytearray(good)
        for _ in range(8):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        (result,) = read_path(write("bad.pdf", bytes(bad)))
        assert isinstance(result, Document | ReaderError)
