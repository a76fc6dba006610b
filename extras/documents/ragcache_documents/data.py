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


class _Number(str):
    """A number as the file writes it: a float would make 1.10 of a price 1.1, and cannot hold twenty digits."""


class _Pairs(list[tuple[str, Any]]):
    """An object's names and values as pairs, which keep repeated names."""


class _Outline(yaml.SafeDumper):
    """Dumper that writes a text of several lines as lines, characters without escapes, and repeated values in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def analyze_scalar(self, scalar: str) -> Any:
        found = super().analyze_scalar(scalar)
        found.allow_block = found.allow_single_quoted = True
        return found

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)

    def represent_number(self, number: str) -> yaml.ScalarNode:
        tag = self.resolve(yaml.ScalarNode, number, (True, False))  # type: ignore[no-untyped-call]
        return self.represent_scalar(tag, str(number))

    def represent_pairs(self, pairs: _Pairs) -> yaml.MappingNode:
        return self.represent_mapping("tag:yaml.org,2002:map", pairs)


_Outline.add_representer(str, _Outline.represent_text)
_Outline.add_representer(_Number, _Outline.represent_number)
_Outline.add_representer(_Pairs, _Outline.represent_pairs)


def read_json(path: Path, document_id: str) -> Iterator[Document | ReaderError]:
    data = decode(read_bytes(path), path)
    try:
        found = json.loads(
            data, parse_int=_Number, parse_float=_Number, parse_constant=_Number, object_pairs_hook=_Pairs
        )
        text = yaml.dump(found, Dumper=_Outline, allow_unicode=True, sort_keys=False, width=float("inf"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"the file is not JSON ({error})"
        raise ReaderError(path, reason) from error
    title = dict(found).get("title") if isinstance(found, _Pairs) else None
    # YAML ends a document that is a single plain value with "...".
    text = storable(text).removesuffix("\n...\n") if found not in (None, []) else ""
    yield Document(document_id, text, title=title if isinstance(title, str) else "", source=document_id)
