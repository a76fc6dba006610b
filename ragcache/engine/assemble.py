"""Assemble a store, a model and an embedder, and refuse combinations that do not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ragcache.engine.admission import UNKNOWN_BYTES, Admission, default_budget
from ragcache.engine.caches.generation import Generation
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.engine.caches.prefixes import Prefixes
from ragcache.engine.caches.shared_prefixes import SharedPrefixes
from ragcache.engine.caches.stored_prefixes import StoredPrefixes
from ragcache.engine.contract import EMBEDDED, ENGINES, Connection, EmbeddedModel, Engine
from ragcache.engine.embedder_probe import refuse_other_embedder
from ragcache.engine.estimate import PrefillEstimate
from ragcache.engine.history import ConversationCache
from ragcache.engine.kv_lookup import KVLookup
from ragcache.engine.loader import BlockLoader
from ragcache.engine.local_engine import LocalEngine
from ragcache.engine.options import StoreConfig
from ragcache.engine.probe import open_rates
from ragcache.engine.prompts import Prompts
from ragcache.engine.rates import ALWAYS, NEVER
from ragcache.engine.request import RequestOptions
from ragcache.engine.store_config import StoreParts, open_kv_to_fill
from ragcache.engine.verdict import Choice, StoredBlocks, choose_method
from ragcache.errors import ConfigError, ModelMismatchError, StoreMismatchError
from ragcache.fusion.fuse import block_recipe
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.chunker import Chunker, ChunkerConfig
from ragcache.ingest.context_chunks import NEIGHBOURHOODS, Neighbourhood
from ragcache.ingest.encoder import BlockKeys, ModelEncoder
from ragcache.ingest.pipeline import Ingestor
from ragcache.ingest.read_limits import IngestConfig
from ragcache.ingest.whole_chunker import PassthroughSplitter
from ragcache.ingest.worker import Workers, WorkersConfig
from ragcache.kv.block_key import PRIMER, Recipe
from ragcache.models.card import ModelCard
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.hub import resolve
from ragcache.models.language_model import LanguageModel
from ragcache.models.load import load_card, load_lm
from ragcache.models.machine import AUTO, advice_on, find_device
from ragcache.models.primer import bound_primer
from ragcache.prompt import CLOCK, PromptFormat, Shown, prompt_format, template_text
from ragcache.retrieval.embedder import load_embedder
from ragcache.retrieval.embedder_types import Embedder
from ragcache.retrieval.reranker import Reranker, load_reranker
from ragcache.retrieval.retriever import Retriever
from ragcache.runtime import team_ends
from ragcache.store.collections import EVERYTHING
from ragcache.store.documents import DocumentStore
from ragcache.store.neighbours import DOCUMENT, NEIGHBOURS, NeighbourChoice
from ragcache.store.schema import DEFAULT

log = logging.getLogger(__name__)
DEFAULT_MODEL = "mini"
DEFAULT_EMBEDDER = "minilm"
COMPANY = Recipe(PRIMER, primer="64", neighbours=2)
KV_SHARE = "kv_kept"
"""Property of the store: the share of KV that blocks hold, and the task that it was chosen for."""
DATE = "prompt_date"
"""Property of the store: the date in its own prefix."""


@dataclass(frozen=True)
class _Made:
    """Parts that depend on where the model runs; see `Components`."""

    engine: Engine
    block_keys: BlockKeys
    admission: Admission
    estimate: PrefillEstimate
    generation: Generation
    loader: BlockLoader | None = None


@dataclass(frozen=True, kw_only=True)
class Components(_Made):
    """All parts of a knowledge base.

    card:   the model; a LanguageModel if it runs in this process
    choice: the method for questions that name no method, and why it was chosen
    stored: the properties of the store's blocks that a method is chosen by
    block_keys: keys of the store's blocks; a ModelEncoder if the model runs in this process
    loader: None if the model runs in another engine
    whole:  makes a single passage of a whole text
    turns:  passages and answers of earlier turns of conversations
    system: the system message of conversations that have none
    """

    store: StoreParts
    config: StoreConfig
    card: ModelCard
    retriever: Retriever
    choice: Choice
    stored: StoredBlocks
    ingestor: Ingestor
    whole: PassthroughSplitter
    turns: ConversationCache
    system: str | None


@dataclass(frozen=True)
class OpenOptions:
    """How to assemble the parts; see `RagCache.open`."""

    method: str | FusionMethod | None
    method_options: Mapping[str, Any]
    recipe: str | Recipe | None
    system: str | None
    question_format: str | None
    chunker: ChunkerConfig
    ingest: IngestConfig


@team_ends()
def assemble(
    store: StoreParts,
    config: StoreConfig,
    card: ModelCard,
    retriever: Retriever,
    chosen: OpenOptions,
    engine: Connection | None = None,
) -> Components:
    """Build the parts of a knowledge base.

    engine: the engine that runs the model; None: the model runs in this process, and the card is a LanguageModel or an
            EmbeddedModel

    Raises ConfigError, StoreMismatchError (recipe, primer, neighbours), ModelError, PromptError.
    """
    if engine is not None and card.is_recurrent:
        raise ConfigError(f"{card.name} has recurrent layers, whose states no other engine takes; leave the engine out")
    if engine is None and chosen.recipe is None:
        chosen = replace(chosen, recipe=_company(store, config, card, chosen))
    chosen = replace(chosen, recipe=_with_primer(store.documents, card, chosen.recipe))
    neighbours = _neighbours(store.documents, config, chosen.recipe)
    number, share = neighbours.number, store.documents.properties().get(KV_SHARE)
    is_whole = not (isinstance(chosen.recipe, Recipe) and chosen.recipe.kept < 1)
    is_whole = is_whole and (not isinstance(share, list) or share[0] == 1)
    stored = StoredBlocks(
        store.layout.root,
        chosen.recipe,
        number,
        is_whole,
        partial(_reads, card, engine or (card if isinstance(card, EmbeddedModel) else None), is_whole=is_whole),
    )
    choice = choose_method(card, chosen.method, chosen.method_options, stored)
    method = choice.method
    own = replace(block_recipe(card, method, choice.recipe), neighbours=number)
    shown = Shown(date=_date(store.documents) if CLOCK in template_text(card.tokenizer) else None)
    text = prompt_format(card.tokenizer, system=chosen.system, question_format=chosen.question_format, shown=shown)
    first_ids = [*text.prefix_ids, *(method.additions(card).behind_prefix if method.reuses_blocks else ())]
    used = block_recipe(card, method, _with_kv_share(store.documents, block_recipe(card, method, own)))
    near = None
    if number:
        store.documents.bind(NEIGHBOURS, neighbours.bound())
        near = NEIGHBOURHOODS[neighbours.chosen_from](store.documents, retriever, neighbours)
    own_blocks = used, first_ids
    # In this process, blocks after a primer serve every prefix. Another engine finds them by the prompt's beginning, so
    # every prompt then has to state the date that the blocks were encoded with.
    dated = used.needs_prefix or (engine is not None and used.sees_prefix)
    formats = text, chosen.system, shown, dated
    generation = Generation(store.documents, store.kv.refresh)
    if engine is not None:
        block_keys = BlockKeys(card, *own_blocks, neighbourhood=near)
        remote = engine.engine(card, Prompts(card, block_keys, *formats), store.kv)
        made = _Made(remote, block_keys, Admission(UNKNOWN_BYTES), PrefillEstimate(), generation)
        made.engine.check(RequestOptions(choice))
    elif isinstance(card, LanguageModel):
        made = _here(store, config, card, own_blocks, formats, near, generation)
    elif isinstance(card, EmbeddedModel):
        made = _embedded(store, config, card, own_blocks, formats, near, generation)
        made.engine.check(RequestOptions(choice))
    else:
        raise ConfigError(f"{card.name} was given without its weights, and no engine that has them")
    cut, into = Chunker(card.tokenizer, chosen.chunker), store.documents.seen_by(EVERYTHING.only(DEFAULT))
    return Components(
        store=store,
        config=config,
        card=card,
        retriever=retriever,
        choice=choice,
        stored=replace(stored, recipe=used),
        **vars(made),
        ingestor=Ingestor(store.layout, into, store.kv, retriever, cut, made.block_keys, chosen.ingest),
        whole=PassthroughSplitter(card.tokenizer, card.max_positions),
        turns=ConversationCache(store.documents, ""),
        system=chosen.system,
    )


def _reads(card: ModelCard, engine: Connection | EmbeddedModel | None, method: FusionMethod, *, is_whole: bool) -> bool:
    """Return whether the engine that has the model can read the store's blocks by this method.

    Returns True for a method that reads no blocks.

    engine: None: transformers, in this process
    is_whole: whether the blocks hold all tokens in every head
    """
    if not method.reuses_blocks or (card.is_recurrent and not method.joins_states):
        return not method.reuses_blocks
    return (is_whole or method.takes_sparse) and (engine is None or engine.reads(card, method))


def _company(store: StoreParts, config: StoreConfig, card: ModelCard, chosen: OpenOptions) -> Recipe | None:
    """Return the recipe COMPANY for an empty store whose model was not trained for reuse; None for other stores.

    Passages of such a model are encoded after a short primer and two neighbours (docs/methods.md, "Neighbours"). The
    same goes for a model that was trained for `reposition` after a primer. A store opened with a recipe, a method or a
    number of neighbours uses those instead.
    """
    is_chosen = chosen.method not in (None, AUTO) or config.neighbours is not None
    is_trained = card.reuse is not None and (card.reuse.method, card.reuse.recipe) != ("reposition", PRIMER)
    if is_chosen or config.read_only or is_trained or card.is_recurrent:
        return None
    bound, passages = store.documents.properties(), store.kv.passages
    if NEIGHBOURS in bound or KV_SHARE in bound or store.documents.documents(limit=1):
        return None
    if passages is not None and passages.sizes():  # KV of passages without a document
        return None
    try:
        return card.recipe(COMPANY)
    except ConfigError:  # the primer would fill half of the context
        return None


def _with_primer(documents: DocumentStore, card: ModelCard, recipe: str | Recipe | None) -> str | Recipe | None:
    """Return the requested recipe; if none was requested, a recipe with the store's primer, or None without a primer.

    The store records its primer as ids, so that the primer's file may change or disappear. Raises StoreMismatchError if
    the requested recipe has another primer than the store.
    """
    bound = bound_primer(documents.properties())
    made = Recipe(PRIMER, primer=bound) if bound else None
    if recipe is None:
        return made
    requested = card.recipe(recipe)
    if made is not None and requested.primer != made.primer:
        raise StoreMismatchError(
            f"{documents.database.where}: its passages are read by recipe {made}, not by {requested}; leave the recipe "
            "out, or make a new store: `ragcache reencode NEW --store OLD --recipe NAME`"
        )
    if requested.primer:
        documents.bind(PRIMER, list(requested.primer_ids))
    return requested


def _date(documents: DocumentStore) -> datetime:
    """Return the date of the store's first opening.

    If the chat template states a date, this is the date in the store's own prefix, after which stored KV is computed.
    """
    if (bound := documents.properties().get(DATE)) is None:
        documents.bind(DATE, bound := date.today().isoformat())
    return datetime.fromisoformat(str(bound))


def _with_kv_share(documents: DocumentStore, recipe: Recipe) -> Recipe:
    """Return the recipe with the share of KV (`Recipe.kept`) and the task that were first requested for the store.

    Raises StoreMismatchError if another share below 1, or another task, is requested now.
    """
    bound = documents.properties().get(KV_SHARE)
    if recipe.kept < 1:
        documents.bind(KV_SHARE, [recipe.kept, recipe.task])
    elif isinstance(bound, list):
        return replace(recipe, kept=bound[0], task=bound[1])
    return recipe


def _here(
    store: StoreParts,
    config: StoreConfig,
    lm: LanguageModel,
    own_blocks: tuple[Recipe, list[int]],
    formats: tuple[PromptFormat, str | None, Shown, bool],
    near: Neighbourhood | None,
    generation: Generation,
) -> _Made:
    """Build the parts for a model in this process.

    own_blocks: how blocks are made: their recipe, and the ids before the first passage
    formats: arguments of `Prompts`: format, system, shown, dated
    near: finds the neighbours of each chunk; None: chunks have no neighbours
    """
    documents, kv, (recipe, first_ids) = store.documents, store.kv, own_blocks
    kv.use_device(lm.device)
    rates = None
    if config.load != ALWAYS:  # without a choice there is nothing to measure
        rates = open_rates(store.rates, kv.root, lm, kv.codec, config.measure_s, recipe)
    loader = BlockLoader(kv, rates, policy=config.load, ahead_bytes=config.speculative_bytes)

    estimate = PrefillEstimate()
    tree = PrefixCache(lm.shape, config.prefix_bytes)
    stored = None
    if kv.foreign is not None and kv.passages is not None and config.prefix_bytes and not lm.shape.states:
        stored = StoredPrefixes(tree, generation, loader, kv.foreign, kv.passages)
    prefixes = Prefixes(lm, documents, generation, recipe, "", tree, first_ids, stored)
    encoder = ModelEncoder(
        lm, *own_blocks, read_prefix=prefixes.exact, on_encoded=estimate.add, neighbourhood=near, codec=kv.codec
    )
    admission = Admission(default_budget(lm) if config.answer_bytes is None else config.answer_bytes)
    local_engine = LocalEngine(
        lm,
        Prompts(lm, encoder, *formats, prefixes.count),
        KVLookup(lm, encoder, documents, prefixes, loader),
        prefixes,
        SharedPrefixes(admission, tree),
        estimate,
        config.graph_bytes,
    )
    generation.follow(prefixes.invalidate, local_engine.contexts.clear)
    return _Made(local_engine, encoder, admission, estimate, generation, loader)


def _embedded(
    store: StoreParts,
    config: StoreConfig,
    lm: EmbeddedModel,
    own_blocks: tuple[Recipe, list[int]],
    formats: tuple[PromptFormat, str | None, Shown, bool],
    near: Neighbourhood | None,
    generation: Generation,
) -> _Made:
    """Build the parts for a model that another engine's library runs in this process; see `_here`.

    Stored blocks are loaded unless `config.load` is "never": setting a state takes far less time than computing it.

    Raises ConfigError if the store's codec fits a basis.
    """
    if store.kv.lacks_basis or store.kv.codec.needs_basis:
        raise ConfigError(
            f"codec {store.kv.codec.name!r} fits a basis to keys and values, and the states of {lm.name} are bytes "
            "that only its engine reads; leave the codec out",
            "codec",
        )
    loader, estimate = BlockLoader(store.kv, policy=NEVER if config.load == NEVER else ALWAYS), PrefillEstimate()
    encoder = ModelEncoder(lm, *own_blocks, on_encoded=estimate.add, neighbourhood=near)
    embedded = lm.engine(Prompts(lm, encoder, *formats), encoder, store.documents, loader, estimate)
    generation.follow(embedded.clear)
    return _Made(embedded, encoder, Admission(UNKNOWN_BYTES), estimate, generation, loader)


def _neighbours(documents: DocumentStore, config: StoreConfig, recipe: str | Recipe | None) -> NeighbourChoice:
    """Return which neighbours precede the store's chunks: as requested, else as the store was created.

    Raises StoreMismatchError if the request differs from the store, ConfigError for a source without a number of
    neighbours.
    """
    bound = documents.properties().get(NEIGHBOURS)
    count, chosen_from = config.neighbours, config.neighbours_from
    if count is None and isinstance(recipe, Recipe) and recipe.neighbours:
        count = recipe.neighbours
    made = NeighbourChoice(0, DOCUMENT) if bound is None and config.is_shared else NeighbourChoice.of(bound)
    requested = NeighbourChoice(made.number if count is None else count, chosen_from or made.chosen_from)
    if bound is not None and requested != made:
        where = documents.database.where
        raise StoreMismatchError(f"{where}: made with {made}, not {requested}; use that again, or make a new store")
    if bound is None and chosen_from is not None and not requested.number:
        raise ConfigError(
            f"neighbours_from={chosen_from!r} says which neighbours, and there are none; give neighbours=1"
        )
    return requested


def open_retriever(
    store: StoreParts,
    config: StoreConfig,
    embedder: str | Path | Embedder | None,
    reranker: str | Path | Reranker | None,
    device: str,
) -> Retriever:
    """Open the store's retriever. Raises EmbedderError, EmbedderMismatchError, RerankerError, ConfigError."""
    found = open_embedder(store.documents, embedder, device)
    if isinstance(reranker, str | Path):
        reranker = load_reranker(reranker, device)
    retriever = Retriever.open(
        store.documents, store.layout.index, found, kind=config.index, reranker=reranker, seal=store.kv.seal
    )
    refuse_other_embedder(store.documents, found)  # after the check of names, whose errors say more
    return retriever


