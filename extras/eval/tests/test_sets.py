"""Questions from files and directories: which are read and drawn, and how bad input is named."""

import gzip
import json
from pathlib import Path

import pytest

from ragcache.errors import ConfigError
from ragcache_eval.bm25 import BM25
from ragcache_eval.public_sets import PublicSettings, public_cases, public_names
from ragcache_eval.question_files import read_entries


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def document(name: str, is_gold: bool | None = False) -> dict[str, object]:
    return {"title": name, "text": f"About {name}.", "is_gold": is_gold}


@pytest.fixture
def directory(tmp_path) -> Path:
    nq = [document("gold", True), document("b"), document("c")]
    meta = {"gold_positions": [0, 2]}
    write(
        tmp_path / "dev" / "nq3.jsonl.gz",
        {"id": "q", "question": "Q?", "answers": ["x"], "documents": nq, "meta": meta},
    )
    rows = [{"id": f"p/{i}", "title": f"T{i}", "text": f"word{i} common text"} for i in range(9)]
    write(tmp_path / "corpus" / "wiki.jsonl.gz", *rows)
    questions = [
        {
            "id": f"w{i}",
            "question": f"about word{i + 1}?",
            "answers": ["x"],
            "meta": {"corpus": "wiki", "gold_ids": [f"p/{i}"]},
        }
        for i in range(3)
    ]
    write(tmp_path / "dev" / "wiki.questions.jsonl.gz", *questions)
    return tmp_path


def test_names(directory):
    assert public_names(directory) == ["nq3", "wiki"]
    with pytest.raises(ConfigError, match="has no question set 'nq'; it has nq3, wiki"):
        public_cases("nq", directory, PublicSettings())


def test_the_gold_passage_stands_at_each_position_in_turn(directory):
    cases = public_cases("nq3", directory, PublicSettings())
    assert [[p.title for p in case.passages] for case in cases] == [["gold", "b", "c"], ["b", "c", "gold"]]
    assert [case.cell for case in cases] == [{"gold_position": 0}, {"gold_position": 2}]
    assert {case.cluster for case in cases} == {"q"}
    assert len(public_cases("nq3", directory, PublicSettings(positions="1"))) == 1
    given = public_cases("nq3", directory, PublicSettings(positions="given"))
    assert [case.id for case in given] == ["q"]
    with pytest.raises(ConfigError, match="no position 7 among 3"):
        public_cases("nq3", directory, PublicSettings(positions="7"))


def test_corpus_questions_get_their_gold_passages_and_near_ones(directory):
    settings = PublicSettings(passages=4)
    cases = public_cases("wiki", directory, settings)
    for number, case in enumerate(cases):
        assert len({p.title for p in case.passages}) == 4
        assert [p.title for p in case.passages if p.is_gold] == [f"T{number}"]
        assert f"T{number + 1}" in {p.title for p in case.passages}  # the passage has the question's word
    assert public_cases("wiki", directory, settings) == cases
    drawn = PublicSettings(passages=4, distractors="random")
    assert public_cases("wiki", directory, drawn) == public_cases("wiki", directory, drawn)
    assert public_cases("wiki", directory, drawn) != cases
    assert len(public_cases("wiki", directory, settings, limit=2)) == 2


def test_an_absent_corpus_or_passage_is_named(directory):
    write(directory / "bad.jsonl", {"question": "Q?", "meta": {"corpus": "other", "gold_ids": ["p/1"]}})
    with pytest.raises(ConfigError, match="no corpus 'other'"):
        public_cases("bad", directory, PublicSettings())
    write(directory / "bad.jsonl", {"question": "Q?", "meta": {"corpus": "wiki", "gold_ids": ["p/99"]}})
    with pytest.raises(ConfigError, match="no passage 'p/99'"):
        public_cases("bad", directory, PublicSettings())
    write(directory / "bad.jsonl", {"question": "Q?"})
    with pytest.raises(ConfigError, match="no passages"):
        public_cases("bad", directory, PublicSettings())


