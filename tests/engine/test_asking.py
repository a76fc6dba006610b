"""Answers of the engine against plain transformers, its own stream, and itself from an event loop: the same answers, a
loop that runs on, work that stops when nobody wants it."""

import asyncio
import threading

import pytest
import torch
from engine_texts import QUESTIONS, user
from families import block_diagonal
from plain_oracle import greedy

import ragcache as rc
from ragcache.errors import CancelledError, ConfigError, ContextTooLongError, DeviceError, PromptError
from ragcache.models import machine

TURNS = [user(QUESTIONS[0])]
SHORT, FEW = rc.Sampling(max_tokens=12), rc.Sampling(max_tokens=4)


def oracle_prompt(tokenizer, question, hits):
    """BOS, passages, question: put together by hand."""

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    chunks = [ids(hit.chunk.text) for hit in hits]
    return rc.Prompt([tokenizer.bos_token_id], chunks, ids(f"Question: {question}\nAnswer:"))


@pytest.mark.parametrize("question", QUESTIONS[:2])
@pytest.mark.parametrize("method", ["full", "reposition"])
def test_an_answer_is_what_plain_transformers_says(kb, oracle, question, method):
    model, tokenizer = oracle
    answer = kb.ask(question, k=3, method=method, sampling=SHORT)
    prompt = oracle_prompt(tokenizer, question, answer.hits)
    n = prompt.num_tokens
    allowed = None if method == "full" else block_diagonal(prompt)
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


@pytest.mark.parametrize("sampling", [SHORT, rc.Sampling(max_tokens=12, temperature=1.0, seed=4)])
def test_streaming_is_non_streaming(kb, sampling):
    events = list(kb.stream(QUESTIONS[0], k=2, sampling=sampling))
    answer = kb.ask(QUESTIONS[0], k=2, sampling=sampling)
    assert isinstance(events[0], rc.Sources)
    assert [hit.chunk.id for hit in events[0].hits] == [hit.chunk.id for hit in answer.hits]
    assert "".join(e.text for e in events if isinstance(e, rc.Token)) == answer.text
    assert isinstance(events[-1], rc.Done)
    assert events[-1].answer.text == answer.text


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


def test_passages_that_do_not_fit_are_refused_or_trimmed_as_asked(kb):
    question = "why " * 85  # leaves room for three of the four passages
    with pytest.raises(ContextTooLongError, match="k=3"):
        kb.ask(question, k=4)
    answer = kb.ask(question, k=4, on_overflow="trim", sampling=SHORT)
    assert (len(answer.hits), answer.dropped) == (3, 1)
    whole = kb.retrieve(question, k=3)
    assert [hit.chunk.id for hit in answer.hits] == [hit.chunk.id for hit in whole]


def test_a_store_that_could_not_be_asked_is_not_made(open_kb, tmp_path):
    with pytest.raises(ConfigError, match="telepathy"):
        open_kb(tmp_path / "other", method="telepathy")
    assert not (tmp_path / "other").exists(), "a refused call leaves nothing behind"
    with pytest.raises(ConfigError, match="question"):
        open_kb(tmp_path / "other", question_format="no place")


# Log-probabilities


@pytest.mark.parametrize("method", ["full", "reposition"])
def test_log_probabilities_are_those_of_a_plain_forward(kb, oracle, method):
    """Whatever the temperature and the penalties."""
    model, tokenizer = oracle
    sampling = rc.Sampling(8, temperature=1.5, seed=4, top_k=5, logprobs=2, frequency_penalty=0.5)
    answer = kb.ask(QUESTIONS[0], k=2, method=method, sampling=sampling)
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
def test_a_device_that_fails_is_named_and_nothing_is_left_of_the_question(kb, error, said, monkeypatch):
    """Amid the answer, while the prompt is read, and at ingestion; the next question has all memory."""
    monkeypatch.setattr(machine, "_failures", [])
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
    assert (machine.device_failure() is None) == isinstance(error, torch.OutOfMemoryError)
    hook.remove()
    assert kb.admission.reserved_bytes == 0
    assert kb.ask("Where do dogs bark?", sampling=rc.Sampling(max_tokens=20)).text == expected
    kb.ingest([rc.Document("new", "Foxes dig under the fence.")])


