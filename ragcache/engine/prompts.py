"""Prompts of questions: their text, their passages, and how much fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar

from ragcache.engine.conversation import Conversation
from ragcache.engine.history import History
from ragcache.engine.request import Clock, EarlierTurns, Request, RequestOptions
from ragcache.engine.shared_order import ReadCounts, relevance_hint, shared_order
from ragcache.engine.verdict import NOTHING_TO_REUSE, cannot_read_between
from ragcache.errors import ConfigError, ContextTooLongError
from ragcache.fusion.fuse import PromptPlan, block_recipe
from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod
from ragcache.ingest.encoder import BlockKeys
from ragcache.models.card import ModelCard
from ragcache.prompt import NOTHING_SHOWN, Part, Prompt, PromptEnds, PromptFormat, Shown, encode_text, prompt_format
from ragcache.retrieval.retriever import Hit

# Tokens for which an answer without a length limit reserves memory when it begins.
ANSWER_TOKENS = 256

# Characters per position of the model, more than a token has on average in any text. Old turns that are followed by so
# many characters of later turns cannot fit.
STEP = 16

Known = Callable[[FusionMethod, Sequence[int]], int]
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Prompts:
    """Builds the prompts of a store's questions. Thread-safe.

    block_keys: keys of the store's blocks
    format: the format with the store's own system prompt (`system`) and date; stored KV was computed after its prefix
    shown:  the chat template's variables for `format`
    dated:  whether every prompt states the store's date instead of the current date
    _known: returns how many of a prompt's first tokens the engine has read before, if it can tell
    """

    lm: ModelCard
    block_keys: BlockKeys
    format: PromptFormat
    system: str | None = None
    shown: Shown = NOTHING_SHOWN
    dated: bool = False
    _known: Known = lambda _method, _ids: 0
    _read_counts: ReadCounts = field(default_factory=lambda: ReadCounts())

    def of(self, block_keys: BlockKeys, known: Known | None = None) -> Prompts:
        """Return prompts for blocks of another salt, which start without counts of the passages that were read."""
        return replace(self, block_keys=block_keys, _known=known or self._known, _read_counts=ReadCounts())

    def check(self, method: FusionMethod) -> None:
        """Raise ConfigError if the method cannot read the blocks that this store's encoder makes."""
        added = method.additions(self.lm)
        if not method.reuses_blocks:
            return
        own = self.block_keys
        recipe = block_recipe(self.lm, method, own.recipe)
        prefix_ids = [*self.format.prefix_ids, *added.behind_prefix]
        if recipe != own.recipe or (recipe.needs_prefix and prefix_ids != own.prefix_ids):
            other = f"{own.recipe}" if recipe != own.recipe else "blocks behind another prefix"
            raise ConfigError(
                f"method {method.name!r} needs blocks of recipe {recipe} and the store was opened for {other}; open it "
                f"with method={method.name!r}"
            )

    def check_system(self, system: str | None, method: FusionMethod) -> None:
        """Raise ConfigError if the store's blocks were encoded after a system prompt and `system` replaces it."""
        if system is not None and method.reuses_blocks and self.block_keys.recipe.needs_prefix:
            raise ConfigError(
                "system= needs blocks of recipe isolated, and this store's were encoded behind its own system prompt; "
                'open it with recipe="primer" or with this system prompt, or ask with method="full"'
            )

    def showing(self, variables: Mapping[str, Any] = MappingProxyType({})) -> Shown:
        """Return the inputs of the chat template other than the messages."""
        return Shown(variables=variables, date=self.shown.date if self.dated else None)

    def question_ends(self, question: str, system: str | None = None, shown: Shown | None = None) -> PromptEnds:
        """Return the ends of a lone question's prompt.

        system: replaces the store's own
        shown:  the chat template's other inputs; None: `showing()`

        Raises PromptError (empty question), ConfigError (a chat template that takes no system message).
        """
        form, tokenizer, shown = self.format, self.lm.tokenizer, shown or self.showing()
        if system is not None or shown != self.shown:
            system, shown = self.system if system is None else system, shown.as_text(tokenizer)
            form = prompt_format(tokenizer, system=system, question_format=form.question_format, shown=shown)
        return PromptEnds(form.prefix_ids, form.suffix_ids(self.lm.tokenizer, question))

    def bounded(self, conversation: Conversation, shown: Shown, *, drops: bool) -> Conversation:
        """Return the conversation without turns that are certainly too old to fit, before any turn is tokenised.

        Turns are left out in whole steps of characters, each worth several contexts, so that later prompts begin alike.
        Raises ContextTooLongError for text that does not fit and must not be left out.
        """
        old = conversation.old
        optional = {rank for group in old for rank in group} if drops else set()
        fixed = "".join(turn.plain for rank, turn in conversation.read if rank not in optional)
        part = "the text of the system messages and the last question" if drops else "the conversation"
        self.lm.check_text(fixed, part)
        if shown.tools or shown.variables:
            variables = json.dumps([*shown.tools, dict(shown.variables)], ensure_ascii=False, default=str)
            self.lm.check_text(variables, "the text of the tools and template variables")
        sizes = [sum(len(conversation.turns[rank].said) for rank in group) for group in old]
        step, gone = STEP * self.lm.max_positions, 0
        surplus = (sum(sizes) // step - 1) * step if drops else 0
        while surplus > 0:
            surplus -= sizes[gone]
            gone += 1
        return conversation.without(old[:gone])

    def shortened(
        self,
        conversation: Conversation,
        make: Callable[[Conversation], T],
        count: Callable[[T], int],
        options: RequestOptions,
        passages: int = 0,
        *,
        drops: bool,
    ) -> tuple[T, int]:
        """Return `make(conversation)` and how many of the oldest turns were left out to fit passages and an answer.

        count: counts the tokens of a result of `make`
        passages: tokens of the passages
        drops: whether turns may be left out

        Turns are left out an eighth of the context at a time: until that is full again, every prompt begins like the
        previous prompt. Raises ContextTooLongError for turns that do not fit and must not be left out.
        """
        made, longest, old = make(conversation), self.lm.max_positions, conversation.old
        total, room = count(made), self.room_before_answer(options)
        if total + passages <= room or not old or (total <= longest and not drops):
            return made, conversation.num_gone
        too_long = f"the conversation has {total} tokens and {self.lm.name} takes {longest}"
        if not drops:
            raise ContextTooLongError(f"{too_long}; leave out its oldest messages, or pass drop_turns=True")
        texts = ["".join(conversation.turns[rank].said for rank in group) for group in old]
        groups = [len(encode_text(self.lm.tokenizer, text)) for text in texts]
        eighth = max(1, longest // 8)
        budget = -(-(total + passages - room) // eighth) * eighth
        for gone, tokens in enumerate(accumulate(groups), 1):
            if tokens < budget and gone < len(old):
                continue
            made = make(conversation.without(old[:gone]))
            if count(made) + passages <= room:
                break
        if passages and count(made) + passages > longest:
            # `on_overflow` decides about the passages.
            return self.shortened(conversation, make, count, options, drops=drops)
        if count(made) > longest:
            raise ContextTooLongError(
                f"{too_long}, and {count(made)} are its system messages and the last question; shorten these"
            )
        turns = sum(map(len, old[:gone])) + conversation.num_gone
        log.info("%s: its %d oldest messages are left out", too_long, turns)
        return made, turns

    def room_before_answer(self, options: RequestOptions) -> int:
        """Return the most tokens that a prompt may have.

        This is the context less the longest answer, or less a quarter of the context if that is smaller.
        """
        longest = self.lm.max_positions
        return longest - min(options.sampling.max_tokens or ANSWER_TOKENS, longest // 4)

    def prompt(self, ends: PromptEnds, hits: Sequence[Hit], options: RequestOptions) -> tuple[Prompt, int]:
        """Return the prompt over as many hits as fit, and how many were left out.

        Raises PromptError (more passages than the method can read under "error"), ContextTooLongError (too long under
        "error", or without any passage).
        """
        method = options.method
        room = self.lm.max_positions - len(ends.prefix_ids) - len(ends.suffix_ids)
        if room < 0:
            raise ContextTooLongError(
                f"the question has {len(ends.suffix_ids)} tokens, {len(ends.prefix_ids)} come before it, and "
                f"{self.lm.name} takes {self.lm.max_positions}; ask a shorter one"
            )
        chunks = [hit.chunk.token_ids for hit in hits]
        whole = Prompt(ends.prefix_ids, chunks, ends.suffix_ids, ends.label_ids if hits else ())
        if hits and options.on_overflow == "error":
            method.check(self.lm, whole)
        added = method.additions(self.lm)
        lengths = [len(chunk) for chunk in chunks]
        fitting = _fitting([len(label) for label in whole.labels], lengths, room, added)
        if fitting < len(hits) and options.on_overflow == "error":
            total = whole.num_tokens + added.num_tokens(lengths)
            raise ContextTooLongError(
                f"{len(hits)} passages make a prompt of {total} tokens and {self.lm.name} takes "
                f'{self.lm.max_positions}; ask for fewer (k={fitting}) or pass on_overflow="trim"'
            )
        cut = replace(whole, chunk_ids=whole.chunk_ids[:fitting], label_ids=whole.label_ids[:fitting])
        return cut, len(hits) - fitting

    def check_continues(self, options: RequestOptions) -> None:
        """Raise ConfigError if these options cannot keep a conversation's context."""
        method = options.method
        if not method.keeps_context:
            raise ConfigError(
                f"method {method.name!r} cannot keep the context of earlier turns; choose full, reposition, "
                'cacheblend, epic or link, or leave out context="keep"',
                "context",
            )
        if method.reuses_blocks and self.lm.is_recurrent:
            raise ConfigError(
                f'context="keep" puts text between passages, and {self.lm.name} has recurrent layers, whose blocks are '
                'joined side by side alone; choose method="full"',
                "context",
            )
        if method.reuses_blocks and self.block_keys.recipe.needs_prefix:
            raise ConfigError(
                'context="keep" needs blocks of recipe primer or isolated: those behind a prefix stay behind it; open '
                'the store with recipe="primer"',
                "context",
            )

    def fit(
        self, earlier: History, suffix_ids: Sequence[int], hits: Sequence[Hit], options: RequestOptions
    ) -> tuple[PromptEnds, History, list[Hit]]:
        """Return a kept conversation's prompt, its history, and the passages that are not in the history yet.

        The prefix is everything before this turn's passages. While prompt and answer do not fit the model, the passages
        of the oldest turn that has any are dropped.
        """
        added = options.method.additions(self.lm)
        while True:
            earlier, new = earlier.knowing(hits)
            prefix_ids = options.method.layout(self.lm, earlier.prompt_parts(), self.block_keys.recipe).ids
            chunks = [hit.chunk.num_tokens for hit in new]
            passages = sum(chunks) + added.num_tokens(chunks)
            total = len(prefix_ids) + passages + len(suffix_ids) + (options.sampling.max_tokens or ANSWER_TOKENS)
            fewer = earlier.without_oldest() if total > self.lm.max_positions else None
            if fewer is None:
                return PromptEnds(prefix_ids, suffix_ids), earlier, new
            earlier = fewer

    def request(
        self,
        ends: PromptEnds,
        hits: Sequence[Hit],
        options: RequestOptions,
        clock: Clock,
        earlier_turns: EarlierTurns | None = None,
    ) -> Request:
        """Return the question over as many hits as fit, with the plan of its prompt.

        Without `earlier_turns`, `full` reads prompts that the method could not: see `_settled`. With them, the order
        and the method stay. Passages in a shared order are counted, and later questions are ordered by these counts.
        Raises the errors of `prompt`.
        """
        reuse = None
        if earlier_turns is None:
            options, reuse = self._settled(ends, hits, options)
        if reuse is None:
            if earlier_turns is None:
                ends, hits = self._in_order(ends, hits, options)
                if _takes_order(ends, options):
                    self._read_counts.count([tuple(hit.chunk.token_ids) for hit in hits])
            prompt, dropped = self.prompt(ends, hits, options)
            reuse = prompt, dropped, self._plan(prompt, options, earlier_turns)
        prompt, dropped, plan = reuse
        limit = options.limit(clock.started)
        return Request(plan, prompt, hits[: len(hits) - dropped], dropped, options, clock, limit, earlier_turns)

    def _settled(
        self, ends: PromptEnds, hits: Sequence[Hit], options: RequestOptions
    ) -> tuple[RequestOptions, tuple[Prompt, int, PromptPlan] | None]:
        """Return `options`, with `full` as the method where it takes over; where a method that reads blocks stays, also
        the prompt, the number of dropped passages and the plan. Such methods ignore the order of passages.

        `full` takes over if no passage is in the prompt, if the method gives way and cannot read the text between
        passages, or if the choice is open and `full` runs no more tokens.
        """
        method, choice = options.method, options.choice
        if not method.reuses_blocks:
            return options, None
        if choice.gives_way and hits and ends.label_ids and not method.keeps_context_with(self.lm):
            return options.exactly(cannot_read_between(method)), None
        prompt, dropped = self.prompt(ends, hits, options)
        if not prompt.chunk_ids:  # no method has passages to place or weigh
            return options.exactly(NOTHING_TO_REUSE), None
        plan = self._plan(prompt, options)
        if not choice.is_open:
            return options, (prompt, dropped, plan)
        exact = options.exactly(choice.why)
        whole, _ = self.prompt(*self._in_order(ends, hits, exact), exact)
        # Neither count includes the prefix: its KV is computed once for the whole store.
        full = whole.num_tokens - max(len(whole.prefix_ids), self._known(exact.method, whole.ids))
        reuse = len(plan.layout.running(len(prompt.prefix_ids)).ids) + method.num_reruns(plan.layout)
        settled = replace(options, choice=choice.settled(full, reuse))
        return settled, (prompt, dropped, plan) if settled.method is method else None

    def _plan(self, prompt: Prompt, options: RequestOptions, earlier_turns: EarlierTurns | None = None) -> PromptPlan:
        """Plan the prompt, split into its parts if it continues from KV that extends past its prefix."""
        method = options.method
        read: Prompt | Sequence[Part] = prompt
        if earlier_turns is not None:
            read = (*earlier_turns.history.prompt_parts(), *prompt.parts[1:])
        elif options.found and method.reuses_blocks:
            read = prompt.parts
        return PromptPlan.of(self.lm, method, read, self.block_keys.recipe)

    def _in_order(
        self, ends: PromptEnds, hits: Sequence[Hit], options: RequestOptions
    ) -> tuple[PromptEnds, Sequence[Hit]]:
        """Return the passages in the order that shares most with the prefix tree, and add the hint, if order="shared".

        Each passage is then returned once. Methods that read blocks ignore the order, since a block is reusable at any
        position; passages with labels keep theirs.
        """
        if not _takes_order(ends, options):
            return ends, hits
        once = list({tuple(hit.chunk.token_ids): hit for hit in hits}.values())
        if options.on_overflow == "trim":
            once = once[: len(once) - self.prompt(ends, once, options)[1]]
        passages = [tuple(hit.chunk.token_ids) for hit in once]
        known = partial(self._known, options.method)
        order = shared_order(known, self._read_counts, tuple(ends.prefix_ids), passages)
        hint = encode_text(self.lm.tokenizer, relevance_hint(order)) if options.hint else []
        return PromptEnds(ends.prefix_ids, [*hint, *ends.suffix_ids]), [once[rank] for rank in order]

    def room(self, prompt_tokens: int, options: RequestOptions) -> int:
        """Return the tokens left for the longest possible answer."""
        left = max(0, self.lm.max_positions - prompt_tokens)
        return left if options.sampling.max_tokens is None else min(options.sampling.max_tokens, left)

    def room_at_first(self, prompt_tokens: int, options: RequestOptions) -> int:
        """Return the tokens reserved when an answer begins: the whole answer if the caller limits its length."""
        room = self.room(prompt_tokens, options)
        return min(room, ANSWER_TOKENS) if options.sampling.max_tokens is None else room


def _takes_order(ends: PromptEnds, options: RequestOptions) -> bool:
    return options.order == "shared" and options.method.takes_exact and not ends.label_ids


def _fitting(labels: Sequence[int], chunks: Sequence[int], room: int, added: AddedTokens) -> int:
    """Return how many of the best passages fit into `room` tokens, with the tokens that the method adds.

    labels, chunks: number of tokens of each passage's label and of each passage
    """
    count = len(chunks) if added.max_chunks is None else min(len(chunks), added.max_chunks)
    while count and sum(labels[:count]) + sum(chunks[:count]) + added.num_tokens(chunks[:count]) > room:
        count -= 1
    return count
