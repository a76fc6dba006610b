"""Answers of the engine against plain transformers, its own stream, and itself under many threads."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_texts import CHAT
from families import block_diagonal
from plain_oracle import greedy
from tiny_model import save_tiny_llama
from transformers import AutoTokenizer

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError, ContextTooLongError, DeviceError
from ragcache.models.generate import decode

QUESTIONS = [
    "Where do dogs bark?",
    "Where does the river rise?",
    "When does the rowing club meet?",
    "Is the cat happy?",
]
SHORT = rc.Sampling(max_tokens=12)


def oracle_prompt(tokenizer, question, hits):
    """BOS, passages, question: put together by hand."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    chunks = [ids(hit.chunk.text) for hit in hits]
    return rc.Prompt([tokenizer.bos_token_id], chunks, ids(f"Question: {question}\nAnswer:"))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("method", ["full", "reposition"])
def test_an_answer_is_what_plain_transformers_says(kb, oracle, question, method):
    model, tokenizer = oracle
    answer = kb.ask(question, k=3, method=method, sampling=SHORT)
    prompt = oracle_prompt(tokenizer, question, answer.hits)
    n = prompt.num_tokens
    allowed = torch.ones(n, n, dtype=torch.bool).tril() if method == "full" else block_diagonal(prompt)
    assert answer.text == greedy(model, tokenizer, prompt, allowed, SHORT.max_tokens)
    assert answer.usage.prompt_tokens == n
    prefix = len(prompt.prefix_ids)  # computed by the first question, kept for the others
    reused = 0 if method == "full" else prompt.context_tokens
    assert answer.usage.cached_tokens == max(0, reused - prefix)
    assert answer.usage.created_tokens == (prefix if reused else 0)
    again = kb.ask(question, k=3, method=method, sampling=SHORT)
    exact = n - 1 if method == "full" else reused  # full prefill has the whole prompt in the prefix tree
    assert (again.usage.cached_tokens, again.usage.created_tokens) == (exact, 0)
    assert again.usage.computed_tokens == n - exact


def test_an_answer_after_eviction_is_decoded_from_what_is_kept(kb, open_kb, lm, oracle):
    """Which tokens those are is proved in tests/fusion/test_snapkv.py."""
    _, tokenizer = oracle
    question, choice = QUESTIONS[0], rc.SnapKV(12, kernel=3)
    answer = kb.ask(question, k=3, evict=choice, sampling=SHORT)
    fused = rc.fuse(lm, oracle_prompt(tokenizer, question, answer.hits), evict=choice)
    ids = decode(lm, fused.cache, fused.next_logits, fused.next_position, SHORT, eos_ids=[tokenizer.eos_token_id])
    assert answer.text == tokenizer.decode(list(ids))
    assert answer.text != kb.ask(question, k=3, sampling=SHORT).text
    assert kb.ask(question, k=3, evict=10_000, sampling=SHORT).text == kb.ask(question, k=3, sampling=SHORT).text
    other = open_kb(evict=choice)
    assert other.ask(question, k=3, sampling=SHORT).text == answer.text
    assert other.ask(question, k=3, evict=10_000, sampling=SHORT).text != answer.text


@pytest.mark.parametrize("sampling", [SHORT, rc.Sampling(max_tokens=12, temperature=1.0, seed=4)])
def test_streaming_is_non_streaming(kb, sampling):
    events = list(kb.stream(QUESTIONS[0], k=2, sampling=sampling))
    answer = kb.ask(QUESTIONS[0], k=2, sampling=sampling)
    assert isinstance(events[0], rc.Sources)
    assert [hit.chunk.id for hit in events[0].hits] == [hit.chunk.id for hit in answer.hits]
    assert "".join(e.text for e in events if isinstance(e, rc.Token)) == answer.text
    assert isinstance(events[-1], rc.Done)
    assert events[-1].answer.text == answer.text


def test_a_stop_string_and_a_length_end_the_answer(kb):
    free = kb.ask(QUESTIONS[1], k=2, sampling=SHORT)
    assert (free.finish_reason, free.usage.completion_tokens) == ("length", SHORT.max_tokens)
    stop = free.text[3:5]
    stopped = kb.ask(QUESTIONS[1], k=2, sampling=rc.Sampling(max_tokens=12, stop=(stop,)))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_cancelling_ends_a_stream_and_the_store_lives_on(kb):
    cancelled = threading.Event()
    events = kb.stream(QUESTIONS[0], k=2, sampling=SHORT, cancelled=cancelled)
    next(events)
    cancelled.set()
    with pytest.raises(CancelledError):
        list(events)
    assert kb.ask(QUESTIONS[0], k=2, sampling=SHORT).text


def test_every_phase_is_timed(kb):
    timings = kb.ask(QUESTIONS[0], k=3, sampling=SHORT).timings
    parts = [timings.retrieve_s, timings.load_s, timings.encode_s, timings.place_s, timings.prefill_s]
    assert all(part >= 0 for part in parts)
    assert min(timings.retrieve_s, timings.place_s, timings.prefill_s) > 0
    assert sum(parts) <= timings.ttft_s < timings.total_s


def test_hits_may_be_given(kb):
    hits = kb.retrieve(QUESTIONS[0], k=3)
    answer = kb.ask(QUESTIONS[0], hits=hits[::-1], sampling=SHORT)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in hits[::-1]]


