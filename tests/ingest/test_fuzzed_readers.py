"""Random files are read or refused, within seconds, and the reading process lives on."""

import json

import pytest
from fuzzing import changed_bytes, counts, inputs, mutated, series
from hypothesis import given
from hypothesis import strategies as st
from pdf_files import pages, plain_stream

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers import SourceFile, read_file

SEEDS = {
    "md": (
        b"---\ntitle: Alna\ntags: [a, b]\n---\n# Alna\n\nA *river*.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        b"```py\nx\n```\n"
    ),
    "txt": "A river.\n\nÄnother \u2028 line\n".encode(),
    "jsonl": b'{"id": "a", "text": "A river.", "metadata": {"x": 1}}\n{"text": "b", "title": "T"}\n',
    "py": b"def river():\n    '''A river.'''\n    return 1\n",
    "json": json.dumps({"a": ["river", {"b": 1}], "text": "x"}).encode(),
    "html": b"<html><head><meta charset=utf-8><title>T</title></head><body><h1>A</h1><p>river<table><tr><td>1</body>",
    "eml": b"From: a@b\nSubject: river\nMIME-Version: 1.0\nContent-Type: text/plain; charset=utf-8\n\nA river.\n",
    "csv": b'a,b\n1,river\n2,"x\ny"\n',
    "rtf": b"{\\rtf1\\ansi A {\\b river}.\\par \\u228?\n}",
    "ipynb": json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A"]}], "nbformat": 4}).encode(),
    "pdf": pages(1, plain_stream(b"BT /F 9 Tf (A river.) Tj ET")),
}


@pytest.mark.parametrize("kind", sorted(SEEDS))
@counts
def test_random_files_are_read_or_refused(tmp_path, kind, count):
    path = tmp_path / f"file.{kind}"
    path.write_bytes(SEEDS[kind])
    assert all(isinstance(record, Document) for record in read_file(SourceFile(path, str(path))))

    @inputs(count // len(SEEDS))
    @given(series(mutated(SEEDS[kind]) | st.binary(max_size=512), changed_bytes))
    def check(files):
        for data in files:
            path.write_bytes(data)
            for record in read_file(SourceFile(path, str(path))):
                assert isinstance(record, Document | ReaderError)

    check()
