"""Chat templates that state today's date, as those of Llama 3.2 and GPT-OSS."""

from datetime import datetime
from functools import partial

import pytest
from engine_texts import TEXTS
from kit.makers import tiny_directory
from plain_oracle import greedy, plain_transformers
from transformers.utils import chat_template_utils

import ragcache as rc

TEMPLATE = (
    "{{ bos_token }}Today: {{ strftime_now('%-d %B') }}\n"
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
)
QUESTION, SHORT = "Is the cat happy?", rc.Sampling(max_tokens=4)
MAY, SEPTEMBER = "Today: 3 May\n", "Today: 21 September\n"
CHAT = [{"role": "user", "content": QUESTION}]


dated = tiny_directory(positions=2048, chat_template=TEMPLATE)


@pytest.fixture
def open_dated(open_kb, dated):
    return partial(open_kb, model=dated, method="reposition", store=rc.StoreConfig(load="always"))


@pytest.fixture
def clock(monkeypatch):
    """Set the day that templates state: `clock(month, day)`."""

    class Clock(datetime):
        day = datetime(2026, 5, 3)

        @classmethod
        def now(cls, tz=None):
            return cls.day

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    return lambda month, day: setattr(Clock, "day", datetime(2026, month, day))


def texts_of(kb, read):
    return [kb.lm.tokenizer.decode(ids) for ids in read]


def asked(kb, **options):
    """Ask each way that reads stored passages."""
    return [
        kb.ask(QUESTION, k=2, sampling=SHORT, **options),
        kb.chat(CHAT, k=2, sampling=SHORT, **options),
        kb.ask(QUESTION, k=2, sampling=SHORT, chat_template_kwargs={"any": 1}, **options),
    ]


def stored(kb):
    return set(kb.store.kv.keys())


@pytest.mark.parametrize("recipe", ["isolated", "primer"])
def test_prompts_state_the_day_of_the_question(open_dated, clock, read, recipe):
    with open_dated(recipe=recipe, texts=TEXTS) as kb:
        first = stored(kb)
        asked(kb)
        assert all(MAY in one for one in texts_of(kb, read))
        clock(9, 21)
        read.clear()
        answers = [*asked(kb), kb.ask(QUESTION, k=2, sampling=SHORT, system="Be brief.")]
        assert all(SEPTEMBER in one for one in texts_of(kb, read))
        assert all(hit.kv != "computed" for answer in answers for hit in answer.hits)
    with open_dated(recipe=recipe) as kb:
        answers = asked(kb)
        assert {hit.kv for hit in answers[0].hits} == {"disk"}
        kb.ingest(rc.Document("new", "A ferry goes to the island."))
        assert len(stored(kb)) == len(first) + 1
    assert all(SEPTEMBER in one for one in texts_of(kb, read))


def test_kv_behind_the_prefix_serves_every_day(open_dated, clock, read):
    """What a block was read behind stands before it, whatever day it is: an exact method answers alike."""
    with open_dated(recipe="prefix", texts=TEXTS) as kb:
        first, texts = stored(kb), [answer.text for answer in asked(kb)]
        own = texts_of(kb, read)[0].partition("\n")[0]
    clock(9, 21)
    with open_dated(recipe="prefix") as kb:
        answers = asked(kb)
        assert {hit.kv for answer in answers for hit in answer.hits} <= {"disk", "memory", "shared"}
        assert [answer.text for answer in answers] == texts
        assert kb.ask(QUESTION, k=1, sampling=SHORT).text == kb.ask(QUESTION, k=1, method="full", sampling=SHORT).text
        kb.ingest(rc.Document("new", "A ferry goes to the island."))
        assert len(stored(kb)) == len(first) + 1
    assert all(one.startswith(own) for one in texts_of(kb, read))


def test_a_days_prompt_is_that_of_plain_transformers(open_dated, clock, dated):
    clock(9, 21)
    model, tokenizer = plain_transformers(dated)
    with open_dated(recipe="isolated", texts=TEXTS) as kb:
        clock(12, 1)
        answer = kb.ask(QUESTION, k=1, method="full", sampling=SHORT)
        asked = f"{answer.hits[0].chunk.text}Question: {QUESTION}"
        ids = tokenizer.apply_chat_template([{"role": "user", "content": asked}], tokenize=True)["input_ids"]
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.text == greedy(model, tokenizer, rc.Prompt(ids[:-1], [], ids[-1:]), None, SHORT.max_tokens)
