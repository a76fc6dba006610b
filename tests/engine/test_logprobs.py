"""Log-probabilities of the engine's answers, by a method that places blocks and by full prefill."""

from __future__ import annotations

import pytest
import torch
from families import block_diagonal
from transformers import AutoModelForCausalLM, AutoTokenizer

import ragcache as rc
from ragcache.errors import ConfigError

QUESTION = "Where do dogs bark?"


@pytest.fixture(scope="module")
def oracle(model_directory):
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(model_directory)


@pytest.mark.parametrize("method", ["full", "reposition"])
def test_log_probabilities_are_those_of_a_plain_forward(kb, oracle, method):
    model, tokenizer = oracle
    answer = kb.ask(QUESTION, k=2, method=method, sampling=rc.Sampling(8, logprobs=2, frequency_penalty=0.5))
    ids = [one.id for one in answer.logprobs]
    assert len(ids) == answer.usage.completion_tokens == 8
    assert answer.text == tokenizer.decode(ids)
    said = "".join(one.text for one in answer.logprobs)  # bytes of half a character are shown one by one
    assert said.replace("\ufffd", "") == answer.text.replace("\ufffd", "")
    texts = [hit.chunk.text for hit in answer.hits]
    *chunks, last = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*texts, f"Question: {QUESTION}\nAnswer:")
    )
    prompt = rc.Prompt([tokenizer.bos_token_id], chunks, [*last, *ids])
    allowed = block_diagonal(prompt)
    if method == "full":
        allowed = torch.ones_like(allowed).tril()
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt.ids]), attention_mask=bias).logits[0]
    right = logits[-len(ids) - 1 : -1].log_softmax(-1)
    for row, one in zip(right, answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.id]), abs=1e-4)
        assert [near.id for near in one.top] == row.topk(2).indices.tolist()
        assert [near.logprob for near in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_a_stream_brings_the_same_ones(kb):
    stop = kb.ask(QUESTION, k=2, sampling=rc.Sampling(12)).text[5:8]
    sampling = rc.Sampling(12, stop=(stop,), logprobs=0)
    *events, done = kb.stream(QUESTION, k=2, sampling=sampling)
    found = [one for event in events if isinstance(event, rc.Token) for one in event.logprobs]
    assert tuple(found) == done.answer.logprobs
    assert len(found) == done.answer.usage.completion_tokens
    assert done.answer.to_json()["logprobs"][0]["text"] == found[0].text
    assert kb.ask(QUESTION, k=2).logprobs is None


@pytest.mark.parametrize("wrong", [{"logit_bias": {10**6: 1.0}}, {"stop_token_ids": [-1]}])
def test_unknown_tokens_are_refused_before_anything_runs(kb, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} names token id"):
        kb.stream(QUESTION, sampling=rc.Sampling(**wrong))
