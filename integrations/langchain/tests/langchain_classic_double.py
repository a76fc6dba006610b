"""LangChain's stuff chain as in `langchain_classic.chains.combine_documents`, which the tests do not install."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnablePassthrough


def stuff_chain(llm: BaseChatModel, prompt: ChatPromptTemplate, separator: str = "\n\n") -> Runnable[dict, Any]:
    """Return a chain that joins documents into {context}; the answer is the model's whole message."""
    each = PromptTemplate.from_template("{page_content}")

    def join(inputs: dict) -> str:
        return separator.join(format_document(one, each) for one in inputs["context"])

    return RunnablePassthrough.assign(context=join) | prompt | llm
