"""TurboRAG: trained tokens around each chunk, stored with it."""

from __future__ import annotations

from collections.abc import Sequence
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


# KV Packet: trained vectors around each chunk, stored with it, on weights that stay as they are.


@dataclass(frozen=True)
class Packet(FusionMethod):
    """Vectors in front of the chunk and behind it are read with it, so its block holds them; only the suffix runs.

    They are embeddings of ids of their own, trained by the divergence from the same model's full prefill while its
    weights stay frozen (`ragcache train --reuse packet`). Every method that reads blocks of such a model reads them
    with their packets.

    header_ids, trailer_ids: ids in front of each chunk and behind it, for a model that was not trained with any; empty
                             for none, which is `reposition`; None: the checkpoint's own
    """

    header_ids: Sequence[int] | None = None
    trailer_ids: Sequence[int] | None = None

    name: ClassVar[str] = "packet"
    paper: ClassVar[str] = "KV Packet (arXiv 2604.13226)"
    summary: ClassVar[str] = "stores trained vectors with each block, on frozen weights; only the suffix runs"
    needs_training: ClassVar[bool] = True
    keeps_context: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.header_ids is None) != (self.trailer_ids is None):
            raise ConfigError("header_ids and trailer_ids go together; give both or neither")
        if self.header_ids is not None and self.trailer_ids is not None:
            for name in ("header_ids", "trailer_ids"):
                given = getattr(self, name)
                if not isinstance(given, Sequence) or isinstance(given, str):
                    raise ConfigError(f"{name} is {given!r}; give a list of token ids, such as [5, 6]")
                object.__setattr__(self, name, tuple(given))

    def additions(self, lm: ModelCard) -> AddedTokens:
        if self.header_ids is not None and self.trailer_ids is not None:
            added = AddedTokens(markers=(tuple(self.header_ids), tuple(self.trailer_ids)))
            outside = [id for side in added.markers or () for id in side if not 0 <= id < lm.vocab_size]
            if outside:
                raise ConfigError(f"the packet holds id {outside[0]}; {lm.name} has ids 0 to {lm.vocab_size - 1}")
            return added
        if lm.reuse is None or (lm.reuse.packet is None and lm.reuse.method != self.name):
            raise ConfigError(
                f"{lm.name} has no trained packet; train one with `ragcache train --reuse packet`, choose another "
                "method such as 'reposition', or pass header_ids and trailer_ids"
            )
        return super().additions(lm)
