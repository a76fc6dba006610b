"""Mail: sender, recipients and date, the text, and the names of the attachments."""

from __future__ import annotations

from collections.abc import Iterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document, headed
from ragcache.ingest.readers.plain import decode, decode_stated, read_bytes, storable
from ragcache_documents.html import markdown_of

HEADERS = ("From", "To", "Cc", "Date")


def read_eml(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = read_bytes(path)
    try:
        document = _document(message_from_bytes(data, _class=EmailMessage, policy=default), path, document_id)
    except (MemoryError, ReaderError):
        raise
    except RecursionError as error:
        raise ReaderError(path, "its parts are nested too deeply") from error
    except Exception as error:  # the parser of headers raises any kind
        raise ReaderError(path, f"the mail is damaged ({type(error).__name__}: {error})") from error
    yield document


def _document(mail: EmailMessage, path: Path, id: str) -> Document:
    said, subject = _said(mail)
    if not said and not subject:
        raise ReaderError(path, "this is no mail (it has neither a sender nor a subject)")
    found = _read(mail, path)
    parts = [_headers(said), *found.texts]
    parts += [f"Attached, not read: {', '.join(found.attached)}"] if found.attached else []
    text = headed(subject, "\n\n".join(part for part in parts if part))
    return Document(id, text, {name.lower(): said[name] for name in said}, subject, id)


def _said(mail: EmailMessage) -> tuple[dict[str, str], str]:
    """Return the headers that are read, and the subject."""
    said = {name: " ".join(storable(str(mail[name])).split()) for name in HEADERS if mail[name]}
    return said, " ".join(storable(str(mail["Subject"] or "")).split())


def _headers(said: dict[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in said.items())


class _Found(NamedTuple):
    """Texts to be read, and names of the parts that are not."""

    texts: list[str]
    attached: list[str]


def _read(part: EmailMessage, path: Path) -> _Found:
    """Return a part's texts and the names of its attachments. Of alternatives, only the first with text is read."""
    kind = part.get_content_type()
    if kind.startswith("multipart/"):
        inner = [_read(one, path) for one in part.iter_parts() if isinstance(one, EmailMessage)]
        texts = [found.texts for found in inner if found.texts]
        texts = texts[:1] if kind == "multipart/alternative" else texts
        return _Found([text for some in texts for text in some], [name for found in inner for name in found.attached])
    if kind == "message/rfc822":  # a forwarded mail, whose own subject heads it
        forwarded = _Found([], [])
        for mail in part.iter_parts():
            if isinstance(mail, EmailMessage):
                (said, subject), found = _said(mail), _read(mail, path)
                forwarded.texts.extend(filter(None, (headed(subject, _headers(said)), *found.texts)))
                forwarded.attached.extend(found.attached)
        return forwarded
    if kind in ("text/plain", "text/html") and not part.is_attachment():
        return _Found([text] if (text := _text(part, path)) else [], [])
    is_of_a_page = part["Content-ID"] is not None and not part.is_attachment()  # a picture that the mail's page shows
    return _Found([], [] if is_of_a_page else [storable(part.get_filename() or kind)])


def _text(part: EmailMessage, path: Path) -> str:
    """Return the part's text; of a page, its Markdown. UTF-8 is tried if the stated encoding is wrong."""
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes) or not data.strip():
        return ""
    try:
        text = decode_stated(data, part.get_content_charset("utf-8"), path)
    except (LookupError, UnicodeDecodeError):
        text = decode(data, path)
    text = storable(text).strip()
    return markdown_of(text, path)[1] if part.get_content_subtype() == "html" else text
