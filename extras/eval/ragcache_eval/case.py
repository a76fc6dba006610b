"""A question over passages, and the prompt made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ragcache.errors import ConfigError
from ragcache.ingest.document import headed
from ragcache.prompt import Prompt, PromptFormat, encode_text

Cell = Mapping[str, str | int]


class CasePassage(NamedTuple):
    """A passage of a case.

    is_gold: whether it contains the answer; None if unknown. behind: texts that may precede it when it is encoded, in
    reading order: the texts before it in its document, or its store's neighbours.
    """

    text: str
    title: str = ""
    is_gold: bool | None = None
    behind: tuple[str, ...] = ()

    def rendered(self) -> str:
        """Return the passage's text as ingestion writes it: below its title, one newline at the end."""
        return f"{headed(self.title, self.text.rstrip())}\n"  # only at its end: the first line may be indented

    def behind_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return each text of `behind`, tokenised alone."""
        return [encode_text(tokenizer, CasePassage(text).rendered()) for text in self.behind]


@dataclass(frozen=True)
class Case:
    """A question, its passages in order, and the answers that count as right.

    id:       names the case in the results
    answers:  gold answers; any of them is right; may be empty
    question_id: shared by cases that are not independent, such as the same question with its gold passage at several
              positions, or questions over the same context; intervals are computed over these groups
    cell:     the key that results are broken down by: {"hops": 2}, {"gold_position": 3}
    """

    id: str
    question: str
    passages: tuple[CasePassage, ...]
    answers: tuple[str, ...]
    question_id: str = ""
    cell: Cell = field(default_factory=dict)

    @property
    def cluster(self) -> str:
        return self.question_id or self.id

    def with_gold_at(self, position: int) -> Case:
        """Return the same case with its gold passage at `position`; the others keep their order.

        Raises ConfigError unless there is exactly one gold passage and the position exists.
        """
        gold = [passage for passage in self.passages if passage.is_gold]
        if len(gold) != 1:
            raise ConfigError(f"{self.id}: {len(gold)} passages are marked as gold; to move it there must be one")
        if not 0 <= position < len(self.passages):
            raise ConfigError(f"{self.id}: there is no position {position} among {len(self.passages)} passages")
        others = [passage for passage in self.passages if not passage.is_gold]
        others.insert(position, gold[0])
        cell = {**self.cell, "gold_position": position}
        name = f"{self.id}@{position}"
        return replace(self, id=name, passages=tuple(others), question_id=self.cluster, cell=cell)

    def prompt(self, tokenizer: PreTrainedTokenizerBase, form: PromptFormat) -> Prompt:
        """Return the prompt, with each passage tokenised alone. Raises PromptError for an empty question."""
        chunks = [encode_text(tokenizer, passage.rendered()) for passage in self.passages]
        return Prompt(form.prefix_ids, chunks, form.suffix_ids(tokenizer, self.question))

    def prompt_without_passages(self, tokenizer: PreTrainedTokenizerBase, form: PromptFormat) -> Prompt:
        return Prompt(form.prefix_ids, [], form.suffix_ids(tokenizer, self.question))
