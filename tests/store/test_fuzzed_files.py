"""Random block files and filters end in a result or a typed error, within seconds."""

import numpy as np
import pytest
from blocks import make_block, make_key, make_mixed_block, packed, same, unpacked
from fuzzing import changed_bytes, changed_json, counts, inputs, json_values, mutated, series
from hypothesis import given
from hypothesis import strategies as st

from ragcache.codecs import get_codec
from ragcache.codecs.block_file import pack_block, unpack_block
from ragcache.errors import DamagedBlockError, FilterError, SchemaVersionError
from ragcache.seal import UNSEALED
from ragcache.store.documents import DocumentStore
from ragcache.store.records import NewChunk, NewDocument

KEY = make_key(1)
SEEDS = [
    pack_block(KEY, block, get_codec(codec), UNSEALED)[0]
    for codec, block in (("raw", make_block(1)), ("int8", make_block(2)), ("int4", make_mixed_block(3)))
]
BLOCK = make_block(1)
HEADER_WORDS = ["seal", "codec", "format_version", "codec_version", "num_tokens", "dtype", "shape", "data_offsets"]


def read(data: bytes) -> None:
    try:
        same(unpack_block("a fuzzed file", KEY, bytearray(data), None, UNSEALED), BLOCK)
    except (DamagedBlockError, SchemaVersionError):
        return


@counts
def test_random_block_files_are_damage(count):
    @inputs(count)
    @given(series(st.sampled_from(SEEDS).flatmap(mutated) | st.binary(max_size=4096), changed_bytes))
    def check(files):
        for data in files:
            read(data)

    check()


@counts
def test_sealed_files_of_a_broken_writer_are_damage(count):
    """The seal is whole, so that the parsers see what is in them."""

    values = json_values(HEADER_WORDS, ["F32", "I8", "raw", "int8", "1", "5"])
    ranks = st.integers(0, 59)  # a multiple of most numbers of parts and fields

    def broken(file, changes):
        header, rest = unpacked(file)
        for part, field, value in changes:
            name = sorted(header)[part % len(header)]
            entry = header[name]
            if isinstance(entry, dict) and field is not None:
                fields = [*sorted(entry), "x"]
                entry[fields[field % len(fields)]] = value
            else:
                header[name] = value
        return header, rest

    def change(file, random):
        header, rest = file
        found = changed_json(header, random, [*header, *HEADER_WORDS])
        return (found if isinstance(found, dict) else header), rest

    changes = st.lists(st.tuples(ranks, st.none() | ranks, values), max_size=3)

    @inputs(count)
    @given(series(st.builds(broken, st.sampled_from(SEEDS), changes), change))
    def check(files):
        for header, rest in files:
            read(packed(header, rest, KEY))

    check()


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    with DocumentStore.open(tmp_path_factory.mktemp("fuzzed") / "store.sqlite3") as documents:
        for id, metadata in (("a", {"year": 2024, "tags": ["x"]}), ("b", {"name": "Alna", "ok": True, "none": None})):
            new = NewDocument(id, id, "hash", metadata)
            documents.replace_document(new, [NewChunk(f"{id}#0", "words", [1], np.ones(4, np.float32))])
        yield documents


@counts
def test_random_filters_are_answered_or_refused(documents, count):
    names = [
        "$and", "$or", "$not", "$eq", "$ne", "$in", "$nin", "$gt", "$gte", "$lt", "$lte", "$contains",
        "$glob", "$exists", "year", "tags", "name", "ok", "none", "source",
    ]  # fmt: skip

    filters = st.dictionaries(st.sampled_from(names), json_values(names, ["Alna", "*", "x", "a"]), max_size=4)

    @inputs(count)
    @given(series(filters, lambda where, random: changed_json(where, random, names)))
    def check(filters):
        for where in filters:
            try:
                assert len(documents.documents(where)) <= 2
            except FilterError:
                continue

    check()
