"""Chains that hand documents to a chat model one by one, so that their KV can be reused.

LangChain's stuff chain joins the documents' text into the prompt; their boundaries, and with them their KV, are lost.
"""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBinding, RunnableLambda, RunnablePassthrough

from langchain_ragcache.chat_models import ChatRagCache
from langchain_ragcache.prompts import FusedPrompt
from ragcache.errors import ConfigError, PromptError

DOCUMENTS_KEY = "context"
INPUT_KEY = "input"
PLAIN_DOCUMENT = PromptTemplate.from_template("{page_content}")


def create_fused_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = DOCUMENTS_KEY,
) -> Runnable[dict[str, Any], Any]:
    """A chain that answers from documents: create_stuff_documents_chain, with every document a passage of its own.

    llm:    a `ChatRagCache`, or one with arguments bound. Any other chat model reads the same messages as text
    prompt: has `document_variable_name` once, as "{context}" in the text of one message: there the documents go
    output_parser: StrOutputParser if left out
    document_prompt, document_separator: stay as they are: a passage is read as it was stored, and passages are divided
            by a line break. What should be read with a document belongs into its text when it is added
    document_variable_name: key of the documents in the chain's input

    Input: a dictionary with the documents and the prompt's other variables. Raises ConfigError (here) and PromptError
    (when it runs) for a prompt that has no single place for the documents.
    """
    _check_place(prompt, document_variable_name)
    _check_plain(document_prompt, document_separator)
    read = FusedPrompt(prompt, document_variable_name, as_passages=_reads_passages(llm))
    fill = RunnableLambda(read.invoke, afunc=read.ainvoke, name="fuse_documents")
    return (fill | llm | (output_parser or StrOutputParser())).with_config(run_name="fused_documents_chain")


def create_fused_retrieval_chain(
    retriever: BaseRetriever | Runnable[dict[str, Any], list[Document]],
    combine_docs_chain: Runnable[dict[str, Any], Any],
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """A chain from {"input": question} to {"input", "context", "answer"}: create_retrieval_chain.

    retriever: gets the question; one that is no BaseRetriever gets the whole input
    combine_docs_chain: `create_fused_documents_chain(...)`
    """
    find = RunnableLambda(_question, name="question") | retriever if isinstance(retriever, BaseRetriever) else retriever
    return (
        RunnablePassthrough.assign(**{DOCUMENTS_KEY: find.with_config(run_name="retrieve_documents")})
        .assign(answer=combine_docs_chain)
        .with_config(run_name="fused_retrieval_chain")
    )


def _question(inputs: dict[str, Any]) -> str:
    question = inputs.get(INPUT_KEY)
    if not isinstance(question, str):
        raise PromptError(f"the input has no question: a string is expected under {INPUT_KEY!r}")
    return question


def _check_place(prompt: BasePromptTemplate[Any], variable: str) -> None:
    if variable not in prompt.input_variables:
        raise ConfigError(
            f"the prompt has no {{{variable}}}, only: {', '.join(prompt.input_variables) or 'nothing'}; write it where "
            "the documents go, or name its variable as document_variable_name"
        )
    messages = prompt.messages if isinstance(prompt, ChatPromptTemplate) else []
    if any(isinstance(one, MessagesPlaceholder) and one.variable_name == variable for one in messages):
        raise ConfigError(
            f"{variable!r} is a MessagesPlaceholder in the prompt; documents go into a message's text: {{{variable}}}"
        )


def _check_plain(document_prompt: BasePromptTemplate[Any] | None, document_separator: str) -> None:
    way_out = "write what should be read with a document into its text when it is added"
    if document_prompt is not None and document_prompt != PLAIN_DOCUMENT:
        raise ConfigError(f"document_prompt would change the passages, whose KV is of their text alone; {way_out}")
    if document_separator.strip():
        raise ConfigError(f"document_separator {document_separator!r} would stand between passages; {way_out}")


def _reads_passages(llm: LanguageModelLike) -> bool:
    """Whether content blocks may say what they are: other services refuse blocks with keys that they do not know."""
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return isinstance(llm, ChatRagCache) or not isinstance(llm, BaseChatModel)
