"""Put a store, a model and an embedder together, and refuse those that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragcache.codecs import get_codec
from ragcache.engine.asking.admission import Admission, default_budget
from ragcache.engine.asking.contexts import Contexts
from ragcache.engine.asking.estimate import PrefillEstimate
from ragcache.engine.asking.kept import TurnMemory
from ragcache.engine.asking.prefixes import Prefixes
from ragcache.engine.asking.prompts import Prompts
from ragcache.engine.asking.reader import Reader
from ragcache.engine.asking.supply import Supply
from ragcache.engine.asking.verdict import choose_method
from ragcache.engine.loading.loader import BlockLoader
from ragcache.engine.loading.policy import ALWAYS
from ragcache.engine.loading.probe import open_rates
from ragcache.engine.store import Store, StoreConfig
from ragcache.fusion.base import FusionMethod
from ragcache.fusion.eviction import SnapKV
from ragcache.fusion.fuse import block_recipe
from ragcache.ingest.chunker import Chunker, ChunkerConfig
from ragcache.ingest.encoder import ModelEncoder
from ragcache.ingest.pipeline import IngestConfig, Ingestor
from ragcache.ingest.whole import WholeTexts
from ragcache.kv.identity import Recipe
from ragcache.kv.prefix_tree import PrefixTree
from ragcache.models.lm import LanguageModel
from ragcache.models.loading import load_lm
from ragcache.openmp import team_ends
from ragcache.prompt import prompt_format
from ragcache.retrieval.embedder import Embedder, load_embedder
from ragcache.retrieval.retriever import Retriever
from ragcache.store.documents import DocumentStore

DEFAULT_MODEL = "mini"
DEFAULT_EMBEDDER = "minilm"


@dataclass(frozen=True)
class Parts:
    """All that a knowledge base consists of.

    evict:  what questions keep of their passages unless they say otherwise; None: all of it
    loader: None where what a tier has is always loaded
    whole:  makes one passage of a whole text
    system: the system message of conversations that have none
    """

    store: Store
    config: StoreConfig
    lm: LanguageModel
    retriever: Retriever
    method: FusionMethod
    evict: SnapKV | None
    loader: BlockLoader | None
    admission: Admission
    estimate: PrefillEstimate
    reader: Reader
    ingestor: Ingestor
    whole: WholeTexts
    turns: TurnMemory
    system: str | None


@dataclass(frozen=True)
class Choices:
    """How the parts are to be put together; see `RagCache.open`."""

    method: str | FusionMethod | None
    method_options: Mapping[str, Any]
    evict: SnapKV | None
    recipe: str | Recipe | None
    system: str | None
    question_format: str | None
    chunker: ChunkerConfig
    ingest: IngestConfig
    tenant: str


@team_ends()
def assemble(store: Store, config: StoreConfig, lm: LanguageModel, retriever: Retriever, chosen: Choices) -> Parts:
    """Raises ConfigError, ModelError, PromptError."""
    documents, kv = store.documents, store.kv
    method, recipe = choose_method(store.layout.root, lm, chosen.method, chosen.method_options, chosen.recipe)
    text = prompt_format(lm.tokenizer, system=chosen.system, question_format=chosen.question_format)
    estimate = PrefillEstimate()
    tree = PrefixTree(lm.shape, config.prefix_bytes)
    prefix_ids = [*text.prefix_ids, *(method.additions(lm).behind_prefix if method.reuses_blocks else ())]
    used, tenant = block_recipe(lm, method, recipe), chosen.tenant
    prefixes = Prefixes(lm, documents, used, tenant, tree, prefix_ids)
    encoder = ModelEncoder(lm, used, prefix_ids, tenant, read_prefix=prefixes.exact, on_encoded=estimate.add)
    admission = Admission(default_budget(lm) if config.answer_bytes is None else config.answer_bytes)
    loader = open_loader(store, config, lm)
    cut = Chunker(lm.tokenizer, **asdict(chosen.chunker))
    return Parts(
        store=store,
        config=config,
        lm=lm,
        retriever=retriever,
        method=method,
        evict=chosen.evict,
        loader=loader,
        admission=admission,
        estimate=estimate,
        reader=Reader(
            lm,
            Prompts(lm, encoder, text, prefixes),
            Supply(lm, encoder, kv, documents, prefixes, loader),
            prefixes,
            Contexts(admission, tree),
            estimate,
        ),
        ingestor=Ingestor(store.layout, documents, kv, retriever, cut, encoder, chosen.ingest),
        whole=WholeTexts(lm.tokenizer, lm.max_positions),
        turns=TurnMemory(documents, tenant),
        system=chosen.system,
    )


def open_loader(store: Store, config: StoreConfig, lm: LanguageModel) -> BlockLoader | None:
    """The chooser between loading and computing a block; None where there is no choice."""
    if config.load == ALWAYS:
        return None
    rates = open_rates(store.rates, store.kv.root, lm, get_codec(config.codec), config.measure_s)
    return BlockLoader(store.kv, rates, policy=config.load, ahead_bytes=config.speculative_bytes)


def open_retriever(store: Store, config: StoreConfig, embedder: str | Path | Embedder | None, device: str) -> Retriever:
    """Raises EmbedderError, EmbedderMismatchError, ConfigError."""
    found = open_embedder(store.documents, embedder, device)
    return Retriever.open(store.documents, store.layout.index, found, kind=config.index)


def open_model(
    documents: DocumentStore, model: str | Path | LanguageModel | None, dtype: str | None, device: str
) -> LanguageModel:
    """The model asked for, or the one that the store was made with, or the default one for a new store.

    Raises ModelMismatchError when the store's blocks belong to another model, and what `load_lm` raises.
    """
    bound = documents.properties()
    if isinstance(model, LanguageModel):
        lm = model
    else:
        name = model if model is not None else str(bound.get("model_name", DEFAULT_MODEL))
        lm = load_lm(name, dtype=dtype or str(bound.get("model_dtype", "float32")), device=device)
    documents.bind("fingerprint", lm.fingerprint)
    _note(documents, bound, "model_name", lm.name)
    _note(documents, bound, "model_dtype", str(lm.dtype).removeprefix("torch."))
    return lm


def _note(documents: DocumentStore, bound: dict[str, Any], name: str, value: str) -> None:
    """Record how the model was asked for. The fingerprint alone decides whether another one fits: it may have moved."""
    if name not in bound:
        documents.bind(name, value)


def open_embedder(documents: DocumentStore, embedder: str | Path | Embedder | None, device: str) -> Embedder:
    """The embedder asked for, or the store's own, or the default one. Raises EmbedderError."""
    if embedder is None:
        embedder = str(documents.properties().get("embedder", DEFAULT_EMBEDDER))
    return load_embedder(embedder, device) if isinstance(embedder, str | Path) else embedder
