"""langchain-tests: chat model, over the bundled model."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.messages.content import create_text_block
from langchain_doubles import OverAStore
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from scripted import script
from templates import TOOL_TEMPLATES

from langchain_ragcache import ChatRagCache

STORED = "Jonas Lansen belongs to the Rowing Club Heron."
UNKNOWN = (f"Ada Wersen works as a potter in room {number}." for number in count(1))


class _OverAStore(OverAStore):
    """Properties of the model for both suites. A store has a single model, so no other can be named."""

    chat_model_class = ChatRagCache
    supports_model_override = False


class TestStandardChatModelUnit(_OverAStore, ChatModelUnitTests):
    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"LC_OUTPUT_VERSION": "v1"}, {"kb": self.kb}, {"output_version": "v1", "model": "mini"}


MAGIC = '[{"name":"magic_function","arguments":{"input":3}}]'
NOTHING = '[{"name":"magic_function_no_args","arguments":{}}]'
GREETING = '[{"name":"greeting_generator","arguments":{"answer_style":"pirate"}}]'
WEATHER = '<tool_call>{"name": "get_weather", "arguments": {"location": "Kelbrook"}}</tool_call>'
CUSTOMER = '[{"name":"unicode_customer","arguments":{"customer_name":"%s","description":""}}]'
SAID = {
    "test_tool_calling": [MAGIC, MAGIC],
    "test_tool_calling_async": [MAGIC, MAGIC],
    "test_bind_runnables_as_tools": [GREETING],
    "test_tool_choice": [MAGIC, '{"input":3}'],
    "test_tool_calling_with_no_arguments": [NOTHING, NOTHING],
    "test_tool_message_histories_string_content": ["The sum is 3."],
    "test_agent_loop": [WEATHER, "It is sunny."],
    "test_unicode_tool_call_integration": [CUSTOMER % "你好啊集团", CUSTOMER % "こんにちは株式会社"],
}
"""The bundled model has never seen tools: what it says in their tests, under the forms that these ask for."""


class TestStandardChatModel(_OverAStore, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _calls_tools(self, request, registry, mini, monkeypatch) -> None:  # the store asks once itself
        name = request.node.originalname
        if any(word in name for word in ("tool", "agent", "few_shot")):
            monkeypatch.setattr(mini.tokenizer, "chat_template", TOOL_TEMPLATES["hermes"])
        if name in SAID:
            script(monkeypatch, mini, *SAID[name])

    @pytest.fixture(autouse=True)
    def _ends_its_strings(self, request, mini) -> Iterator[None]:
        """Make quotes likelier in the tests of structured answers: the bundled model has never seen JSON, and would
        write strings up to the limit. Keys and types come from the schema.
        """
        if "structured" not in request.node.name:
            yield
            return
        quote = mini.tokenizer.convert_tokens_to_ids('"')
        bias = torch.zeros(mini.vocab_size)
        bias[quote] = 100.0
        head = mini.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda _layer, _args, logits: logits + bias)
        yield
        hook.remove()

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        answer = self._ask(STORED, stream)
        assert answer.usage_metadata["input_token_details"]["cache_read"] > self.kb.count_tokens(STORED)
        return answer

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        unknown = next(UNKNOWN)
        answer = self._ask(unknown, stream)
        assert answer.usage_metadata["input_token_details"]["cache_creation"] >= self.kb.count_tokens(unknown)
        return answer

    def _ask(self, text: str, stream: bool) -> AIMessage | AIMessageChunk:
        model = ChatRagCache(kb=self.kb)
        message = HumanMessage([create_text_block(text, ragcache={}), "Question: Who is it?"])
        if not stream:
            return model.invoke([message])
        first, *rest = model.stream([message])
        return sum(rest, first)
