"""What each reader makes of good and bad files."""

import json
import os
import time
from pathlib import Path

import pytest
from read_files import error_of, read_one, read_path

from ragcache.errors import ReaderError
from ragcache.ingest.document import Document
from ragcache.ingest.readers import find_files, readers

# Text and Markdown


def test_text_is_kept_as_it_stands(write):
    document = read_one(path := write("a.txt", "Størrelse: 好 🎉\n\n  indented\n"))
    assert document == Document(str(path), "Størrelse: 好 🎉\n\n  indented\n", source=str(path))


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".rst"])
def test_files_that_are_no_text_say_why(write, suffix):
    for data, reason in (
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"caf\xe9 and more", "not UTF-8 (byte 0xe9 at offset 3); save it as UTF-8, or state"),
        (b"\xff\xfea", "not UTF-16 (byte"),
        (b"MZ\x00\x01\x02", "binary"),
        ("te\0xt".encode("utf-16"), "NUL"),
        (b"ends in the middle \xe5\xa5", "not UTF-8"),
    ):
        assert reason in error_of(write("bad" + suffix, data))


def test_markdown_has_its_first_heading_as_title(write):
    assert read_one(write("a.md", "intro\n\n## Anna *Berg*\n\n# Other\n")).title == "Anna *Berg*"
    assert read_one(write("b.md", "no heading, # not this\n\n```\n# nor this\n```\n")).title == ""


def test_front_matter_becomes_metadata(write):
    document = read_one(write("a.md", '---\ntitle: "The Alna"\nyear: 1901\ntags:\n  - x\n---\n# Heading\n\nText.\n'))
    assert document.metadata == {"title": "The Alna", "year": 1901, "tags": ["x"]}
    assert document.title == "The Alna"
    assert document.text == "# Heading\n\nText.\n"
    assert "front matter" in error_of(write("b.md", "---\ntitle: x\n---\n\n"))
    ruled = "---\n\nText between rules.\n\n---\n\nMore.\n"
    assert read_one(write("c.md", ruled)).text == ruled


TYPES = [
    "title: 2024", "year: 1901", "ratio: -1.5e3", "draft: false", "country: no", "time: 12:30", "zip: 00123",
    "date: 2024-05-06", "when: 2024-05-06 10:00:00", "tags: [a, 'b c', 3, 2.5, true]", "list:", "  - x", "  - 7",
    "author: {name: J, age: 3}", "quoted: '5'", "empty:", "nothing: ~", "huge: 1e999", "7: key",
]  # fmt: skip
OF_TYPES = {
    "title": 2024, "year": 1901, "ratio": -1500.0, "draft": False, "country": "no", "time": "12:30", "zip": "00123",
    "date": "2024-05-06", "when": "2024-05-06 10:00:00", "tags": ["a", "b c", 3, 2.5, True], "list": ["x", 7],
    "author": {"name": "J", "age": 3}, "quoted": "5", "empty": None, "nothing": None, "huge": "inf", "7": "key",
}  # fmt: skip
# Digits that a number would lose.
DIGITS = ["title: 3.10", "version: 1.10", "exact: 0.12345678901234567890123", "price: 2.5"]
OF_DIGITS = {"title": "3.10", "version": "1.10", "exact": "0.12345678901234567890123", "price": 2.5}
# Objects of Python. A set has another order in each process: the document would change at every ingestion.
OBJECTS = ["tags: !!set {d, b, c, a}", "pairs: !!pairs [a: 1]", "key: !!binary aGVsbG8=", "title: [a, b]"]
OF_OBJECTS = {"tags": ["a", "b", "c", "d"], "pairs": [["a", 1]], "key": "aGVsbG8=", "title": ["a", "b"]}
# No YAML: read line by line.
LINES = ["title: C#: a guide", "year: 1901", "tags: [a, 2]", "bold: *x*", "  inner: left out"]
OF_LINES = {"title": "C#: a guide", "year": 1901, "tags": ["a", 2], "bold": "*x*"}


