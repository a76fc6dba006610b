"""The commands ask and chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcache.cli import flags
from ragcache.cli.client import NotServedError, ask_server, find_server
from ragcache.cli.serve import AddressOptions, run_server
from ragcache.cli.terminal import command, print_json, printable, say, say_error, seconds_text
from ragcache.engine.options import AnswerDefaults, AnswerOptions
from ragcache.errors import RagCacheError
from ragcache.server.settings import ServerSettings

if TYPE_CHECKING:
    from ragcache import Answer, RagCache
    from ragcache.engine.answer import Event

LEAVE = ("/exit", "/quit")


@command
def ask(
    question: Annotated[str, typer.Argument(help="What to answer from the store.")],
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    answer: AnswerOptions,
    collection: flags.Collection = None,
    timeout_s: flags.Timeout = None,
    as_json: flags.Json = False,
    local: Annotated[bool, flags.option("--local", "Open the store here, also where a server runs over it.")] = False,
) -> None:
    """Answer a question from the store: write the answer as it is generated, then its sources.

    If `ragcache serve` runs over the store on this machine, the question goes to that server (with RAGCACHE_API_KEY as
    the key), and no model is loaded. With options that say how the store is opened, this command opens it itself.
    """
    if not local:
        found = _served(
            question, store, models, answer, {"timeout_s": timeout_s, "collection": collection}, quiet=as_json
        )
        if found is not None:
            print_json(found) if as_json else print_answer(found)
            return
    options = {**answer.call_options(), "timeout_s": timeout_s}
    with flags.open_with_models(store, models) as opened:
        kb = opened if collection is None else opened.collection(collection, create=False)
        if as_json:
            print_json(kb.ask(question, **options).to_json())
        else:
            print_answer(stream_text(kb.stream(question, **options)).to_json())


@command
def why(
    question: Annotated[str, typer.Argument(help="A question, or - for a whole prompt on standard input.")],
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    answer: AnswerOptions,
    as_json: flags.Json = False,
) -> None:
    """Say for each passage of a question why it is, or is not, read from stored KV. No answer is generated."""
    asked = [{"role": "user", "content": sys.stdin.read()}] if question == "-" else question
    options = answer.call_options()
    if not isinstance(asked, str):
        options.pop("k", None)
    with flags.open_with_models(store, models) as kb:
        reasons = kb.why(asked, **options)
    if as_json:
        print_json({"reasons": [asdict(one) for one in reasons]})
        return
    for one in reasons:
        place = f" at token {one.place}" if one.place >= 0 else ""
        say(f"{printable(one.passage)}: {one.why}{place}{f' ({printable(one.detail)})' if one.detail else ''}")
    if not reasons:
        say("the prompt holds no passage, and nothing that is close to a stored passage")


def _served(
    question: str,
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    answer: AnswerOptions,
    more: dict[str, Any],
    *,
    quiet: bool,
) -> dict[str, Any] | None:
    """Return the answer of the server over this store in the form of `Answer.to_json`, and print its text as it comes.

    Return None if the store has to be opened here: no server runs over it, or a reason was written to standard error.

    more: fields of the request beside `answer`. quiet: do not print the answer's text
    """
    try:
        server = find_server(store.store)
        if server is None:
            return None
        other = _differing(store, flags.StoreOptions(store=store.store)) + _differing(models, flags.EngineOptions())
        if models.model == server.weights:
            other.remove("model")
        if models.method is not None:
            more |= {"method": models.method, "method_options": flags.method_options(models.option or ())}
            other = [name for name in other if name not in ("method", "option")]
        if other:
            raise NotServedError(f"the server at {server.url} has its own {', '.join(other)}")
        found = ask_server(server, question, answer, more, _drop if quiet else _print_piece)
    except NotServedError as reason:
        print(f"{printable(str(reason))}; opening the store", file=sys.stderr)
        return None
    if not quiet:
        say()
    return found


def _differing(
    given: flags.StoreOptions | flags.EngineOptions, plain: flags.StoreOptions | flags.EngineOptions
) -> list[str]:
    return [name for name, value in vars(given).items() if (value or None) != (vars(plain)[name] or None)]


def _drop(_kind: str, _text: str) -> None: ...


def _print_piece(kind: str, text: str) -> None:
    if kind == "content":
        say(text, end="")
    else:
        print(printable(text), end="", file=sys.stderr, flush=True)


@command
def chat(
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    answer: AnswerDefaults,
    address: AddressOptions,
    timeout_s: flags.Timeout = None,
    web: Annotated[
        bool, flags.option("--web", "Chat in a web page: the API and the page, on --host and --port.")
    ] = False,
) -> None:
    """Ask one question after another. Each question is answered alone, without the questions before it.

    With --context keep the chat is a conversation: every turn continues from the questions, answers and passages before
    it, and the model reads only the new text. Ctrl-C ends an answer, /exit or Ctrl-D ends the chat. With --web you chat
    in a web page instead of the terminal, and its conversations include earlier questions; Ctrl-C ends the server.
    """
    if web:
        settings = ServerSettings(answers=answer)
        settings = settings if timeout_s is None else replace(settings, timeout_s=timeout_s)
        run_server(store, models, address, flags.ReadLimitOptions(), settings, web=True)
        return
    options = {**answer.call_options(), "timeout_s": timeout_s}
    with flags.open_with_models(store, models) as kb:
        ask_next: Callable[[str], Iterator[Event]] = partial(kb.stream, **options)
        if answer.context == "keep":
            ask_next = _conversation(kb, {**options, "drop_turns": answer.drop_turns})
        for question in _questions():
            try:
                print_answer(stream_text(ask_next(question)).to_json())
            except RagCacheError as error:
                say_error(error)
            except KeyboardInterrupt:
                say("\n(stopped)")
            say()


def _conversation(kb: RagCache, options: Mapping[str, Any]) -> Callable[[str], Iterator[Event]]:
    """Return a function that asks the next question of a conversation, and yields the events of its answer.

    The prompt holds the earlier questions, their answers and passages, and the question's own passages. A question that
    failed or was stopped is dropped from the conversation.
    """
    from ragcache import Done

    messages: list[dict[str, str]] = []

    def ask_next(question: str) -> Iterator[Event]:
        turns = [*messages, {"role": "user", "content": question}]
        for event in kb.stream_chat(turns, context="keep", **options):
            if isinstance(event, Done):
                messages[:] = [*turns, {"role": "assistant", "content": event.answer.text}]
            yield event

    return ask_next


def _questions() -> Iterator[str]:
    """Yield lines from the terminal, with a prompt, or from a pipe."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() in LEAVE:
            return
        if line.strip():
            yield line.strip()


