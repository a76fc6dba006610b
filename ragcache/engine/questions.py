"""Entry points of a store: answer a question, a conversation or a raw prompt over the passages found for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from ragcache.engine import verdict
from ragcache.engine.answer import Done, Event, Reason, Sources
from ragcache.engine.assemble import Components
from ragcache.engine.caches.learner import Learner
from ragcache.engine.caches.passage_finder import PassageFinder
from ragcache.engine.conversation import Conversation, Given, completion_ends
from ragcache.engine.history import ConversationContext, History, inline_passages
from ragcache.engine.loader import Prefetch
from ragcache.engine.options import DEFAULT_K, AskOptions, ChatOptions, ContextMode, GenerationOptions, retrieval
from ragcache.engine.passages import Passage, find_passages
from ragcache.engine.request import Clock, EarlierTurns, Request, RequestOptions
from ragcache.engine.tool_use import ToolUse, tool_use
from ragcache.engine.why import explain_read
from ragcache.errors import ConfigError, StoreError, blaming, check_choice, check_text, check_type
from ragcache.fusion.layout import NO_ADDITIONS
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import ModelEncoder
from ragcache.models.hub import BUNDLED
from ragcache.models.sampler import Sampling
from ragcache.models.thoughts import TEMPLATE_OPTIONS, template_variables, thinking_of
from ragcache.prompt import PromptEnds, Shown, Text, encode_text
from ragcache.retrieval.retriever import Hit
from ragcache.runtime import end_team
from ragcache.store.records import NOT_STORED

log = logging.getLogger(__name__)
# The bundled tokenizer knows the registry's words and few others. Over its passages it takes 0.19 to 0.24 tokens
# per character, over encyclopedias, questions and program documentation 0.40 to 0.90.
MOST_TOKENS_PER_CHARACTER = 0.32
MINI_NOTICE = (
    "the bundled model %r knows one made-up registry, that of examples/corpus, and these passages are other text: do "
    "not expect answers. Make a store with a model of the hub, such as HuggingFaceTB/SmolLM2-360M-Instruct (0.7 GB of "
    "memory in bfloat16), Qwen/Qwen3-0.6B (1.2 GB) or meta-llama/Llama-3.2-1B-Instruct (2.5 GB): model=..., or --model"
)


class Written(NamedTuple):
    """The text of a prompt.

    ends:    the prompt before and after the passages
    own:     the caller's text, without passages given as such
    dropped: turns that were left out so that the prompt fits
    """

    ends: PromptEnds
    own: Sequence[str]
    dropped: int = 0


class CheckedQuestion(NamedTuple):
    """A question whose options have been checked.

    prepare: finds its passages and makes its prompt, once the clock runs
    ahead:   reads of likely passages' KV that begin while retrieval still ranks; None: no such reads
    learns:  whether passages may be learnt from the prompt after its answer
    """

    prepare: Callable[[Clock], Request]
    ahead: Prefetch | None
    learns: bool = False

    def close(self) -> None:
        """Give up the reads that no answer has taken."""
        if self.ahead is not None:
            self.ahead.close()


class Questions:
    """Questions to a store. `ask`, `chat` and `complete` check the options, `stream` answers. Thread-safe."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts
        layout, documents, kv = parts.store
        self.finder = PassageFinder(
            documents, parts.generation, parts.card.tokenizer, layout.passages, kv.passages, parts.block_keys.owner
        )
        self.learner = _learner(parts)
        self._warns_of_mini, self._warns_of_unchecked = parts.card.name in BUNDLED, True  # each warning is given once

    def of(self, parts: Components) -> Self:
        """Return the questions of another view of the same store."""
        questions = copy(self)
        questions._parts = parts
        questions.finder = self.finder.of(parts.store.documents, parts.block_keys.owner)
        keys = parts.block_keys
        if self.learner is not None:
            view = parts.store.documents.view
            questions.learner = self.learner.of(keys, view) if isinstance(keys, ModelEncoder) else None
        return questions

    def retrieve(
        self, question: str | NDArray[np.float32], k: int, keywords: Mapping[str, Any], ahead: Prefetch | None = None
    ) -> list[Hit]:
        """Retrieve the k best hits. ahead: starts reading the blocks of likely hits before the ranking is final."""
        check_type("question", question, (str, np.ndarray), "give its text, or its vector")
        self._parts.generation.check()
        if isinstance(question, str):
            check_text(question)
        on_candidates, documents = None if ahead is None else ahead.begin, self._parts.store.documents
        return self._parts.retriever.retrieve(question, k, **keywords, on_candidates=on_candidates, documents=documents)

    def ask(self, question: str, k: int, keywords: AskOptions) -> CheckedQuestion:
        check_type("question", question, str, "give its text")
        options, ends = self._question(question, keywords)
        options = replace(options, where=keywords.get("filter"))
        self._parts.engine.prompts.check_system(keywords.get("system"), options.method)
        hits = keywords.get("hits")
        find = partial(self._find, hits, question, k, keywords, options)
        return self._read(lambda _: Written(ends(), [question]), find, options, retrieves=hits is None)

    def complete(
        self, parts: str | Sequence[str | Hit | Passage | int], keywords: GenerationOptions
    ) -> CheckedQuestion:
        options = self._request_options(keywords)
        self._parts.generation.check()
        texts = [parts] if isinstance(parts, str) else [part for part in parts if isinstance(part, str)]
        self._parts.card.check_text("".join(texts), "the prompt")
        ends, passages = completion_ends(self._parts.card.tokenizer, parts)
        written = Written(ends, texts if passages else ["".join(texts)])
        return self._read(lambda _: written, lambda: passages, options)

    def chat(self, messages: Sequence[Mapping[str, Any]], keywords: ChatOptions) -> CheckedQuestion:
        passages, k, context = keywords.get("passages"), keywords.get("k"), keywords.get("context", "last")
        conversation, shown, tools = self._conversation(messages, keywords)
        where = keywords.get("filter")
        if sum((conversation.has_passages, passages is not None, k is not None)) > 1:
            raise ConfigError("passages in messages, passages= and k= exclude each other; choose one")
        check_choice("context", context, get_args(ContextMode))
        options = replace(
            self._request_options(keywords, templated=True), continues=conversation.continues, where=where
        )
        system = self._system(conversation, keywords, options)
        if tools is not None:
            options = replace(options, tools=tools, sampling=tools.sampling(options.sampling))
        engine, drops = self._parts.engine, keywords.get("drop_turns", True)
        conversation = engine.prompts.bounded(conversation, shown, drops=drops)
        if k is not None and not self._parts.store.documents.documents(limit=1):
            k = None  # there is nothing to retrieve: a plain chat
        in_place = context == "last" and passages is None and k is None
        if points := keywords.get("pins"):
            heads = [Conversation(self._parts.card.tokenizer, point.messages, shown) for point in points]
            ids = [self._head_ids(head, system, in_place) for head in heads]
            options = replace(options, pins=list(zip(ids, [point.ttl_s for point in points], strict=True)))
        if in_place:
            self._parts.generation.check()
            (whole, written_passages), dropped = engine.prompts.shortened(
                conversation, lambda read: read.as_written(system), self._written_tokens, options, drops=drops
            )
            written = Written(whole, conversation.given_text, dropped)
            return self._read(lambda _: written, lambda: written_passages, options)
        if context == "keep":
            self._look(conversation.given_text, options)
            if passages is not None:
                raise ConfigError('context="keep" takes passages in the messages, where each turn has its own, or k=')
            return self._continue(conversation, k, keywords, options, system, drops)
        count = DEFAULT_K if k is None else k
        find = partial(self._find, passages, conversation.question, count, keywords, options)
        first = self._marks_first

        def write(passages: int) -> Written:
            written, dropped = engine.prompts.shortened(
                conversation,
                lambda read: Written(read.around_passages(engine.prompts.format, system, first=first), read.given_text),
                lambda written: _ends_tokens(written.ends),
                options,
                passages,
                drops=drops,
            )
            return written._replace(dropped=dropped)

        return self._read(write, find, options, retrieves=passages is None)

    def count_chat(self, messages: Sequence[Mapping[str, Any]], keywords: ChatOptions) -> int:
        conversation, _, _ = self._conversation(messages, keywords)
        system = self._system(conversation, keywords, self._request_options(keywords, templated=True))
        return self._written_tokens(conversation.as_written(system))

    # Options

    def _question(self, question: str, keywords: AskOptions) -> tuple[RequestOptions, Callable[[], PromptEnds]]:
        """Return the question's options, and a function that makes its prompt's ends."""
        self._parts.card.check_text(question, "the question")
        self._parts.card.check_text(keywords.get("system") or "", "the system prompt")
        options, shown = self._request_options(keywords, templated=True), self._shown(keywords)
        return options, partial(self._parts.engine.prompts.question_ends, question, keywords.get("system"), shown)

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], keywords: ChatOptions
    ) -> tuple[Conversation, Shown, ToolUse | None]:
        tools = tool_use(keywords, self._parts.card.tokenizer)
        shown = self._shown(keywords)._replace(tools=tools.shown if tools else ())
        return Conversation(self._parts.card.tokenizer, messages, shown), shown, tools

    def _head_ids(self, head: Conversation, system: str | None, in_place: bool) -> list[int]:
        """Return the ids of a conversation's beginning, up to its first passage.

        in_place: whether passages are read where the messages have them
        """
        if in_place:
            ends, given = head.as_written(system)
            return [*ends.prefix_ids, *(() if given else ends.suffix_ids)]
        ends = head.around_passages(self._parts.engine.prompts.format, system, first=self._marks_first)
        return [*ends.prefix_ids, *ends.suffix_ids]

    @property
    def _marks_first(self) -> bool:
        """Return whether passages are put in front of a conversation's first question, instead of its last."""
        return self._parts.engine.prompts.block_keys.recipe.needs_prefix

    def _shown(self, keywords: GenerationOptions) -> Shown:
        """Return the chat template's variables. Raises ConfigError."""
        effort, enable, extra = (keywords.get(name) for name in TEMPLATE_OPTIONS)
        variables = template_variables(self._parts.card.tokenizer, effort, enable, extra)
        return self._parts.engine.prompts.showing(variables)

    def _request_options(self, keywords: GenerationOptions, *, templated: bool = False) -> RequestOptions:
        """Build the options of a request.

        templated: whether a chat template makes the prompt, and may have the model think
        """
        parts = self._parts
        sampling = keywords.get("sampling") or Sampling()
        check_type("sampling", sampling, Sampling, "give rc.Sampling(max_tokens=...)")
        with blaming("method"):
            choice = self._choice(keywords.get("method"), keywords.get("method_options") or {})
        options = RequestOptions(
            choice,
            sampling,
            keywords.get("on_overflow", "error"),
            keywords.get("cancelled"),
            keywords.get("timeout_s"),
            Prefetch(parts.loader) if parts.loader and parts.loader.chooses and choice.method.reuses_blocks else None,
            keywords.get("order", "relevance"),
            keywords.get("hint", True),
            thinking=thinking_of(parts.card.tokenizer) if templated else None,
            thinking_budget=keywords.get("thinking_budget"),
        )
        with blaming("method"):
            parts.engine.check(options)
        return options

    def _choice(self, name: str | FusionMethod | None, method_options: Mapping[str, Any]) -> verdict.Choice:
        own = self._parts.choice
        if not method_options and name is None:
            return own
        chosen = verdict.choose_method(self._parts.card, name or own.method.name, method_options, self._parts.stored)
        same = chosen.method == own.method
        return replace(chosen, method=own.method) if same else chosen  # the object that keeps KV of earlier prompts

    def _system(self, conversation: Conversation, keywords: ChatOptions, options: RequestOptions) -> str | None:
        """Return the system prompt of a conversation without a system message. Raises ConfigError."""
        system = keywords.get("system")
        if system is None:
            return self._parts.system
        self._parts.card.check_text(system, "the system prompt")
        if any(turn.role == "system" for turn in conversation.turns):
            raise ConfigError("system= and a system message exclude each other; give one of them")
        self._parts.engine.prompts.check_system(system, options.method)
        return system

    def _with_found(
        self, written: Written, hits: list[Hit], options: RequestOptions
    ) -> tuple[PromptEnds, Sequence[Hit], RequestOptions]:
        """Return the prompt's text and passages, after finding stored passages in its text, and its options.

        The prompt's ids are the same whichever passages are found. Raises the errors of `Prompts.prompt`.
        """
        ends, found, prompts = written.ends, hits, self._parts.engine.prompts
        recipe = prompts.block_keys.recipe
        # A part's KV can be cut from such blocks.
        parts = recipe.is_dense and recipe.markers is None
        # Passages may only be left out or reordered among those that came with the prompt, not among found ones.
        is_settled = not hits or options.order == "relevance"
        if self._reuses_text(options) and is_settled and not prompts.prompt(ends, hits, options)[1]:
            ends, found = self.finder.cut(ends, hits, parts=parts)
        if len(found) == len(hits):
            self._look(written.own, options)
        return ends, found, replace(options, found=len(found) > len(hits))

    def _look(self, texts: Sequence[str], options: RequestOptions) -> None:
        """Warn once if stored passages come as text to a method that could have used their KV."""
        if options.method.reuses_blocks:
            self.finder.warn(texts)

    def _reuses_text(self, options: RequestOptions) -> bool:
        """Return whether stored passages that come as plain text can be read from their KV.

        The method must read the text between passages and add no tokens (link tokens, markers), so that a prompt's ids
        never depend on which passages were found.
        """
        method, recipe = options.method, self._parts.engine.prompts.block_keys.recipe
        adds = method.additions(self._parts.card) != NO_ADDITIONS or self._parts.card.is_recurrent
        return method.reuses_blocks and method.keeps_context and not adds and not recipe.needs_prefix

    # Work

    def _written_tokens(self, written: tuple[PromptEnds, list[Given]]) -> int:
        """Count the tokens of a prompt, including the passages that came with their text."""
        ends, passages = written
        texts = [passage.chunk.text if isinstance(passage, Hit) else passage.text for passage in passages]
        return _ends_tokens(ends) + sum(len(encode_text(self._parts.card.tokenizer, text)) for text in texts)

    def _find(
        self,
        passages: Sequence[Given] | None,
        question: str,
        k: int,
        keywords: AskOptions | ChatOptions,
        options: RequestOptions,
    ) -> Sequence[Given]:
        """Return the given passages, or retrieve them if none were given."""
        if passages is None:
            return self.retrieve(question, k, retrieval(keywords), options.ahead)
        self._parts.generation.check()
        return passages

    def _hits(self, passages: Sequence[Given]) -> list[Hit]:
        """Return every passage as a hit, in order. Raises the errors of `find_passages`.

        In a store with neighbours, the key of a stored passage's KV also depends on its neighbours. The caller's text
        does not tell which they are, so the store's own passage is returned.
        """
        hits = find_passages(passages, self._parts.store.documents, self._parts.whole)
        return [self.finder.stored(hit) for hit in hits] if self._parts.block_keys.recipe.neighbours else hits

    def _read(
        self,
        write: Callable[[int], Written],
        find: Callable[[], Sequence[Given]],
        options: RequestOptions,
        *,
        retrieves: bool = False,
    ) -> CheckedQuestion:
        """Return a question over the passages that `find` returns, and the stored passages in its text.

        write:     writes the prompt, leaving room for this many tokens of passages
        retrieves: whether `find` searches; passages that the text already holds are then left out
        """
        parts = self._parts

        def prepare(clock: Clock) -> Request:
            written = write(0)
            parts.engine.prompts.prompt(written.ends, [], options)  # fail before the search if the prompt does not fit
            hits = self._hits(find())
            passages = sum(hit.chunk.num_tokens for hit in hits)
            if passages + _ends_tokens(written.ends) > parts.engine.prompts.room_before_answer(options):
                written = write(passages)
            fresh = _not_held(hits, written.own) if retrieves else hits
            ends, read, request_options = self._with_found(written, fresh, options)
            clock.retrieve_s = time.perf_counter() - clock.started
            request_options = replace(request_options, dropped_turns=written.dropped)
            return parts.engine.prompts.request(ends, read, request_options, clock)

        return CheckedQuestion(prepare, options.ahead, self._reuses_text(options))

    def _continue(
        self,
        conversation: Conversation,
        k: int | None,
        keywords: ChatOptions,
        options: RequestOptions,
        system: str | None,
        drops: bool,
    ) -> CheckedQuestion:
        parts, engine, tokenizer = self._parts, self._parts.engine, self._parts.card.tokenizer
        if options.choice.gives_way and not options.method.keeps_context_with(parts.card):
            options = options.exactly(verdict.cannot_keep(options.method))

        def prepare(clock: Clock) -> Request:
            engine.prompts.check_continues(options)
            self._parts.generation.check()
            context = ConversationContext(conversation, parts.turns, tokenizer, keywords.get("filter"), system)
            inline = inline_passages(conversation).items()
            by_turn = {turn: self._hits(own) for turn, own in inline}
            form = None if k is None else engine.prompts.format

            def pieces(read: Conversation) -> tuple[History, list[int], Sequence[Hit]]:
                hits = [hit for turn in (read.asking, *read.standing) for hit in by_turn.get(turn, [])]
                return *context.read(read.in_pieces(form, system), by_turn), hits

            fitted = partial(engine.prompts.shortened, conversation, pieces, _history_tokens, options, drops=drops)
            (earlier, suffix_ids, hits), dropped = fitted()
            engine.prompts.prompt(engine.prompts.fit(earlier, suffix_ids, [], options)[0], [], options)
            if k is not None:
                hits = self.retrieve(conversation.question, k, retrieval(keywords), options.ahead)
                hits = _not_held(hits, conversation.given_text)
                if _history_tokens((earlier, suffix_ids, hits)) > engine.prompts.room_before_answer(options):
                    (earlier, suffix_ids, _), dropped = fitted(sum(hit.chunk.num_tokens for hit in hits))
            clock.retrieve_s = time.perf_counter() - clock.started
            ends, earlier, new = engine.prompts.fit(earlier, suffix_ids, hits, options)
            request_options = replace(options, dropped_turns=dropped)
            return engine.prompts.request(ends, new, request_options, clock, EarlierTurns(earlier, context.remember))

        return CheckedQuestion(prepare, options.ahead)

    def stream(self, question: CheckedQuestion) -> Iterator[Event]:
        """Answer a question: yield the engine's events, and log warnings that are shown once.

        The work begins with the first event.
        """
        learner = self.learner
        model, root = self._parts.card.name, self._parts.store.layout.root
        try:
            request = question.prepare(Clock(time.perf_counter()))
            if self._warns_of_mini and is_other_text(request.hits):
                self._warns_of_mini = False
                log.warning(MINI_NOTICE, model)
            last = self._last_listed(request.hits)  # before any is computed, and listed
            with (
                nullcontext() if learner is None else learner.answering(),
                closing(self._parts.engine.stream(request)) as events,
            ):
                for event in events:
                    if self._warns_of_unchecked and isinstance(event, Sources) and event.hits:
                        self._warns_of_unchecked = not verdict.warn_if_unchecked(
                            model, root, request.options.choice, event.method
                        )
                    yield self._explained(event, request, last) if isinstance(event, Done) else event
            if learner is not None and question.learns:
                learner.see(request.prompt)
        finally:
            question.close()
            end_team()

    def why(self, question: CheckedQuestion) -> list[Reason]:
        """Return a reason for each passage of the prompt, then for each stored passage that its text nearly holds.

        No passage is loaded, computed or changed.
        """
        with closing(question):
            request = question.prepare(Clock(time.perf_counter()))
        keys = self._parts.block_keys.keys([hit.chunk for hit in request.hits])
        there = self._parts.store.kv.lookup(keys)
        tiers = [there[key].tier if key in there else None for key in keys]
        read = [(hit.chunk, tier) for hit, tier in zip(request.hits, tiers, strict=True)]
        return explain_read(self._parts, request.prompt, request.options.choice, read)

    def _last_listed(self, hits: Sequence[Hit]) -> int:
        """Return the number of the foreign passage that was listed last; 0 if all hits are of documents."""
        listed, given = self._parts.store.kv.passages, [hit.chunk.vector_id for hit in hits]
        try:
            return listed.last() if listed is not None and NOT_STORED in given else 0
        except StoreError as error:
            log.warning("passages from elsewhere are not looked for: %s", error)
            return 0

    def _explained(self, done: Done, request: Request, last: int) -> Done:
        """Return the event with the function that `Answer.explain` calls. last: see `_last_listed`"""
        read = [(hit.chunk, hit.tier) for hit in done.answer.hits]
        reasons = partial(explain_read, self._parts, request.prompt, request.options.choice, read, last)
        return Done(replace(done.answer, reasons=reasons))


