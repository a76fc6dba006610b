"""PDFs that are written by hand."""

import zlib


def stream(data: bytes) -> bytes:
    packed = zlib.compress(data, 9)
    return b"<</Length %d/Filter/FlateDecode>>\nstream\n%b\nendstream" % (len(packed), packed)


def plain_stream(data: bytes) -> bytes:
    return b"<</Length %d>>\nstream\n%b\nendstream" % (len(data), data)


def pages(count: int, content: bytes) -> bytes:
    """A PDF of so many pages that share one content stream."""
    kids = b" ".join(b"%d 0 R" % (5 + page) for page in range(count))
    page = b"<</Type/Page/Parent 2 0 R/Contents 3 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F 4 0 R>>>>>>"
    return pdf(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count %d/Kids[%b]>>" % (count, kids),
            content,
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            *[page] * count,
        ]
    )


def pdf(objects: list[bytes]) -> bytes:
    """A PDF of these objects, the first of which is the catalogue."""
    body, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(body))
    return body + head + table + tail