def stream_text(events: Iterator[Event]) -> Answer:
    """Write the answer as its tokens come, and the model's reasoning to standard error, and return the whole answer."""
    from ragcache import Done, Reasoning, Token

    for event in events:
        if isinstance(event, Reasoning | Token):
            _print_piece("content" if isinstance(event, Token) else "reasoning_content", event.text)
        elif isinstance(event, Done):
            say()
            return event.answer
    raise AssertionError("a stream ends with Done")


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print the answer's sources and costs, after its text was printed. answer: in the form of `Answer.to_json`"""
    say()
    if not answer["hits"]:
        say("No passages were read: the answer rests on nothing in the store.")
    for rank, hit in enumerate(answer["hits"], 1):
        say(f"  [{rank}] {source_line(hit)}")
    if answer["dropped"]:
        say(f"  {answer['dropped']} more passages did not fit the model's context")
    if answer["dropped_turns"]:
        say(f"  the {answer['dropped_turns']} oldest messages did not fit the model's context")
    usage = answer["usage"]
    say(
        f"  first token after {seconds_text(answer['timings']['ttft_s'])}; {usage['prompt_tokens']} prompt tokens, "
        f"{usage['cached_tokens']} of them from the cache; {usage['completion_tokens']} generated"
    )
    say(f"  read by {answer['method']}: {answer['method_reason']}")


def source_line(hit: Mapping[str, Any]) -> str:
    """Return a line about a passage: title, source, place in the source, score, and where its KV came from."""
    title = hit["title"] or hit["document_id"]
    where = "" if hit["source"] in ("", title) else f" ({hit['source']})"
    place = f", {hit['place']}" if hit["place"] else ""
    return f"{title}{where}{place}  score {hit['score']:.3f}  KV: {hit['kv']}"
