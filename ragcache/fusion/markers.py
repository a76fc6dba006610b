"""TurboRAG: trained tokens around each chunk, stored with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.additions import Additions
from ragcache.fusion.base import FusionMethod, Inputs, PhaseTimes, Placement, Prefilled, consecutive, run_over
from ragcache.models.lm import LanguageModel
from ragcache.models.reuse import POSITIONS, ReuseSpec
from ragcache.prompt import Prompt


@dataclass(frozen=True)
class Markers(FusionMethod):
    """doc_start and doc_end are read with the chunk, so its block holds them; only the suffix runs (TurboRAG 3.2).

    doc_start_id, doc_end_id: the markers' ids, for a model that was not trained with any; None: the checkpoint's own
    positions: "reordered" (every token at its global position) or "composite" (every chunk starts behind the prefix,
               the suffix behind the longest chunk); None: as the checkpoint was trained, "reordered" where it was not
    """

    doc_start_id: int | None = None
    doc_end_id: int | None = None
    positions: str | None = None

    name: ClassVar[str] = "markers"
    paper: ClassVar[str] = "TurboRAG (arXiv 2410.07590)"
    summary: ClassVar[str] = "stores trained doc_start and doc_end tokens with each block; only the suffix runs"
    needs_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.doc_start_id is None) != (self.doc_end_id is None):
            raise ConfigError("doc_start_id and doc_end_id go together; give both or neither")
        if self.positions is not None and self.positions not in POSITIONS:
            raise ConfigError(f"positions {self.positions!r} is unknown; choose one of {', '.join(POSITIONS)}")

    def additions(self, lm: LanguageModel) -> Additions:
        if self.doc_start_id is not None and self.doc_end_id is not None:
            for id in (self.doc_start_id, self.doc_end_id):
                if not isinstance(id, int) or not 0 <= id < lm.vocab_size:
                    raise ConfigError(f"marker {id!r} is no token id; {lm.name} has ids 0 to {lm.vocab_size - 1}")
            return Additions(markers=(self.doc_start_id, self.doc_end_id))
        trained = _training(lm)
        if trained is None or trained.doc_start_id is None or trained.doc_end_id is None:
            raise ConfigError(
                f"{lm.name} has no trained markers; train them with `ragcache train --reuse markers`, choose another "
                "method such as 'reposition', or pass doc_start_id and doc_end_id"
            )
        return Additions(markers=(trained.doc_start_id, trained.doc_end_id), reserved=trained.added_ids)

    def prefill(
        self, lm: LanguageModel, prompt: Prompt, inputs: Inputs, times: PhaseTimes, reserve_tokens: int
    ) -> Prefilled:
        prefix = [inputs.prefix] if inputs.prefix is not None else []
        start = sum(block.num_tokens for block in prefix)
        if self._layout(lm) == "composite":
            placements = [*consecutive(prefix), *(Placement(block, start) for block in inputs.chunks)]
            start += max((block.num_tokens for block in inputs.chunks), default=0)
        else:
            placements = consecutive([*prefix, *inputs.chunks])
            start += sum(block.num_tokens for block in inputs.chunks)
        return run_over(lm, prompt.suffix_ids, start, placements, times, reserve_tokens)

    def _layout(self, lm: LanguageModel) -> str:
        trained = _training(lm)
        return self.positions or (trained.positions if trained else None) or "reordered"


def _training(lm: LanguageModel) -> ReuseSpec | None:
    return lm.reuse if lm.reuse is not None and lm.reuse.method == "markers" else None
