"""Lines of training data: their content, and how bad lines are refused by name."""

import gzip
import json
import lzma
import random
import tracemalloc
from dataclasses import replace

import pytest

from ragcache.errors import ConfigError
from ragcache_train.train_rows import Asked, BadLine, ChatMessage, DataRow, parse_line, read_rows

QA = {"type": "qa", "passages": ["One.", {"title": "Two", "text": "Second."}], "question": "Which?", "answer": "One"}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def parsed(fields: object) -> DataRow | BadLine:
    return parse_line(json.dumps(fields), "rows.jsonl:7")


def test_a_question_over_passages():
    row = parsed(QA)
    assert row == DataRow("qa", "rows.jsonl:7", None, ("One.", "# Two\n\nSecond."), (Asked("Which?", "One"),))


def test_several_questions_a_system_text_and_a_fixed_order():
    asked = [{"question": "A?", "answer": "a"}, {"question": "B?", "answer": "b"}]
    row = parsed(
        {"type": "qa", "passages": ["P"], "questions": asked, "system": "Be brief.", "shuffle": False, "id": 3}
    )
    assert row.asked == (Asked("A?", "a"), Asked("B?", "b"))
    assert (row.system, row.shuffle) == ("Be brief.", False)


def test_a_conversation():
    row = parsed({"type": "chat", "messages": [{"role": "system", "content": "S"}, *CHAT, *CHAT]})
    assert row.system == "S"
    assert row.messages == (ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello")) * 2


def test_a_summary_an_instruction_and_a_text():
    assert parsed({"type": "summary", "text": "Long.", "summary": "Short."}).passages == ("Long.",)
    row = parsed({"type": "instruction", "instruction": "Add.", "input": "1 2", "output": "3"})
    assert row.asked == (Asked("Add.\n\n1 2", "3"),)
    assert parsed({"type": "instruction", "instruction": "Add.", "output": "3"}).asked == (Asked("Add.", "3"),)
    assert parsed({"type": "text", "text": "Words."}).text == "Words."


def test_a_title_that_the_text_begins_with_is_not_repeated():
    row = parsed({**QA, "passages": [{"title": "Two", "text": "# Two\nSecond."}]})
    assert row.passages == ("# Two\nSecond.",)


BAD = [
    ([1], "not a JSON object"),
    ({"type": "poem"}, "type is 'poem'"),
    ({"passages": ["P"]}, "type is None"),
    ({**QA, "passages": []}, "'passages'"),
    ({**QA, "passages": ["P", ""]}, "passage 2"),
    ({**QA, "passages": [5]}, "passage 1"),
    ({**QA, "answer": " "}, "'answer'"),
    ({**QA, "question": None}, "'question'"),
    ({**QA, "shuffle": "no"}, "'shuffle'"),
    ({"type": "qa", "passages": ["P"], "questions": [{"question": "A?"}]}, "question 1"),
    ({"type": "qa", "passages": ["P"], "questions": ["A?"]}, "question 1"),
    ({**QA, "system": 3}, "'system'"),
    ({"type": "chat", "messages": CHAT[:1]}, "in turn"),
    ({"type": "chat", "messages": CHAT[::-1]}, "in turn"),
    ({"type": "chat", "messages": [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "x"}]}, "message 2"),
    ({"type": "chat", "messages": [{"role": "system", "content": "S"}]}, "in turn"),
    ({"type": "summary", "text": "Long."}, "'summary'"),
    ({"type": "instruction", "instruction": "Add.", "input": 3, "output": "3"}, "'input'"),
    ({"type": "text", "text": ""}, "'text'"),
]


@pytest.mark.parametrize(("fields", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_line_says_what_is_wrong_with_it(fields, reason):
    line = parsed(fields)
    assert isinstance(line, BadLine)
    assert line.where == "rows.jsonl:7"
    assert reason in line.reason


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"nothing"])
def test_what_is_not_json_is_named(line):
    found = parse_line(line, "rows.jsonl:2")
    assert isinstance(found, BadLine)
    assert "not JSON" in found.reason


def test_a_file_gives_its_usable_lines_and_names_the_others(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(QA).encode() + b"\r\n\r\n{}\n" + json.dumps(QA).encode())
    rows, bad = read_rows([path])
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:4"]
    assert [line.where for line in bad] == [f"{path}:3"]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "empty"), (b"\n\n", "empty"), (b"{}\n[]\n", r"rows.jsonl:1.*:2")]
)
def test_a_file_without_a_usable_line_is_refused(tmp_path, content, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"no usable line.*{reason}"):
        read_rows([path])


PACKERS = {"xz": lzma.compress, "gz": gzip.compress}


@pytest.mark.parametrize("kind", PACKERS)
def test_a_packed_file_is_read_as_it_is(tmp_path, kind):
    lines = json.dumps(QA).encode() + b"\n{}\n" + json.dumps(QA).encode() + b"\n"
    (tmp_path / "rows.jsonl").write_bytes(lines)
    packed = tmp_path / f"rows.jsonl.{kind}"
    packed.write_bytes(PACKERS[kind](lines))
    (rows, bad), (plain, _) = read_rows([packed]), read_rows([tmp_path / "rows.jsonl"])
    assert [replace(row, where="") for row in rows] == [replace(row, where="") for row in plain]
    assert ([row.where for row in rows], [line.where for line in bad]) == (
        [f"{packed}:1", f"{packed}:3"],
        [f"{packed}:2"],
    )


@pytest.mark.parametrize("kind", PACKERS)
def test_a_packed_file_that_is_cut_short_or_none_is_named(tmp_path, kind):
    lines = [json.dumps({**QA, "id": random.Random(n).random()}) for n in range(500)]
    path = tmp_path / f"rows.jsonl.{kind}"
    path.write_bytes(PACKERS[kind]("\n".join(lines).encode())[:-60])
    with pytest.raises(ConfigError, match=rf"{path} is cut short or damaged behind line \d+"):
        read_rows([path])
    path.write_bytes(lines[0].encode())
    with pytest.raises(ConfigError, match=f"{path} (cannot be read|is cut short or damaged)"):
        read_rows([path])


def test_a_packed_file_is_not_held_whole(tmp_path, monkeypatch):
    """A line of 32 MiB is named, and the next line is read."""
    monkeypatch.setattr("ragcache_train.train_rows.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl.xz"
    with lzma.open(path, "wb", preset=0) as file:
        for _ in range(32):
            file.write(b" " * (1 << 20))
        file.write(b"\n" + json.dumps(QA).encode())
    tracemalloc.start()
    rows, bad = read_rows([path])
    peak, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert [row.where for row in rows] == [f"{path}:2"]
    assert [str(line) for line in bad] == [f"{path}:1: it is longer than 1 MiB"]
    assert peak < 16 << 20


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows([tmp_path / "absent.jsonl"])
    with pytest.raises(ConfigError, match="no training data"):
        read_rows([])