def test_no_passages_still_answer(open_kb):
    answer = open_kb().ask(QUESTIONS[0], sampling=SHORT)
    assert answer.hits == []
    assert answer.usage.completion_tokens > 0


def test_passages_that_do_not_fit_are_refused_or_trimmed_as_asked(kb):
    question = "why " * 85  # leaves room for three of the four passages
    with pytest.raises(ContextTooLongError, match="k=3"):
        kb.ask(question, k=4)
    answer = kb.ask(question, k=4, on_overflow="trim", sampling=SHORT)
    assert (len(answer.hits), answer.dropped) == (3, 1)
    whole = kb.retrieve(question, k=3)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in whole]


def test_a_store_that_could_not_be_asked_is_not_made(open_kb, tmp_path):
    for refused in ({"method": "telepathy"}, {"evict": -1}):
        with pytest.raises(ConfigError, match=r"telepathy|eviction budget is -1"):
            open_kb(tmp_path / "other", **refused)
    assert not (tmp_path / "other").exists(), "a refused call leaves nothing behind"


def test_a_chat_template_is_split_around_the_context(open_kb, tmp_path):
    directory = save_tiny_llama(tmp_path / "chat", chat_template=CHAT)
    kb = open_kb(
        tmp_path / "chatty",
        model=rc.load_lm(directory),
        method="reposition",
        system="Be brief.",
        question_format="Q: {question}",
    )
    kb.ingest(rc.Document("cats", "The cat sat.\n"))
    answer = kb.ask("Where?", k=1, sampling=rc.Sampling(max_tokens=3))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "[system]Be brief.[end][user]The cat sat.\nQ: Where?[end][assistant]"
    assert answer.usage.prompt_tokens == 1 + len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The cat sat.\nQ: Where?"}],
        tokenize=False,
        add_generation_prompt=True,
    ).endswith(text)
    with pytest.raises(ConfigError, match="question"):
        open_kb(tmp_path / "other", model=rc.load_lm(directory), question_format="no place")


# Log-probabilities


@pytest.mark.parametrize("method", ["full", "reposition"])
def test_log_probabilities_are_those_of_a_plain_forward(kb, oracle, method):
    model, tokenizer = oracle
    answer = kb.ask(QUESTIONS[0], k=2, method=method, sampling=rc.Sampling(8, logprobs=2, frequency_penalty=0.5))
    ids = [one.id for one in answer.logprobs]
    assert len(ids) == answer.usage.completion_tokens == 8
    assert answer.text == tokenizer.decode(ids)
    said = "".join(one.text for one in answer.logprobs)  # bytes of half a character are shown one by one
    assert said.replace("\ufffd", "") == answer.text.replace("\ufffd", "")
    texts, question = [hit.chunk.text for hit in answer.hits], f"Question: {QUESTIONS[0]}\nAnswer:"
    *chunks, last = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*texts, question))
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
    stop = kb.ask(QUESTIONS[0], k=2, sampling=rc.Sampling(12)).text[5:8]
    sampling = rc.Sampling(12, stop=(stop,), logprobs=0)
    *events, done = kb.stream(QUESTIONS[0], k=2, sampling=sampling)
    found = [one for event in events if isinstance(event, rc.Token) for one in event.logprobs]
    assert tuple(found) == done.answer.logprobs
    assert len(found) == done.answer.usage.completion_tokens
    assert done.answer.to_json()["logprobs"][0]["text"] == found[0].text
    assert kb.ask(QUESTIONS[0], k=2).logprobs is None


LOST = torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")
FAILURES = [
    (LOST, r"device failed \(CUDA error: unspecified launch failure\), .* --device cpu"),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "device failed .*illegal memory"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), "device failed .*CUBLAS"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB"), "no memory left .*--answer-memory"),
]


@pytest.mark.parametrize(("error", "said"), FAILURES)
def test_a_device_that_fails_is_named_and_nothing_is_left_of_the_question(kb, error, said):
    """Amid the answer, while the prompt is read, and at ingestion; the next question has all memory."""
    left = iter(range(8))

    def fail(*_):
        if next(left, None) is None:
            raise error

    expected = kb.ask("Where do dogs bark?", sampling=rc.Sampling(max_tokens=20)).text
    hook = kb.lm.model.get_input_embeddings().register_forward_hook(fail)
    came = []
    with pytest.raises(DeviceError, match=said):
        came.extend(kb.stream("Where do dogs bark?", sampling=rc.Sampling(max_tokens=20)))
    assert any(isinstance(event, rc.Token) for event in came)
    with pytest.raises(DeviceError, match=said):
        kb.ask("Where do cats sleep?")
    with pytest.raises(DeviceError, match=said):
        kb.ingest([rc.Document("new", "Foxes dig under the fence.")])
    hook.remove()
    assert kb.admission.reserved_bytes == 0
    assert kb.ask("Where do dogs bark?", sampling=rc.Sampling(max_tokens=20)).text == expected
    kb.ingest([rc.Document("new", "Foxes dig under the fence.")])


def test_an_error_of_no_device_passes_as_it_is(kb):
    def fail(*_):
        raise RuntimeError("shapes do not match")

    hook = kb.lm.model.get_input_embeddings().register_forward_hook(fail)
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"):
        kb.ask("Where do cats sleep?")
    hook.remove()
