import shutil
from pathlib import Path

import pytest
from kit.makers import QUIET
from li_texts import SHORT, TEXTS
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers.base import BaseEventHandler
from llama_index.core.instrumentation.events.base import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import TextNode

import ragcache as rc
from llama_index.llms.ragcache import RagCacheLLM
from llama_index.vector_stores.ragcache import RagCacheVectorStore
from ragcache_demo.bag_of_words import BagOfWords


@pytest.fixture
def empty(open_kb) -> rc.RagCache:
    return open_kb()


@pytest.fixture(scope="session")
def made(tmp_path_factory, lm) -> Path:
    """Return the path of a store with documents ingested without LlamaIndex. Tests that change a store take `kb`."""
    path = tmp_path_factory.mktemp("made") / "kb"
    years = {id: 2020 + rank for rank, id in enumerate(TEXTS)}
    with rc.RagCache.open(path, model=lm, embedder=BagOfWords(), method="reposition", store=QUIET) as kb:
        report = kb.ingest(rc.Document(id, text, {"year": years[id]}) for id, text in TEXTS.items())
        assert sorted(report.added) == sorted(TEXTS)
    return path


@pytest.fixture
def kb(open_kb, made, tmp_path) -> rc.RagCache:
    shutil.copytree(made, tmp_path / "kb")
    return open_kb()


@pytest.fixture
def store(empty) -> RagCacheVectorStore:
    return RagCacheVectorStore(empty)


@pytest.fixture
def llm(kb) -> RagCacheLLM:
    return RagCacheLLM(kb, **SHORT)


@pytest.fixture
def nodes() -> list[TextNode]:
    return [
        TextNode(id_=id, text=text, metadata={"topic": id, "rank": n}) for n, (id, text) in enumerate(TEXTS.items())
    ]


@pytest.fixture
def tokens_run(lm):
    """Return a function that counts the tokens that went into the model's embedding layer since its last call."""
    seen: list[int] = []
    hook = lm.model.get_input_embeddings().register_forward_hook(lambda layer, args, out: seen.append(args[0].numel()))

    def since() -> int:
        total = sum(seen)
        seen.clear()
        return total

    yield since
    hook.remove()


class Recorder(BaseEventHandler):
    """Keeps every event, in the order of sending."""

    events: list[BaseEvent] = []  # noqa: RUF012  # a pydantic field

    def handle(self, event: BaseEvent, **kwargs: object) -> None:
        self.events.append(event)

    def answers(self) -> list[dict]:
        """Return the engine's answers, from LlamaIndex's events of the model's last responses."""
        ends = LLMChatEndEvent | LLMCompletionEndEvent
        return [event.response.raw for event in self.events if isinstance(event, ends)]


@pytest.fixture
def recorder():
    root = get_dispatcher()
    recorder = Recorder(events=[])
    before = list(root.event_handlers)
    root.add_event_handler(recorder)
    yield recorder
    root.event_handlers[:] = before
