"""The papers' figures at toy size: runs that were stopped go on, and figures are those of hand-made attention."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from families import block_diagonal, oracle_model
from tiny_model import save_tiny_llama

from benchmarks import attention, lengths
from benchmarks.attention import Seen, most_attended
from benchmarks.lines import Lines
from ragcache.errors import ConfigError

TOY = ["--shape", "toy", "--passages", "3", "--suffix", "5"]


def journaled(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_lengths_go_on_where_they_were_stopped(tmp_path):
    command = [*TOY, "--workdir", str(tmp_path), "--out", str(tmp_path / "out")]
    lengths.main([*command, "--lengths", "10", "20", "--rounds", "2"])
    path = tmp_path / "out" / "lengths-toy-float32-cpu.journal.jsonl"
    first = journaled(path)
    assert [line["key"] for line in first[1:]] == ["10/0", "20/0", "10/1", "20/1"]
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")  # a kill leaves half a line
    result = lengths.main([*command, "--lengths", "10", "20", "--rounds", "3"])
    assert journaled(path)[: len(first) - 1] == first[:-1]
    assert {line["key"] for line in journaled(path)[1:]} == {f"{n}/{r}" for n in (10, 20) for r in range(3)}
    names = ("full prefill", "no link tokens", "link, 1 token", "link, 5 tokens")
    assert {name: timing.runs for name, timing in result.timings.items()} == {
        f"{tokens}: {name}": 3 for tokens in (10, 20) for name in names
    }
    for tokens in (10, 20):
        seconds = [line["value"]["seconds"] for line in journaled(path)[1:] if line["key"].startswith(f"{tokens}/")]
        ratios = sorted(one["link, 5 tokens"] / one["full prefill"] for one in seconds)
        assert result.ratios[f"{tokens}: link, 5 tokens / full prefill"].median == ratios[1]
    page = (tmp_path / "out" / "lengths-toy-float32-cpu.md").read_text()
    assert page.count("\n| 10 |") == page.count("\n| 20 |") == 1
    assert "Load average over a minute while it ran" in page


def test_a_journal_of_other_settings_is_refused_by_name(tmp_path):
    Lines(tmp_path / "a.jsonl", {"seed": 1}).add("k", 2)
    assert Lines(tmp_path / "a.jsonl", {"seed": 1}).done == {"k": 2}
    with pytest.raises(ConfigError, match=r"a\.jsonl holds figures of other settings.*--journal"):
        Lines(tmp_path / "a.jsonl", {"seed": 2})


@pytest.mark.slow
def test_a_loaded_round_leaves_no_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "load_average", lambda: 7.5)
    command = [*TOY, "--workdir", str(tmp_path), "--out", str(tmp_path / "out"), "--lengths", "10", "--rounds", "1"]
    lengths.main(command)
    monkeypatch.setattr(lengths, "load_average", lambda: 0.0)
    result = lengths.main(command)
    assert result.hardware["load_1min"] == 7.5


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "dev").mkdir()
    places = ("Aabo", "Brugge", "Chur")
    documents = [{"text": f"Ship {n} is at {place}, and stays there until the wind has turned."} for n, place in
                 enumerate(places)]  # fmt: skip
    rows = [
        {"id": f"q{n}", "question": f"Where is ship {n}?", "answers": [places[n]], "documents": documents}
        for n in range(3)
    ]
    with gzip.open(folder / "dev/ships.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def test_attention_is_that_of_plain_transformers(data, tmp_path):
    """Distances of reposition and hits of epic, against masked passes that share no code."""
    model = save_tiny_llama(tmp_path / "model", positions=2048)
    command = ["--model", str(model), "--data", str(data), "--sets", "ships", "--out", str(tmp_path / "out")]
    command += ["--methods", "reposition,epic:first_tokens=9", "--name", "found"]
    prompts = []
    keep = attention.Watch.seen

    def seen(watch):
        prompts.append(watch.prompt)
        return keep(watch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.Watch, "seen", seen)
        attention.main([*command, "--questions", "1"])
    lines = journaled(tmp_path / "out" / "found.journal.jsonl")
    found = {line["key"].partition(" by ")[2].partition("@")[0]: line["value"] for line in lines[1:]}
    prompt, oracle = prompts[0], oracle_model(str(model))
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        whole = oracle(ids, output_attentions=True).attentions
        alone = torch.where(block_diagonal(prompt), 0.0, -torch.inf)[None, None]
        apart = oracle(ids, attention_mask=alone, output_attentions=True).attentions
    passages, rows = slice(len(prompt.prefix_ids), prompt.context_tokens), slice(prompt.context_tokens, None)
    for layer, distance in found["reposition"]["distance"].items():
        truth, ours = (maps[int(layer)][0, :, rows, passages] for maps in (whole, apart))
        assert distance == pytest.approx(float((ours - truth).square().sum(2).sqrt().mean()), rel=1e-4, abs=1e-6)
    assert max(found["reposition"]["distance"].values()) > 1e-4
    assert set(found["full"]["distance"].values()) == {0.0}
    assert (found["reposition"]["again"], found["reposition"]["hit_rate"]) == (0.0, 0.0)
    total = sum(maps[0, :, rows, passages].sum((0, 1)) for maps in (whole[int(n)] for n in found["full"]["distance"]))
    top = set(total.topk(max(1, round(attention.TOP * len(total)))).indices.tolist())
    ends = torch.tensor([0, *map(len, prompt.chunk_ids)]).cumsum(0).tolist()
    again = {start + n for start in ends[:-1] for n in range(9)}
    epic = found['epic{"first_tokens": 9}']
    assert epic["again"] == pytest.approx(len(again) / len(total))
    assert epic["hit_rate"] == pytest.approx(len(top & again) / len(top))
    result = attention.main([*command, "--questions", "3"])
    assert journaled(tmp_path / "out" / "found.journal.jsonl")[: len(lines)] == lines
    assert [row["hit_rate"]["size"] for row in result.figures["rows"]] == [3, 3, 3]


def test_the_tokens_that_count_are_those_with_the_most_attention():
    maps = {0: torch.zeros(2, 3, 40), 7: torch.zeros(2, 3, 40)}
    maps[0][1, 2, 5], maps[7][0, 0, 9], maps[7][1, 1, 9], maps[7][0, 1, 30] = 0.5, 0.3, 0.3, 0.4
    assert most_attended(Seen(maps, torch.zeros(40))).nonzero()[:, 0].tolist() == [5, 9]