def open_workers(store: StoreParts, config: StoreConfig, chosen: WorkersConfig) -> Workers:
    """Return workers that write blocks to the store's own KV directory or remote."""
    bound = store.documents.properties()
    remote = (config.remote or str(bound["remote"])) if "remote" in bound else None
    root, owner = store.layout.kv.absolute(), str(bound.get("database_id", ""))
    return chosen.workers(partial(open_kv_to_fill, root, config, store.kv.seal, remote, owner, store.documents.basis))


def open_model(
    documents: DocumentStore, model: str | Path | LanguageModel | PreTrainedModel | None, dtype: str | None, device: str
) -> LanguageModel:
    """Return the requested model, else the store's own, else the default for a new store.

    Raises ModelMismatchError if the store's blocks belong to another model, ConfigError for a dtype beside a loaded
    model, and the errors of `load_lm`.
    """
    bound = documents.properties()
    if isinstance(model, PreTrainedModel) and dtype is not None:
        raise ConfigError(f"dtype {dtype!r} was given beside a loaded model, which has its own; leave it out", "dtype")
    if isinstance(model, LanguageModel):
        lm = model
    else:
        name = model if model is not None else str(bound.get("model_name", DEFAULT_MODEL))
        own = bound.get("model_dtype")
        if own is not None and dtype in (None, AUTO):  # the dtype of the store's KV
            dtype = str(own)
            if (advice := advice_on(dtype)) is not None and find_device(device).type == "cpu":
                log.warning("%s: %s", documents.database.where, advice)
        lm = load_lm(name, dtype=dtype, device=device)
    _bind_model(documents, lm, lm.fingerprint, str(lm.dtype).removeprefix("torch."))
    if "checkpoint" not in bound and (files := checkpoint_digest(resolve(lm.name))) is not None:
        documents.bind("checkpoint", files)  # lets another engine check its files without weights
    return lm


