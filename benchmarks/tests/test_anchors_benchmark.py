"""Anchors against LLMLingua-2: what is kept, what is right, and which order the goals state."""

import json

import pytest
from transformers import AutoModelForTokenClassification, AutoTokenizer

from benchmarks import anchors
from tools.mini.evaluate import MINI_BASE


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("classifier"))
    AutoModelForTokenClassification.from_pretrained(MINI_BASE, num_labels=2).save_pretrained(directory)
    AutoTokenizer.from_pretrained(MINI_BASE).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_the_table_says_how_much_is_kept_and_how_many_answers_are_right(tmp_path, classifier, capsys):
    given = ["--questions", "3", "--seed", "9", "--trained", "again=mini", "--classifier", classifier]
    given += ["--trained-compressed", "LLMLingua-2, K=5=mini"]
    anchors.main([*given, "--name", "half", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "half.json").read_text())
    rows = {row["label"]: row for row in found["figures"]["rows"]}
    assert list(rows) == ["full prefill", "all KV", "again", "LLMLingua-2, K=5", "LLMLingua-2, 0.5"]
    assert rows["full prefill"]["kept_share"] == pytest.approx(1, abs=1e-6)
    assert rows["again"] == {**rows["all KV"], "label": "again"}
    assert rows["all KV"]["kept_share"] > 1, "link tokens are kept as well"
    assert 0.4 < rows["LLMLingua-2, 0.5"]["kept_share"] - (rows["all KV"]["kept_share"] - 1) < 0.75
    assert rows["full prefill"]["1hop"]["mean"] >= 2 / 3
    assert rows["LLMLingua-2, K=5"] == {**rows["LLMLingua-2, 0.5"], "label": "LLMLingua-2, K=5"}
    goal, _ = found["goals"]
    assert goal["what"] == "right answers, again less LLMLingua-2, K=5"
    shares = [[rows[label][f"{hops}hop"]["mean"] for hops in (1, 2)] for label in ("again", "LLMLingua-2, K=5")]
    assert goal["measured"] == pytest.approx(sum(shares[0]) / 2 - sum(shares[1]) / 2)
    assert "| KV kept |" in (tmp_path / "half.md").read_text()


def test_a_model_trained_on_shortened_passages_is_asked_over_such(tmp_path, capsys):
    with pytest.raises(SystemExit):
        anchors.main(["--trained-compressed", "one=mini", "--out", str(tmp_path)])
    assert "name that too" in capsys.readouterr().err
    chosen = anchors.Settings(trained=("a, K=5=x",), trained_compressed=("b, K=0=y",), classifier="z", keep=0.25)
    ways = [way for way, _ in anchors.ways(chosen)]
    assert [(way.label, way.model, way.compressor is not None) for way in ways[2:]] == [
        ("a, K=5", "x", False),
        ("b, K=0", "y", True),
        ("LLMLingua-2, 0.25", "mini", True),
    ]
    assert {way.compressor.keep for way in ways[3:]} == {0.25}