def _learner(parts: Components) -> Learner | None:
    """Return the learner of passages from prompts, or None if learning is off or learnt KV could not be kept."""
    kv, keys = parts.store.kv, parts.block_keys
    if parts.config.learn == "off" or kv.foreign is None or kv.read_only or not isinstance(keys, ModelEncoder):
        return None
    view = parts.store.documents.view
    return Learner(kv, keys, view, keys.first_ids, always=parts.config.learn == "first")


def is_other_text(hits: Sequence[Hit]) -> bool:
    characters = sum(len(hit.chunk.text) for hit in hits)
    return sum(hit.chunk.num_tokens for hit in hits) > MOST_TOKENS_PER_CHARACTER * characters


def _ends_tokens(ends: PromptEnds) -> int:
    return len(ends.prefix_ids) + len(ends.suffix_ids)


def _not_held(hits: Sequence[Hit], texts: Sequence[str]) -> list[Hit]:
    """Return the hits whose passage does not occur in any of the texts, for every method."""
    return [hit for hit in hits if not any(hit.chunk.text.strip() in text for text in texts)]


def _history_tokens(read: tuple[History, list[int], Sequence[Hit]]) -> int:
    """Count the tokens of a continued conversation without the passages of earlier turns, which are dropped first."""
    earlier, suffix_ids, hits = read
    texts = sum(part.num_tokens for part in earlier.parts if isinstance(part, Text))
    return texts + len(suffix_ids) + sum(hit.chunk.num_tokens for hit in hits)