def open_embedded(documents: DocumentStore, model: object, address: str) -> EmbeddedModel:
    """Return the requested model, else the store's own, run in this process by another engine's library.

    address: the engine's name, with its options

    Raises ConfigError (a loaded model, or none), ModelMismatchError and the engine's own errors.
    """
    engine = address.partition(":")[0]
    name = documents.properties().get("model_name") if model is None else model
    if not isinstance(name, str | Path):
        raise ConfigError(f"engine {engine} loads a model itself; name its file with model=", "model")
    lm = EMBEDDED[engine](name, address)
    _bind_model(documents, lm, lm.weights, engine)
    return lm


def embedded_engine(documents: DocumentStore) -> str | None:
    """Return the name of the engine that computes a store's blocks in this process; None if transformers does."""
    kind = documents.properties().get("model_dtype")
    return kind if isinstance(kind, str) and kind in EMBEDDED else None


def _bind_model(documents: DocumentStore, lm: ModelCard, fingerprint: str, kind: str) -> None:
    """Bind the store to a model. Raises ModelMismatchError if its KV was made with another model.

    fingerprint, kind: the model's fingerprint and dtype (or engine), as a store records them
    """
    bound = documents.properties()
    if bound.get("fingerprint") not in (None, fingerprint):
        # The message has the models' names, because a fingerprint means nothing to a reader.
        made, opened = f"{bound.get('model_name')} in {bound.get('model_dtype')}", f"{lm.name} in {kind}"
        if made == opened:
            opened = "what is there now: its weights, configuration or tokenizer have changed since"
        raise ModelMismatchError(
            f"the store's KV was made with {made}, not with {opened} (their fingerprints differ); use that one, or "
            f"make a new store of the same documents: `ragcache reencode NEW --store OLD --model {lm.name}`, in Python "
            f"rc.RagCache.open(NEW, model={lm.name!r}).copy(rc.Store.open(OLD))"
        )
    for name, value in (("fingerprint", fingerprint), ("model_name", lm.name), ("model_dtype", kind)):
        if name not in bound:  # name and dtype are for information: the model may have moved
            documents.bind(name, value)


