"""Mail: who wrote what to whom and when, the text, and the names of what is attached."""

from __future__ import annotations

from collections.abc import Iterator
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document, headed
from ragcache.ingest.readers.plain import read_bytes, storable
from ragcache_documents.html import markdown_of

HEADERS = ("From", "To", "Cc", "Date")


def read_eml(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    mail = message_from_bytes(read_bytes(path), _class=EmailMessage, policy=default)
    said = {name: " ".join(storable(str(mail[name])).split()) for name in HEADERS if mail[name]}
    subject = " ".join(storable(str(mail["Subject"] or "")).split())
    if not said and not subject:
        raise ReaderError(path, "this is no mail (it has neither a sender nor a subject)")
    attached = [storable(part.get_filename() or part.get_content_type()) for part in mail.iter_attachments()]
    parts = ["\n".join(f"{name}: {value}" for name, value in said.items()), _body(mail, path)]
    parts += [f"Attached, not read: {', '.join(attached)}"] if attached else []
    text = headed(subject, "\n\n".join(part for part in parts if part))
    yield Document(document_id, text, {name.lower(): said[name] for name in said}, subject, document_id)


def _body(mail: EmailMessage, path: Path) -> str:
    """The plain text, or the page as its reader makes it; "" where there is neither."""
    part = mail.get_body(("plain", "html"))
    if part is None:
        return ""
    try:
        text = str(part.get_content())
    except LookupError:  # an encoding that nobody knows
        payload = part.get_payload(decode=True)
        text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
    text = storable(text).replace("\r\n", "\n").strip()
    return markdown_of(text, path)[1] if text and part.get_content_subtype() == "html" else text
