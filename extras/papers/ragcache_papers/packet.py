"""KV Packet: trained vectors around each chunk, stored with it, on weights that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ragcache.errors import ConfigError
from ragcache.fusion.layout import AddedTokens
from ragcache.fusion.method import FusionMethod
from ragcache.models.card import ModelCard


@dataclass(frozen=True)
class Packet(FusionMethod):
    """Vectors before and after each chunk are read with it, so its block holds them; only the suffix runs.

    They are the embeddings of reserved ids, trained by the divergence from the same model's full prefill while its
    weights stay frozen (`ragcache train --reuse packet`). Every method that reads blocks of such a model reads them
    with their packets.

    header_ids, trailer_ids: ids before and after each chunk, for a model that was not trained with any; empty
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
