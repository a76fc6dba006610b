"""KVLink: trained tokens between the blocks reconnect passages that were read separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ragcache.errors import ConfigError, is_whole
from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod
from ragcache.models.card import ModelCard
from ragcache.models.trained_tokens import LLAMA3_VOCABULARY, TrainedTokens
from ragcache.prompt import Prompt


@dataclass(frozen=True)
class Link(FusionMethod):
    """Runs K link tokens after each chunk, which see everything before them (KVLink section 2.3, figure 2).

    Blocks are moved to their global positions as by `reposition`, with room for the link tokens between them. Only the
    link tokens, KV-END and the suffix run; KV-START belongs to the prefix's block. The link tokens after the chunk of
    rank n are always the same K ids (appendix A.2).

    link_ids:    for each chunk, a list of the ids that follow it, possibly empty. They replace the checkpoint's own
                 link tokens, KV-START and KV-END
    link_tokens: K, for a checkpoint of the authors' own code (Llama 3's vocabulary), which does not state it; 0: no
                 added tokens at all, which is `reposition`; None: as the checkpoint states

    Raises ConfigError if both are given, or for values that are no lists of ids or no number of tokens.
    """

    link_ids: Sequence[Sequence[int]] | None = None
    link_tokens: int | None = None

    name: ClassVar[str] = "link"
    paper: ClassVar[str] = "KVLink (arXiv 2502.16002)"
    summary: ClassVar[str] = "moves each block to its global positions and runs trained link tokens between them"
    needs_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.link_tokens is not None and (not is_whole(self.link_tokens) or self.link_tokens < 0):
            raise ConfigError(f"link_tokens is {self.link_tokens!r}; give the number of link tokens behind each chunk")
        if self.link_ids is None:
            return
        if self.link_tokens is not None:
            raise ConfigError("link_ids and link_tokens exclude each other: the lists say how many there are")
        object.__setattr__(self, "link_ids", _lists_of_ids(self.link_ids))

    @property
    def keeps_context(self) -> bool:  # type: ignore[override]
        return self.link_ids is None

    def additions(self, lm: ModelCard) -> AddedTokens:
        if self.link_ids is not None:
            links = tuple(tuple(ids) for ids in self.link_ids)
            return replace(super().additions(lm), links=links, max_chunks=len(links))
        spec = self._training(lm)
        return super().additions(lm) if spec is None else AddedTokens.trained(spec)

    def _training(self, lm: ModelCard) -> TrainedTokens | None:
        """Return the model's link tokens; None for K = 0. Raises ConfigError if the model has none."""
        if self.link_tokens == 0:
            return None
        stated = lm.reuse
        if stated is not None and stated.method == "reposition" and self.link_tokens is None:
            return None  # Block-Attention: trained with K = 0
        if stated is not None and stated.method == "link":
            if self.link_tokens not in (None, stated.link_tokens):
                raise ConfigError(
                    f"link_tokens is {self.link_tokens} and {lm.name} was trained with {stated.link_tokens}; leave it "
                    "out"
                )
            return stated
        if stated is None and self.link_tokens and lm.vocab_size == LLAMA3_VOCABULARY:
            return TrainedTokens.llama3(self.link_tokens)
        raise ConfigError(
            f"{lm.name} has no trained link tokens; train them with `ragcache train --reuse link`, choose another "
            "method such as 'reposition', or pass link_ids"
        )

    def check(self, lm: ModelCard, prompt: Prompt) -> None:
        if self.link_ids is None:
            super().check(lm, prompt)
            return
        if len(self.link_ids) != len(prompt.chunk_ids):
            raise ConfigError(
                f"link_ids holds {len(self.link_ids)} lists and the prompt has {len(prompt.chunk_ids)} chunks; give "
                "one list a chunk"
            )
        if outside := [id for ids in self.link_ids for id in ids if not 0 <= id < lm.vocab_size]:
            raise ConfigError(f"link_ids holds {outside[0]}; {lm.name} has ids 0 to {lm.vocab_size - 1}")


def _lists_of_ids(lists: object) -> tuple[tuple[int, ...], ...]:
    """Return the ids as tuples. Raises ConfigError if `lists` is not a list of token ids for each chunk."""
    wrong = ConfigError(f"link_ids is {lists!r}; give one list of token ids a chunk, such as [[5, 6], []]")
    if not isinstance(lists, Sequence) or isinstance(lists, str):
        raise wrong
    for ids in lists:
        if not isinstance(ids, Sequence) or not all(is_whole(id) for id in ids):
            raise wrong
    return tuple(tuple(int(id) for id in ids) for ids in lists)
