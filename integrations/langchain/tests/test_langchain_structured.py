"""Answers as objects: a model that does not know the schema is constrained to it."""

import pytest
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, Field

from langchain_ragcache import ChatRagCache


class Place(BaseModel):
    kind: str = Field(pattern="^(club|town)$")
    year: int = Field(ge=1900, le=1999)


@pytest.fixture
def model(open_kb):
    return ChatRagCache(kb=open_kb())


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_pydantic_class(model, method):
    assert isinstance(model.with_structured_output(Place, method=method).invoke("Where?"), Place)


def test_raw_answers_and_what_went_wrong(model):
    found = model.with_structured_output(Place, include_raw=True).invoke("Where?")
    assert found["parsed"] == Place.model_validate_json(found["raw"].content)
    assert found["parsing_error"] is None
    short = ChatRagCache(kb=model.kb, max_tokens=3)
    cut = short.with_structured_output(Place, include_raw=True).invoke("Where?")
    assert cut["parsed"] is None
    assert isinstance(cut["parsing_error"], OutputParserException)
