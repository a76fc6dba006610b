"""The training command resumes exactly, and writes a directory that transformers loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.mini.base import Options, train
from tools.mini.curriculum import STAGES, draw_stage

TINY = {"workers": 1, "hidden_size": 64, "intermediate_size": 32, "num_layers": 2, "num_heads": 2, "log_every": 1}


def trained(directory, *budgets):
    for tokens in budgets:
        train(Options(out=str(directory), max_tokens=tokens, start_stage=1, **TINY))
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, capsys):
    whole = trained(tmp_path / "whole", 20_000)
    resumed = trained(tmp_path / "resumed", 8_000, 20_000)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"step", "tokens", "seconds", "stage", "loss", "accuracy"} <= lines[0].keys()
    half = len(lines) // 2
    assert (
        [line["step"] for line in lines[:half]] == [line["step"] for line in lines[half:]] == list(range(1, half + 1))
    )


@pytest.mark.usefixtures("one_thread")
def test_the_result_is_a_plain_hugging_face_directory(tmp_path):
    trained(tmp_path, 5_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size >= len(tokenizer)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Question: Who?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert output.shape[1] > prompt["input_ids"].shape[1]


def test_earlier_stages_stay_in_the_mixture():
    import random

    rng = random.Random(0)
    last = len(STAGES) - 1
    drawn = [draw_stage(rng, last) for _ in range(5000)]
    counts = [drawn.count(stage) for stage in range(len(STAGES))]
    assert counts[last] > 0.6 * len(drawn)
    assert all(counts)
    assert counts[:last] == sorted(counts[:last])
    assert {draw_stage(rng, 0) for _ in range(100)} == {0}
