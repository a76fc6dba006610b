"""Structured output of LlamaIndex's calls: objects of a class, by constrained decoding."""

import pytest
from kit.makers import tiny_lm
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, Field

from llama_index.llms.ragcache import RagCacheLLM

ASKED = PromptTemplate("Is {person} a member?")
PERSON = {"person": "Jonas Lansen"}


class Kind(BaseModel, extra="forbid"):
    """What somebody is."""

    member: bool
    letter: str = Field(max_length=2)


lm = tiny_lm(positions=2048)


@pytest.fixture
def llm(open_kb):
    return RagCacheLLM(open_kb(), max_tokens=64)


def test_the_schema_of_a_class_holds_an_answer(llm):
    held = {"json_schema": Kind.model_json_schema()}
    assert isinstance(llm.structured_predict(Kind, ASKED, llm_kwargs=held, **PERSON), Kind)
    assert isinstance(llm.as_structured_llm(Kind).chat([ChatMessage("Is he?")], **held).raw, Kind)
