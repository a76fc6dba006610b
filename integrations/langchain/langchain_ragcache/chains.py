"""Chains that pass documents to a chat model as separate passages, so that their KV can be reused.

LangChain's stuff chain joins the documents' text into the prompt; their boundaries, and with them their KV, are lost.
"""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough, RunnableSequence

from langchain_ragcache.chat_models import ChatRagCache
from langchain_ragcache.prompts import Around, FusedPrompt
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
    """Return a chain that answers from documents, like create_stuff_documents_chain, but reads each document as a
    separate passage.

    llm:    a `ChatRagCache`, also with arguments bound, with fallbacks of its kind (`with_fallbacks`), or with more
            steps (`model | parser`, `with_structured_output`)
    prompt: has `document_variable_name` once, as "{context}" in the text of one message, where the documents are put
    output_parser: by default StrOutputParser, or none for an llm with more steps
    document_prompt: has {page_content} once; the text around {page_content} is read between the passages, which only
                     the methods reposition, link and full do
    document_separator: put between passages unless it is only white space; a passage ends with a line break in any case
    document_variable_name: key of the documents in the chain's input

    Input: a dictionary with the documents and the prompt's other variables. Raises ConfigError (here) and PromptError
    (when it runs) for a prompt that has no single place for the documents; ConfigError for another chat model, which
    would not know the passages' content blocks.
    """
    if isinstance(llm, BaseChatModel) and not isinstance(llm, ChatRagCache):
        raise ConfigError(
            f"a {type(llm).__name__} cannot read passages; give a ChatRagCache, or use create_stuff_documents_chain"
        )
    _check_place(prompt, document_variable_name)
    around = Around(document_prompt or PLAIN_DOCUMENT, document_separator)
    read = FusedPrompt(prompt, document_variable_name, around)
    chain = RunnableLambda(read.invoke, afunc=read.ainvoke, name="fuse_documents") | llm
    parser = output_parser or (None if isinstance(llm, RunnableSequence) else StrOutputParser())
    return (chain if parser is None else chain | parser).with_config(run_name="fused_documents_chain")


def create_fused_retrieval_chain(
    retriever: BaseRetriever | Runnable[dict[str, Any], list[Document]],
    combine_docs_chain: Runnable[dict[str, Any], Any],
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """Return a chain from {"input": question} to {"input", "context", "answer"}, like create_retrieval_chain.

    retriever: gets the question; if it is not a BaseRetriever, it gets the whole input
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
