"""The comparison with other programs: streams, counts, and the driver with peers that need no other environment."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import peers
from benchmarks.peer_workers.channel import Answer
from benchmarks.peers_asking import Run
from benchmarks.peers_processes import PEERS, ROOT, PeerError, PeerProcess, PeerSpec
from benchmarks.peers_report import markdown
from benchmarks.peers_streams import Sizes, Streams
from benchmarks.runner import main
from benchmarks.shapes import build, sharpen, write_checkpoint

SIZES = Sizes(passages=4, tokens=20, suffix=5, pool=12, vocab_size=512, seed=0)
TINY = [
    "--shape=toy", "--passages=2", "--tokens=24", "--suffix=5", "--answer=4", "--rounds=2", "--questions=1",
    "--pool=4", "--askers=2", "--bursts=2", "--kv-mib=64", "--threads=1",
    "--dtypes=float32",
]  # fmt: skip


def configuration(model: Path, dtype: str = "float32") -> dict[str, object]:
    return {
        "model": str(model),
        "dtype": dtype,
        "threads": 1,
        "kv_bytes": 1 << 30,
        "max_tokens": 1024,
        "askers": 2,
    }


def test_streams_are_the_same_for_everybody_and_every_time():
    one, other = Streams(SIZES), Streams(SIZES)
    assert [one.prompt(q) for q in one.random(3)] == [other.prompt(q) for q in other.random(5)[:3]]
    prompt = one.prompt(one.new(0))
    assert [len(ids) for ids in prompt["passages"]] == [20] * 4
    assert len(prompt["suffix"]) == 5
    every = [*one.random(50), *one.random(50, "askers 0")]
    assert all(len(set(q.passages)) == 4 and max(q.passages) < 12 for q in every)
    assert len({q.suffix for q in every}) == 100


def test_new_passages_were_never_seen_and_again_differs_in_its_question_alone():
    streams = Streams(SIZES)
    seen = [set(streams.new(number).passages) for number in range(5)]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 20
    assert min(set.union(*seen)) >= SIZES.pool
    assert streams.again(2).passages == streams.new(2).passages
    assert len({streams.new(2).suffix, streams.again(2).suffix, streams.again(2, 1).suffix}) == 3


def test_rows_that_compute_something_else_are_left_out_of_the_ratios():
    answers = {"new": {"ragcache reposition": {0: Answer(1.0, 2.0, [1], 0)}, "other": {0: Answer(4.0, 5.0, [2], 0)}}}
    run = Run("float32", answers=answers)
    assert {name: found.median for name, found in peers.ratios_of(run)} == {
        "float32, new: ragcache reposition / other": 0.25,
        "float32, new, answers/s: ragcache reposition / other": 2.5,
    }
    run.same = {"other": {"prompts": 3, "first": 2, "tokens": 24, "common": 20}}
    assert not dict(peers.ratios_of(run))
    half = Run("bfloat16", answers=answers, same=run.same)
    assert len(dict(peers.ratios_of(half))) == 2  # rounding may tip a token


@pytest.mark.slow
def test_answers_are_those_of_plain_transformers(tmp_path: Path):
    """Both peers that need no other environment are asked over their own channel."""
    write_checkpoint(tmp_path / "model", "toy", sharp=True)
    streams = Streams(SIZES)
    prompts = [streams.prompt(streams.new(0)), streams.prompt(streams.again(0))]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([[*(id for passage in prompt["passages"] for id in passage), *prompt["suffix"]]])
        for _ in range(4):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        expected.append(ids[0, -4:].tolist())
    for name, variant in (("ragcache", "full"), ("transformers", "")):
        with PeerProcess(PEERS[name], tmp_path, configuration(tmp_path / "model"), tmp_path / name) as peer:
            first, second = peer.ask(variant, prompts[:1], 4)[0], peer.ask(variant, prompts[1:], 4)[0]
            assert [first.ids, second.ids] == expected
            assert [first.reused, second.reused] == ([0, 80] if name == "ragcache" else [0, 0])
            together = peer.ask(variant, prompts, 4)
            assert [answer.ids for answer in together] == expected
            assert all(0 < answer.first_s < answer.total_s for answer in (first, second, *together))
            if name == "ragcache":
                assert peer.read([streams.passage(n) for n in (30, 31)]) > 0
                known = {"passages": [streams.passage(n) for n in (31, 30, 32)], "suffix": prompts[0]["suffix"]}
                assert peer.ask("reposition", [known], 4)[0].reused == 40
                with pytest.raises(PeerError, match=r"ConfigError: .* is unknown"):
                    peer.ask("no such method", prompts, 4)


def test_wrongly_paired_keys_choose_other_tokens():
    """The check prompts find this fault: llama.cpp rotates neighbours, transformers halves; see gguf_file.py."""
    streams = Streams(SIZES)
    prompts = [streams.prompt(streams.new(number)) for number in range(3)]
    rows = [[*(id for passage in one["passages"] for id in passage), *one["suffix"]] for one in prompts]
    model = build("toy").plain
    sharpen(model)
    right = model(input_ids=torch.tensor(rows)).logits[:, -1].argmax(-1)
    for layer in model.model.layers:
        for part, heads in ((layer.self_attn.q_proj, 4), (layer.self_attn.k_proj, 2)):
            halves = part.weight.reshape(heads, 2, 6, 48)
            part.weight.data = halves.swapaxes(1, 2).reshape(part.weight.shape)
    wrong = model(input_ids=torch.tensor(rows)).logits[:, -1].argmax(-1)
    assert not (right == wrong).any()


@pytest.mark.slow
def test_a_run_reports_who_was_there_and_who_was_not(tmp_path: Path):
    options = [
        "--peers", "ragcache", "transformers", "vllm", "--environments", str(tmp_path), "--workdir", str(tmp_path),
    ]  # fmt: skip
    result = main("peers", [*TINY, *options, "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "peers.json").read_text())
    figures = written["figures"]["dtypes"]["float32"]
    assert figures["peers"].keys() == {"ragcache", "transformers"}
    assert "scripts/peers-environment" in figures["not_run"]["vllm"]
    assert figures["agreement"]["ragcache full"]["agrees"]
    cells = figures["cells"]
    assert cells["again"]["ragcache reposition"]["reused_tokens"] == 2 * 24
    assert cells["again"]["ragcache full"]["reused_tokens"] == 2 * 24
    assert cells["new"]["ragcache reposition"]["reused_tokens"] == cells["new"]["transformers"]["reused_tokens"] == 0
    assert figures["together"]["random"]["ragcache reposition"]["askers"] == 2
    assert written["ratios"]["float32, new: ragcache reposition / transformers"]["pairs"] == 2
    assert figures["together"]["again"]["ragcache full"]["bursts"] == 2
    assert written["ratios"]["float32, again, askers, answers/s: ragcache reposition / ragcache full"]["pairs"] == 2
    crossed = written["ratios"]["float32, random: ragcache reposition / again: ragcache full"]
    assert crossed["pairs"] == 1
    assert result.goals == []
    text = (tmp_path / "out" / "peers.md").read_text()
    assert "- vllm, float32: not run (to its end), because its environment was not made" in text
    assert "\n".join(markdown(written)) in text
    assert str(tmp_path) not in text + json.dumps(written)
    assert not list(tmp_path.glob("peers-*")), "the checkpoint is not left behind"


def test_a_peer_that_fails_says_why(tmp_path: Path):
    with pytest.raises(PeerError, match="environment was not made"):
        PeerProcess(PEERS["llamacpp"], tmp_path, {"threads": 1}, tmp_path)
    gone = PeerSpec("gone", "no_such_worker", None)
    with pytest.raises(PeerError, match="it ended"):
        PeerProcess(gone, tmp_path, {"threads": 1}, tmp_path)


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main("peers", ["--peers", "ragcache", "other"])
    assert "'other'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
def test_other_programs_compute_what_transformers_computes(name: str, tmp_path: Path):
    """Tokens are equal in float32, and earlier prompts are found again. vLLM compiles at its first start."""
    environments = ROOT / ".peers"
    if not (environments / name / "ready").is_file():
        pytest.skip(f"scripts/peers-environment made no environment of {name}")
    write_checkpoint(tmp_path / "model", "SmolLM2-135M", sharp=True)
    streams = Streams(Sizes(passages=4, tokens=100, suffix=30, pool=12, vocab_size=49152, seed=0))
    prompts = [streams.prompt(streams.new(0)), streams.prompt(streams.again(0))]
    answers = {}
    for one in ("transformers", name):
        with PeerProcess(PEERS[one], environments, configuration(tmp_path / "model"), tmp_path / one) as peer:
            answers[one] = [peer.ask("", [prompt], 8)[0] for prompt in prompts]
    assert [answer.ids for answer in answers[name]] == [answer.ids for answer in answers["transformers"]]
    assert [answer.reused for answer in answers[name]] == [0, 400 if name == "llamacpp" else 384]  # whole blocks of 128