@pytest.mark.parametrize(
    ("lines", "metadata", "title"),
    [
        (TYPES, OF_TYPES, "2024"),
        (DIGITS, OF_DIGITS, "3.10"),
        (OBJECTS, OF_OBJECTS, "Heading"),
        (LINES, OF_LINES, "C#: a guide"),
    ],
)
def test_front_matter_keeps_its_types(write, lines, metadata, title):
    document = read_one(write("a.md", "\n".join(["---", *lines, "---", "# Heading", ""])))
    assert json.dumps(document.metadata, sort_keys=True) == json.dumps(metadata, sort_keys=True)
    assert (document.title, document.text) == (title, "# Heading\n")
    document.check()


@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.html", "a.jsonl"])
def test_data_of_images_is_no_text(write, name):
    text = f"Before. ![chart](data:image/png;base64,{'iVBOR/+9' * 50}) After."
    given = json.dumps({"text": text}) if name == "a.jsonl" else text
    found = read_one(write(name, given)).text
    assert "iVBOR" not in found
    assert found.startswith("Before. ")
    assert found.endswith(" After.")


def test_a_records_title_and_source_are_words(write):
    path = write("a.jsonl", json.dumps({"text": "Alone.", "title": {"main": "x"}, "source": ["y"]}))
    assert read_one(path) == Document(f"{path}#1", "Alone.", {}, "", f"{path}:1")


