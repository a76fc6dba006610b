"""Structured output of LlamaIndex's calls: objects of a class, by constrained decoding."""

import json

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, field_validator
from tiny_model import save_tiny_llama

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from ragcache.errors import ConfigError
from ragcache_demo.bag_of_words import BagOfWords

STORED = "Jonas Lansen belongs to the Rowing Club Heron."
ASKED = PromptTemplate("Is {person} a member?")
PERSON = {"person": "Jonas Lansen"}


class Kind(BaseModel, extra="forbid"):
    """What somebody is."""

    member: bool
    letter: str = Field(max_length=2)


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    lm = rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("plain"), positions=2048))
    with rc.RagCache.open(tmp_path_factory.mktemp("kb"), model=lm, method="reposition", embedder=BagOfWords()) as kb:
        kb.ingest([rc.Document("lansen", STORED)])
        yield kb


@pytest.fixture
def llm(kb):
    return RagCacheLLM(kb, max_tokens=64)


async def test_every_way_makes_the_object_that_the_engine_writes(kb, llm):
    answer = kb.chat(
        [{"role": "user", "content": "Is Jonas Lansen a member?"}],
        sampling=rc.Sampling(max_tokens=64, json_schema=Kind.model_json_schema()),
    )
    right = Kind.model_validate_json(answer.text)
    assert llm.structured_predict(Kind, ASKED, **PERSON) == right
    assert await llm.astructured_predict(Kind, ASKED, **PERSON) == right
    assert list(llm.stream_structured_predict(Kind, ASKED, **PERSON))[-1] == right
    stream = await llm.astream_structured_predict(Kind, ASKED, **PERSON)
    assert [one async for one in stream][-1] == right
    asked = ChatMessage(ASKED.format(**PERSON))
    assert llm.as_structured_llm(Kind).chat([asked]).raw == right


def test_a_stream_shows_the_object_as_it_grows(llm):
    *partial, last = llm.stream_structured_predict(Kind, ASKED, **PERSON)
    assert [one.member for one in partial].index(last.member) < len(partial) - 1
    assert partial[0].letter is None


def test_passages_are_read_by_fused_prefill(kb, llm, monkeypatch):
    seen = []
    chat = RagCacheLLM.chat
    monkeypatch.setattr(RagCacheLLM, "chat", lambda *a, **k: seen.append(chat(*a, **k)) or seen[-1])
    hits = kb.retrieve("Jonas Lansen", k=1)
    llm.structured_predict(Kind, ASKED, llm_kwargs={"segments": hits}, **PERSON)
    assert seen[0].raw["usage"]["cached_tokens"] >= len(STORED)  # a token is a byte


def test_a_form_without_a_class(llm):
    message = ChatMessage("Is he?")
    assert llm.chat([message], choices=["yes", "no"]).message.content in ("yes", "no")
    assert llm.chat([message], regex="[ab]{3}").message.content.strip("ab") == ""
    text = llm.chat([message], json_schema={"type": "boolean"}).message.content
    assert isinstance(json.loads(text), bool)
    with pytest.raises(ConfigError, match="exclude each other"):
        llm.chat([message], choices=["a"], regex="a")


def test_an_answer_that_was_cut_says_so(kb):
    with pytest.raises(ConfigError, match=r"no Kind \(it was cut: raise max_tokens\)"):
        RagCacheLLM(kb, max_tokens=4).structured_predict(Kind, ASKED, **PERSON)


def test_a_rule_that_no_schema_states_is_named(llm):
    class Never(Kind):
        @field_validator("member")
        @classmethod
        def nobody(cls, value):
            raise ValueError("nobody is one")

    with pytest.raises(ConfigError, match="nobody is one"):
        llm.structured_predict(Never, ASKED, **PERSON)


def test_the_words_of_a_prompt_can_be_chosen_instead(kb):
    llm = RagCacheLLM(kb, max_tokens=8, pydantic_program_mode=PydanticProgramMode.LLM)
    with pytest.raises(ValueError, match="Could not extract json"):
        llm.structured_predict(Kind, ASKED, **PERSON)