def slow_bm25(texts: list[str], query: str) -> list[float]:
    from math import log

    bags = [text.split() for text in texts]
    mean = sum(map(len, bags)) / len(bags)
    scores = []
    for bag in bags:
        total = 0.0
        for word in set(query.split()):
            holding = sum(word in other for other in bags)
            count = bag.count(word)
            weight = log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
            total += weight * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(bag) / mean))
        scores.append(total)
    return scores


def test_bm25_ranks_as_its_formula():
    texts = ["red red dog", "red cat and more words here", "blue dog", "nothing at all", "red dog cat blue"]
    for query in ("red dog", "cat", "blue", "absent"):
        scores = slow_bm25(texts, query)
        expected = sorted(range(len(texts)), key=lambda place: (-round(scores[place], 12), place))
        assert BM25(texts).ranked(query) == expected


def test_lines_of_ones_own(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        {"id": "a", "question": " Who? ", "answer": "me", "documents": ["One text.", document("b", None)]},
        "",
        {"question": "What?", "answers": ["x", "y"], "passages": [{"text": "T"}], "meta": {"hops": 2}},
    )
    first, second = (entry.case for entry in read_entries(path))
    assert (first.id, first.question, first.answers) == ("a", "Who?", ("me",))
    assert [(p.text, p.title, p.is_gold) for p in first.passages] == [("One text.", "", None), ("About b.", "b", None)]
    assert second.id == "own.jsonl, line 3"
    assert (second.answers, second.cell) == (("x", "y"), {"hops": 2})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ({"answers": ["x"]}, "line 2: there is no question"),
        ({"question": "Q?", "documents": "text"}, "line 2: 'documents' is not a list"),
        ({"question": "Q?", "documents": [{"title": "t"}]}, "line 2: a passage has no text"),
        ({"question": "Q?", "answers": [1]}, "line 2: 'answers' is not a list of texts"),
        ({"question": "Q?", "meta": 3}, "line 2: 'meta' is not an object"),
        ({"id": "first", "question": "Q?"}, "line 2: id 'first' stands in own.jsonl, line 1 too"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "own.jsonl", {"id": "first", "question": "Q?"}, line)
    with pytest.raises(ConfigError, match=message):
        read_entries(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no question"):
        read_entries(write(tmp_path / "empty.jsonl"))
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_entries(tmp_path / "broken.jsonl.gz")


def test_fewer_passages_keep_the_gold_one_and_the_order(directory):
    rows = [document("a"), document("b"), document("gold", True), document("d")]
    write(directory / "four.jsonl", {"id": "q", "question": "Q?", "documents": rows})
    for count, names in ((0, "a b gold d"), (3, "a b gold"), (2, "a gold"), (1, "gold")):
        (case,) = public_cases("four", directory, PublicSettings(passages=count))
        assert [p.title for p in case.passages] == names.split()
    cases = public_cases("nq3", directory, PublicSettings(passages=2))  # position 2 is not there any more
    assert [case.cell["gold_position"] for case in cases] == [0]
    with pytest.raises(ConfigError, match="passages=-1"):
        PublicSettings(passages=-1)


def test_joined_passages_are_the_same_text_in_longer_pieces(directory):
    rows = [document("a"), document("b"), document("gold", True), document("d", None), document("e")]
    write(directory / "five.jsonl", {"id": "q", "question": "Q?", "documents": rows})
    (apart,) = public_cases("five", directory, PublicSettings())
    for count, gold in ((2, [False, True, False]), (3, [True, None])):
        (case,) = public_cases("five", directory, PublicSettings(joined=count))
        assert [passage.is_gold for passage in case.passages] == gold
        assert "".join(p.rendered() for p in case.passages) == "".join(p.rendered() for p in apart.passages)
    moved = public_cases("nq3", directory, PublicSettings(joined=2))  # the gold passage moves first
    assert [[passage.is_gold for passage in case.passages] for case in moved] == [[True, False], [False, True]]
    with pytest.raises(ConfigError, match="joined"):
        PublicSettings(joined=0)
