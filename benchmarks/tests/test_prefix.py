"""The benchmark of exact and approximate reuse runs, and what it counts is what there is to count."""

import json
from itertools import pairwise

import pytest

from benchmarks.prefix import WAYS, Asked, Settings, drawn, hit_share, main, talks
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture
def examples(tmp_path):
    """A corpus of three documents, as the examples have one."""
    corpus = tmp_path / "examples" / "corpus"
    corpus.mkdir(parents=True)
    for name in ("hat", "coat", "boat"):
        (corpus / f"{name}.txt").write_text(f"Jonas Lansen owns a green {name}.\n")
    questions = [{"question": f"What colour is the {name}?", "answer": "Green."} for name in ("hat", "coat")]
    lines = "".join(json.dumps(one) + "\n" for one in questions)
    (corpus.parent / "corpus_questions.jsonl").write_text(lines)
    return corpus.parent


@pytest.mark.slow
def test_it_runs_and_shares_grow_with_reuse(tmp_path, examples, capsys):
    sizes = ["--shape", "toy", "--documents", "6", "--tokens", "24", "--k", "3", "--stream-questions", "6"]
    result = main(
        [*sizes, "--answer-tokens", "2", "--quality-questions", "2", "--out", str(tmp_path)], BagOfWords(), examples
    )
    written = json.loads((tmp_path / "prefix.json").read_text())["figures"]
    shares = {name: own["hit_share"] for name, own in written["streams"].items()}
    assert len(shares) == 3 * len(WAYS) == len(result.timings)
    for stream in ("random", "zipf", "conversations"):
        assert shares[f"{stream}: full"] == 0
        assert shares[f"{stream}: full, tree"] <= shares[f"{stream}: full, tree, shared order"]
    assert shares["conversations: full, tree"] > shares["zipf: full, tree"] > 0
    assert shares["random: reposition"] > shares["random: link"] > shares["random: full, tree, shared order"]
    assert written["quality"].keys() == {"relevance", "shared, with hint", "shared, no hint"}
    assert "| conversations | link |" in (tmp_path / "prefix.md").read_text()


def test_streams_are_what_they_say():
    settings = Settings(documents=20, k=4, stream_questions=200, turns=4)
    assert list(drawn(settings, 1.0)) == list(drawn(settings, 1.0))
    for exponent, most in ((0.0, 0.4), (1.0, 0.9)):
        asked = list(drawn(settings, exponent))
        assert all(len(set(one)) == 4 for one in asked)
        assert sum(0 in one for one in asked) / 200 == pytest.approx(most, abs=0.25)
    conversations = talks(settings)
    assert [len(talk) for talk in conversations] == [4] * 50
    kept = [len(set(one) & set(next_one)) for talk in conversations for one, next_one in pairwise(talk)]
    assert 2 <= sum(kept) / len(kept) <= 4


def test_shares_count_whole_blocks():
    asked = [Asked(100, 40, 0.0), Asked(100, 15, 0.0)]
    assert hit_share(asked) == 55 / 200
    assert hit_share(asked, 16) == 32 / 200