def open_engine(
    documents: DocumentStore, model: str | Path | LanguageModel | PreTrainedModel | None, url: str, key: str | None
) -> tuple[ModelCard, Connection]:
    """Return the store's model without its weights, and the engine that has them.

    Raises ConfigError (address, or a store that no model is bound to), EngineError, ModelMismatchError, ModelError.
    """
    bound = documents.properties()
    if isinstance(model, LanguageModel | PreTrainedModel):
        raise ConfigError("a loaded model was given beside an engine that has its own; name the model's directory")
    scheme = url.partition("://")[0]
    if scheme not in ENGINES:
        forms, here = " or ".join(f"{name}://host:port" for name in ENGINES), " or ".join(EMBEDDED)
        raise ConfigError(
            f"engine {url!r} is no address of an engine; give {forms}, several with commas, or {here} for this process"
        )
    if "fingerprint" not in bound:
        raise ConfigError(
            "no model has encoded anything into this store; run `ragcache ingest` without an engine first"
        )
    card = load_card(str(model or bound.get("model_name", DEFAULT_MODEL)), str(bound["fingerprint"]))
    engine = ENGINES[scheme](url, card.fingerprint, key)
    with closing(engine):  # questions open their own connections
        longest = engine.longest_prompt()
    if longest is not None:
        card.max_positions = min(card.max_positions, longest)
    return card, engine


def open_embedder(documents: DocumentStore, embedder: str | Path | Embedder | None, device: str) -> Embedder:
    """Return the requested embedder, else the store's own, else the default. Raises EmbedderError."""
    if embedder is None:
        embedder = str(documents.properties().get("embedder", DEFAULT_EMBEDDER))
    return load_embedder(embedder, device) if isinstance(embedder, str | Path) else embedder
