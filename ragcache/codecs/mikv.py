"""More bits for the tokens that matter, few for all others, none thrown away: MiKV (2402.18096).

Eviction loses what a later question may ask for; MiKV keeps the tokens that it would have evicted in low precision,
and the important ones in high precision. Two things differ here, since a stored block has seen no query:

- Importance. MiKV accumulates attention scores while it generates. Here it is read off the keys; see `graded.py`.
- Outliers. MiKV scales channels by sqrt(max |Q| / max |K|) before it quantises keys by token, so that channels with
  large keys do not use up the range of the others. There is no Q here, and none is needed: keys are quantised by
  channel, as KIVI does it, where a channel has a range of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ragcache.codecs.graded import GradedCodec, Int2
from ragcache.codecs.kivi import Int8Codec, KiviCodec
from ragcache.codecs.layered import Part


class MikvCodec(GradedCodec):
    """A fifth of each head's tokens in 8 bits, the others in 2: `int8` over the former, KIVI with 2 bits in groups of
    32 over the latter. Tensors and bound: see GradedCodec."""

    name: ClassVar[str] = "mikv"
    version: ClassVar[int] = 1
    precisions: ClassVar[Mapping[str, KiviCodec]] = {"high": Int8Codec(), "low": Int2()}
    one_in: ClassVar[Mapping[Part, int]] = {"keys": 5, "values": 5}
