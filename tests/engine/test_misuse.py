"""What is called wrongly, or too late, says so and names the way out; nothing is lost by it. Options of questions: each
is taken by every call that it concerns, and one that there is not is refused by name."""

import inspect
import re

import pytest
from engine_texts import TEXTS, user

import ragcache as rc
from ragcache.errors import ConfigError, ContextTooLongError, PromptError, StoreClosedError, UnknownHandleError
from ragcache_demo.bag_of_words import BagOfWords

QUESTION = "Where do dogs bark?"
HALF = f"{QUESTION} \ud83d"
ONE = rc.Sampling(max_tokens=1)


TURNS = [user(QUESTION)]


def asking(*given, **options):
    return lambda kb: kb.ask(QUESTION, *given, **options)


def chatting(*messages, **options):
    return lambda kb: kb.chat(list(messages), **options)


NO_MESSAGES = "of type {}; give a list such as"
APART = [rc.Passage("One."), "between", rc.Passage("Two."), "Who?"]
REFUSED = [
    # Options that there are not
    (asking(max_tokens=5), ConfigError, "no option max_tokens; say sampling=rc.Sampling(max_tokens=...)"),
    (chatting(temperature=1, top_p=0.5), ConfigError, "rc.Sampling(temperature=..., top_p=...)"),
    (lambda kb: kb.ask_many(TURNS, temperature=1), ConfigError, "temperature"),
    (asking(colour="red"), ConfigError, "no option colour; the options are search, filter"),
    (lambda kb: kb.retrieve(QUESTION, max_tokens=5), ConfigError, "no option max_tokens; the options are search"),
    # Arguments of other types
    (lambda kb: kb.chat("hello"), ConfigError, "messages is 'hello', " + NO_MESSAGES.format("str")),
    (lambda kb: kb.chat("hello"), ConfigError, "`ask` takes a lone question"),
    (lambda kb: kb.chat(TURNS[0]), ConfigError, NO_MESSAGES.format("dict")),
    (lambda kb: kb.ask(None), ConfigError, "question is None, of type NoneType; give its text"),
    (lambda kb: kb.retrieve(5), ConfigError, "question is 5, of type int; give its text, or its vector"),
    (asking("3"), ConfigError, "k is '3', of type str; give a number, at least 1"),
    (asking(sampling={"max_tokens": 5}), ConfigError, "of type dict; give rc.Sampling(max_tokens=...)"),
    (lambda kb: kb.ask_many(QUESTION), ConfigError, "give a list of questions"),
    (lambda kb: kb.ingest(5), ConfigError, "inputs is 5, of type int; give paths, folders, or rc.Document objects"),
    (lambda kb: kb.ingest(rc.Document("new", "Owls hunt."), kv="hot"), ConfigError, "kv 'hot' is unknown"),
    *((lambda kb, given=given: kb.precompute(given), ConfigError, "holds no passages that can be read")
      for given in (7, [7], b"text", [b"text"], None)),
    # Questions
    (lambda kb: kb.ask(""), PromptError, "empty"),
    (lambda kb: kb.ask("  \n"), PromptError, "empty"),
    (lambda kb: kb.ask("why " * 200), ContextTooLongError, "512"),
    (asking(0), ConfigError, "k is 0"),
    (asking(timeout_s=0), ConfigError, "timeout_s is 0"),
    (asking(method="telepathy"), ConfigError, "telepathy"),
    (asking(on_overflow="shrink"), ConfigError, "shrink"),
    (asking(order="alphabet"), ConfigError, "'alphabet' is unknown; choose one of relevance, shared"),
    (asking(sampling=rc.Sampling(logit_bias={10**6: 1.0})), ConfigError, "logit_bias names token id"),
    (asking(sampling=rc.Sampling(stop_token_ids=[-1])), ConfigError, "stop_token_ids names token id"),
    # A store that is read whole
    # Conversations
    (chatting(), PromptError, "no user message"),
    (chatting({"role": "assistant", "content": "Hm."}), PromptError, "no user message"),
    (chatting({"role": "narrator", "content": "x"}), PromptError, "message 0 has role 'narrator'"),
    (chatting(user("a"), "b"), PromptError, "message 1 has role None"),
    (chatting(user(None)), PromptError, "content of message 0"),
    (chatting({"role": "user", "content": [{"type": "image"}]}), PromptError, "content of message 0"),
    (chatting(user("  ")), PromptError, "question is empty"),
    (chatting(user("\ue000ragcache-context\ue000")), PromptError, "private character"),
    (chatting(user("word " * 4000), k=2), ContextTooLongError, "takes"),
    (chatting(*TURNS, on_overflow="drop"), ConfigError, "on_overflow 'drop'"),
    (chatting(*TURNS, context="forget"), ConfigError, "'forget' is unknown; choose one of last, keep"),
    # Conversations whose context is kept
    (chatting(*TURNS, passages=[rc.Passage("x")], context="keep"), ConfigError, "takes passages in the messages"),
    (chatting(*TURNS, k=1, method="a3", context="keep"), ConfigError, "'a3' cannot keep"),
    (chatting(*TURNS, k=1, method="a3", context="keep"), ConfigError, "choose full, reposition, cacheblend, epic or l"),
    (chatting(user("\ue000ragcache-turn-0\ue000"), k=1, context="keep"), PromptError, "private character"),
    # Passages in them
    (chatting(user(rc.Passage(" "), "?")), PromptError, "passage 0 has no text"),
    (chatting(user(rc.Passage("a"), "?"), k=2), ConfigError, "exclude each other"),
    (chatting(user(*APART), method="a3"), PromptError, "'a3' reads none there; choose reposition, cacheblend"),
    (chatting(user(*APART), context="keep"), PromptError, "stands between two passages, which context=\"keep\""),
    (asking(hits=[rc.Passage(id="gone#0")]), UnknownHandleError, "gone#0"),
    (asking(hits=[rc.Passage(handle="0" * 64)]), UnknownHandleError, "0" * 64),
    (asking(hits=[rc.Passage(" ", "gone#0")]), UnknownHandleError, "send the text"),
    # Half of a surrogate pair
    *((call, PromptError, "half of a surrogate pair") for call in (
        lambda kb: kb.ask(HALF, k=1), lambda kb: kb.retrieve(HALF, k=1), lambda kb: kb.complete(HALF),
        lambda kb: kb.retrieve(HALF, k=1, search="text"), chatting(user(HALF)),
        chatting(user(rc.Passage(HALF), QUESTION)),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def kept(lm, tmp_path_factory):
    path = tmp_path_factory.mktemp("misused") / "kb"
    with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords()) as kb:
        kb.ingest(rc.Document(id, text) for id, text in TEXTS.items())
        yield kb
        assert kb.ask(QUESTION, k=1, sampling=ONE).hits, "it answers still"


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_is_wrong_is_named_with_the_way_out(kept, call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call(kept)
    assert kept.admission.reserved_bytes == 0


CALLS = dict.fromkeys(("retrieve", "ask", "stream", "complete", "stream_completion"), QUESTION)
CALLS |= {"chat": TURNS, "stream_chat": TURNS}


async def test_every_call_names_an_option_that_there_is_not_and_those_there_are(kept):
    for name, given in CALLS.items():
        with pytest.raises(ConfigError, match=r"no option timout_s, Filter; .*") as refused:
            getattr(kept, name)(given, timout_s=3, Filter={})
        assert ("mmr_lambda" if name == "retrieve" else "timeout_s") in str(refused.value), name
        later = getattr(kept, f"a{name}")(given, colour="red")
        with pytest.raises(ConfigError, match="no option colour"):
            await (anext(later) if "stream" in name else later)


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_k", "min_p", "seed"])
def test_a_sampling_field_of_another_type_is_named(field):
    with pytest.raises(ConfigError, match=f"{field} is 'much'.* give a number"):
        rc.Sampling(**{field: "much"})


async def test_a_closed_store_says_so(kb):
    kb.close()
    kb.close()
    calls = [
        lambda: kb.ask(QUESTION),
        lambda: kb.retrieve(QUESTION),
        lambda: kb.chat(TURNS),
        lambda: kb.complete(QUESTION),
        lambda: kb.ingest(rc.Document("new", "Owls hunt.")),
        lambda: kb.delete("dogs"),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError, match="closed; open it again"):
            call()
    with pytest.raises(StoreClosedError):
        await kb.aask(QUESTION)
    with pytest.raises(StoreClosedError):
        _ = [event async for event in kb.astream(QUESTION)]


@pytest.mark.parametrize("call", CALLS)
def test_calls_for_an_event_loop_say_what_they_take_as_the_others_do(call):
    own, twin = (inspect.signature(getattr(rc.RagCache, name)) for name in (call, f"a{call}"))
    assert list(own.parameters.values()) == list(twin.parameters.values())
    assert str(own.parameters["options"].annotation).startswith("Unpack[")


def test_a_question_chooses_among_as_many_candidates_as_it_says(kb):
    for options in ({"fetch_k": 4}, {"fetch_k": 2}):
        wanted = [hit.chunk.id for hit in kb.retrieve(QUESTION, 2, mmr_lambda=0.01, **options)]
        answer = kb.ask(QUESTION, 2, mmr_lambda=0.01, sampling=rc.Sampling(1), **options)
        assert [hit.chunk.id for hit in answer.hits] == wanted
    with pytest.raises(ConfigError, match="fetch_k"):
        kb.chat(TURNS, k=2, mmr_lambda=0.5, fetch_k=1)


# method="full"


EXACT = {"method": "full", "sampling": rc.Sampling(max_tokens=6)}


def last_answer(found) -> rc.Answer:
    return found if isinstance(found, rc.Answer) else list(found)[-1].answer


def test_every_call_takes_full(kb):
    for call, given in list(CALLS.items())[1:]:  # all but `retrieve`
        more = {"k": 2} if "chat" in call or call in ("ask", "stream") else {}
        assert last_answer(getattr(kb, call)(given, **more, **EXACT)).method == "full", call
