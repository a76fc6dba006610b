"""JSON: its names and values as YAML, which reads like an outline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers.plain import decode, read_bytes, storable


class _Outline(yaml.SafeDumper):
    """Writes a text of several lines as lines, and what occurs twice in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)


_Outline.add_representer(str, _Outline.represent_text)


def read_json(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = decode(read_bytes(path), path)
    try:
        found = json.loads(data)
        text = yaml.dump(found, Dumper=_Outline, allow_unicode=True, sort_keys=False, width=float("inf"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"the file is not JSON ({error})"
        raise ReaderError(path, reason) from error
    title = found.get("title") if isinstance(found, dict) else None
    text = storable(text).removesuffix("\n...\n") if found not in (None, [], {}) else ""
    yield Document(document_id, text, title=title if isinstance(title, str) else "", source=document_id)