@pytest.mark.parametrize(
    "lines",
    ["a: &a [x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(30)), "a: " + "[" * 16_000, "{" * 9_000,
     "k: [1, 2]\n" * 3_000, "a: !!python/object/apply:os.system [ls]\n", "- " * 8_000, "a: " + "9" * 9_000],
    ids=["aliases", "lists", "maps", "long", "tag", "sequences", "number"],
)  # fmt: skip
def test_hostile_front_matter_takes_little_time_and_memory(write, lines):
    path, started = write("a.md", f"---\n{lines}\n---\nText.\n"), time.process_time()
    document = read_one(path)
    assert time.process_time() - started < 5
    assert len(json.dumps(document.metadata)) < 20_000
    assert document.text.endswith("Text.\n")


# JSON lines


def test_json_lines_with_all_fields_and_with_the_least(write):
    lines = [
        {"id": "x/1", "title": "Alna", "text": "A river.", "metadata": {"year": 1901}, "source": "atlas", "other": 1},
        {"content": "Alone."},
        {"id": 7, "text": "Alna is a river.", "title": "Alna"},
    ]
    one, two, three = read_path(path := write("a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert one == Document("x/1", "# Alna\n\nA river.", {"other": 1, "year": 1901}, "Alna", "atlas")
    assert two == Document(f"{path}#2", "Alone.", {}, "", f"{path}:2")
    assert (three.id, three.text) == ("7", "Alna is a river.")


def test_a_records_flat_keys_are_metadata_with_their_types(write):
    record = {"text": "A river.", "content": "left out", "year": 1901, "deep": True, "length": 2.5, "tags": ["a", 1],
              "none": None, "at": {"x": 1}, "metadata": {"year": 1902, "town": "Osby"}}  # fmt: skip
    document = read_one(write("a.jsonl", json.dumps(record)))
    assert document.metadata == {
        "year": 1902, "deep": True, "length": 2.5, "tags": ["a", 1], "none": None, "at": {"x": 1}, "town": "Osby"
    }  # fmt: skip


def test_bad_json_lines_are_reported_and_the_others_go_on(write):
    lines = [
        b'\xef\xbb\xbf{"text": "good"}', b"{", b"[1]", b'{"text": 5}', b'{"text": " "}', b'{"id": {}, "text": "x"}',
        b'{"text": "x", "metadata": [1]}', b'{"text": "caf\xe9"}', b"[" * 100_000, b'{"text": "good too"}',
    ]  # fmt: skip
    path = write("a.jsonl", b"\n".join(lines))
    results = list(read_path(path))
    assert [result.text for result in results if isinstance(result, Document)] == ["good", "good too"]
    errors = [result for result in results if isinstance(result, ReaderError)]
    assert [error.path for error in errors] == [f"{path}:{n}" for n in range(2, 10)]
    for error, reason in zip(
        errors, ["JSON", "object", "text", "text", "id", "metadata", "UTF-8", "JSON"], strict=True
    ):
        assert reason in error.reason
    assert error_of(write("empty.jsonl", b"\n\n")) == "the file is empty"


# Paths


def test_a_folder_is_walked_in_order_without_hidden_and_unknown_files(write, tmp_path):
    for name in ["b.md", "a/z.txt", "a/b/c.TXT", ".git/x.txt", "a/.hidden.md", "picture.png", "Makefile"]:
        write(f"root/{name}", "text")
    found = find_files([tmp_path / "root"])
    ids = [str(tmp_path / "root" / name) for name in ("b.md", "a/z.txt", "a/b/c.TXT")]
    assert [file.id for file in found.files] == ids
    assert [path.name for path in found.skipped] == [".git", "Makefile", "picture.png", ".hidden.md"]
    assert [document.id for document in read_path(tmp_path / "root")] == ids


def test_a_files_id_is_the_same_however_it_is_named(write, tmp_path, monkeypatch):
    file = write("one/sub/a.md", "text")
    other = write("two/sub/a.md", "text")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    (tmp_path / "one" / "z.md").symlink_to(file)
    for place, paths in [
        (tmp_path, ["one", "one/", "./one", "one/sub", "one/sub/a.md", "two/../one", "link", "link/sub/a.md"]),
        (tmp_path, [tmp_path / "one", str(tmp_path / "one/")]),
        (tmp_path / "two", ["../one", "../link/sub", file]),
    ]:  # fmt: skip
        monkeypatch.chdir(place)
        for path in paths:
            assert {one.id for one in find_files([path]).files} == {str(file)}, path
            assert {document.source for document in read_path(path)} == {str(file)}
    assert [one.id for one in find_files([other]).files] == [str(other)]


def test_paths_that_cannot_be_read_say_why(write, tmp_path):
    assert "no file" in error_of(tmp_path / "nowhere.md")
    assert "'.png'" in error_of(write("a.png", b"x"))
    (tmp_path / "loop.md").symlink_to(tmp_path / "loop.md")
    assert "no file" in error_of(tmp_path / "loop.md")


@pytest.mark.parametrize("suffix", sorted({reader: suffix for suffix, reader in readers().items()}.values()))
def test_a_file_that_the_system_refuses_is_reported(write, suffix, monkeypatch):
    path = write("a" + suffix, "text")

    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in error_of(path)


def test_a_name_that_is_not_utf8_gets_a_printable_id(tmp_path):
    try:
        Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    except OSError:
        pytest.skip("the file system takes only UTF-8 names")
    (document,) = read_path(tmp_path)
    document.check()
    assert document.id == f"{tmp_path}/caf\\xe9.txt"


# What the eye reads


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8"])
def test_a_byte_order_mark_says_the_encoding(write, encoding):
    document = read_one(write("a.txt", "\ufeffCaf\u00e9\rat nine.\r\n".encode(encoding)))
    assert document.text == "Caf\u00e9\nat nine.\n"


def test_characters_without_width_and_ligatures_split_no_word(write):
    assert read_one(write("a.html", "<p>The light&shy;house, the boat&#8203;builder.</p>")).text == (
        "The lighthouse, the boatbuilder."
    )
    assert read_one(write("b.txt", "The o\ufb03ce keeps one \ufb01le.")).text == "The office keeps one file."
    kept = "Non\u00a0breaking, e\u0301, \u200dzwj"
    assert read_one(write("c.txt", kept)).text == kept


def test_links_to_folders_and_to_nothing_are_told(write, tmp_path):
    own = write("docs/own.md", "The boathouse is locked.\n")
    write("share/opening.md", "The office opens at nine.\n")
    (tmp_path / "docs" / "linked").symlink_to(tmp_path / "share", target_is_directory=True)
    (tmp_path / "docs" / "file.md").symlink_to(tmp_path / "share" / "opening.md")
    (tmp_path / "docs" / "gone.md").symlink_to(tmp_path / "nowhere.md")
    found = find_files([tmp_path / "docs"])
    assert [file.id for file in found.files] == [str(tmp_path / "share" / "opening.md"), str(own)]
    assert sorted(path.name for path in found.skipped) == ["gone.md", "linked"]
    assert [file.path.name for file in find_files([tmp_path / "docs" / "linked"]).files] == ["opening.md"]
