"""TurboRAG: trained tokens around each chunk, stored with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.layout import COMPOSITE, AddedTokens
from ragcache.fusion.method import FusionMethod
from ragcache.models.card import ModelCard
from ragcache.models.trained_tokens import POSITIONS


@dataclass(frozen=True)
class Markers(FusionMethod):
    """doc_start and doc_end are read with the chunk, so its block holds them; only the suffix runs (TurboRAG 3.2).

    doc_start_id, doc_end_id: the markers' ids, for a model that was not trained with any; None: the checkpoint's own
    positions: "reordered" (every token at its global position) or "composite" (every chunk starts after the prefix,
               the suffix after the longest chunk); None: as the checkpoint was trained, or "reordered" if it was not
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

    def additions(self, lm: ModelCard) -> AddedTokens:
        trained = lm.reuse if lm.reuse is not None and lm.reuse.method == "markers" else None
        if self.doc_start_id is not None and self.doc_end_id is not None:
            for id in (self.doc_start_id, self.doc_end_id):
                if not isinstance(id, int) or not 0 <= id < lm.vocab_size:
                    raise ConfigError(f"marker {id!r} is no token id; {lm.name} has ids 0 to {lm.vocab_size - 1}")
            added = AddedTokens(markers=((self.doc_start_id,), (self.doc_end_id,)))
        elif trained is None:
            raise ConfigError(
                f"{lm.name} has no trained markers; train them with `ragcache train --reuse markers`, choose another "
                "method such as 'reposition', or pass doc_start_id and doc_end_id"
            )
        else:
            added = AddedTokens.trained(trained)
        stated = self.positions or (None if trained is None else trained.positions)
        return replace(added, positions="parallel" if stated == COMPOSITE else "global")
