"""Files that are small and cost much to read."""

import zlib


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


def stream(data: bytes) -> bytes:
    packed = zlib.compress(data, 9)
    return b"<</Length %d/Filter/FlateDecode>>\nstream\n%b\nendstream" % (len(packed), packed)


def pages(count: int, content: bytes) -> bytes:
    """So many pages that share one content stream."""
    kids = b" ".join(b"%d 0 R" % (5 + page) for page in range(count))
    page = b"<</Type/Page/Parent 2 0 R/Contents 3 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F 4 0 R>>>>>>"
    return pdf(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Count %d/Kids[%b]>>" % (count, kids),
            stream(content),
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            *[page] * count,
        ]
    )


def inflating_pdf(size: int) -> bytes:
    """One page whose text operators inflate to `size` bytes."""
    line = b"(Alna) Tj 0 -1 Td\n"
    return pages(1, b"BT /F 1 Tf\n" + line * (size // len(line)) + b"ET")


def many_pages_pdf(count: int) -> bytes:
    return pages(count, b"BT /F 1 Tf\n" + b"(Alna) Tj 0 -1 Td\n" * 2000 + b"ET")


def unclosed_html(count: int) -> bytes:
    return b"<b>" * count + b"foo</p>" * count


def attribute_html(count: int) -> bytes:
    return b"<a b='" * count