def test_an_error_of_no_device_passes_as_it_is(kb):
    def fail(*_):
        raise RuntimeError("shapes do not match")

    refused = pytest.raises(RuntimeError, match=r"^shapes do not match$")
    with kb.lm.model.get_input_embeddings().register_forward_hook(fail), refused:
        kb.ask("Where do cats sleep?")


# From an event loop


async def events(stream):
    return [event async for event in stream]


async def test_async_twins_answer_alike(kb):
    assert [hit.chunk.id for hit in await kb.aretrieve(QUESTIONS[0], 2)] == [
        h.chunk.id for h in kb.retrieve(QUESTIONS[0], 2)
    ]
    assert (await kb.aask(QUESTIONS[0], 2, sampling=SHORT)).text == kb.ask(QUESTIONS[0], 2, sampling=SHORT).text
    assert (await kb.achat(TURNS, k=2, sampling=SHORT)).text == kb.chat(TURNS, k=2, sampling=SHORT).text
    assert (await kb.acomplete("Once", sampling=SHORT)).text == kb.complete("Once", sampling=SHORT).text
    streams = [
        (kb.astream(QUESTIONS[0], 2, sampling=SHORT), kb.stream(QUESTIONS[0], 2, sampling=SHORT)),
        (kb.astream_chat(TURNS, k=2, sampling=SHORT), kb.stream_chat(TURNS, k=2, sampling=SHORT)),
        (kb.astream_completion("Once", sampling=SHORT), kb.stream_completion("Once", sampling=SHORT)),
    ]
    for one, other in streams:
        found, expected = await events(one), list(other)
        assert found[1:-1] == expected[1:-1]
        assert (type(found[0]), found[-1].answer.text) == (rc.Sources, expected[-1].answer.text)
    assert (await kb.aingest(rc.Document("new", "A new text."))).added == ["new"]
    assert await kb.adelete(["new", "absent"]) == ["new"]


@pytest.mark.usefixtures("slow_model")
async def test_the_loop_runs_on(kb):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    seen = [ticks async for _ in kb.astream(QUESTIONS[0], 2, sampling=FEW)]
    await kb.aask(QUESTIONS[0], 2, sampling=FEW)
    ticking.cancel()
    assert ticks > 2 * len(seen)  # a blocked loop ticks once an event at most


async def test_a_closed_stream_stops_the_work(kb):
    long = rc.Sampling(max_tokens=100_000)
    stream = kb.astream(QUESTIONS[0], 1, sampling=long)
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(kb.aask(QUESTIONS[0], 1, sampling=long))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(kb.close)  # waits for the threads: it would hang, had they gone on


async def test_a_stream_that_waits_when_the_store_is_closed_ends(kb):
    kb._threads._pool._max_workers = 1
    long = rc.Sampling(max_tokens=100_000)
    running = kb.astream(QUESTIONS[0], 1, sampling=long)
    await anext(running)
    waiting = asyncio.create_task(events(kb.astream(QUESTIONS[0], 1, sampling=SHORT)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(asyncio.to_thread(kb.close))
    with pytest.raises(CancelledError):
        await waiting
    await running.aclose()
    await closing


def test_tokens_are_counted_without_special_ones(kb):
    assert kb.count_tokens("abc") == len(kb.lm.tokenizer("abc", add_special_tokens=False)["input_ids"])


# Many questions


@pytest.mark.usefixtures("slow_model")
async def test_answers_are_those_of_one_by_one_in_fewer_passes(kb):
    start = kb.pass_stats().passes
    together = kb.ask_many(iter(QUESTIONS), 2, sampling=FEW)
    middle = kb.pass_stats().passes
    alone = [kb.ask(question, 2, sampling=FEW) for question in QUESTIONS]
    assert middle - start < kb.pass_stats().passes - middle
    expected = [(answer.text, [hit.chunk.id for hit in answer.hits]) for answer in alone]
    assert [(answer.text, [hit.chunk.id for hit in answer.hits]) for answer in together] == expected
    assert [answer.text for answer in await kb.aask_many(QUESTIONS, 2, sampling=FEW)] == [a.text for a in alone]
    assert kb.ask_many([]) == []


def test_the_first_error_ends_the_others(kb):
    assert kb.ask(QUESTIONS[0], sampling=rc.Sampling(200)).usage.completion_tokens == 200
    before = kb.pass_stats().passes
    with pytest.raises(PromptError, match="the question is empty"):
        kb.ask_many(["  ", *QUESTIONS * 20], sampling=rc.Sampling(200))
    assert kb.pass_stats().passes - before < 200
