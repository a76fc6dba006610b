"""Measured rates beside a store, so that the next process need not measure again."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache.codecs.atomic import atomic_write, write_all
from ragcache.engine.loading.rates import RateFigures, TierFigures
from ragcache.errors import StoreError
from ragcache.kv.block_key import digest
from ragcache.lazy import torch
from ragcache.store.eviction import PrefillRate

if TYPE_CHECKING:  # a store without models reads this file too
    from ragcache.models.language_model import LanguageModel

log = logging.getLogger(__name__)
CHANGED = 1.5


def machine_key(lm: LanguageModel) -> str:
    """Names what rates depend on: this machine, how many threads compute, the model and its device."""
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads()]
    return digest([*machine, lm.fingerprint, str(lm.device)])


class RatesFile:
    """A small JSON file: the rates of the machine that wrote last. It is a statistic: what cannot be read or written
    is measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, machine: str | None = None) -> RateFigures | None:
        """None where there are none, or not of this machine (None: of any)."""
        try:
            found = json.loads(self.path.read_bytes())
            if machine is not None and found["machine"] != machine:
                return None
            return _figures(found["rates"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, machine: str, figures: RateFigures) -> None:
        """Write figures that differ from those kept: a few per cent are not worth flushing a file."""
        if _alike(self.read(machine), figures):
            return
        try:
            with atomic_write(self.path) as file:
                write_all(file, json.dumps({"machine": machine, "rates": figures.to_json()}).encode())
        except (OSError, StoreError) as error:
            log.warning("%s: measured rates are not kept (%s)", self.path, error)


def _alike(old: RateFigures | None, new: RateFigures) -> bool:
    if old is None or old.tiers.keys() != new.tiers.keys() or old.decode_bytes_s.keys() != new.decode_bytes_s.keys():
        return False
    pairs = [(old.tiers[name].bytes_s, tier.bytes_s) for name, tier in new.tiers.items()]
    pairs.append((old.prefill_tokens_s or 1.0, new.prefill_tokens_s or 1.0))
    return all(1 / CHANGED < a / b < CHANGED for a, b in pairs)


def _figures(found: Mapping[str, Any]) -> RateFigures:
    tiers = {
        str(name): TierFigures(_positive(tier["latency_s"] or 1e-9), _positive(tier["bytes_s"]), True)
        for name, tier in found["tiers"].items()
    }
    prefill = found["prefill"]
    rate = None if prefill is None else PrefillRate(_positive(prefill["linear"]), max(0.0, float(prefill["quadratic"])))
    return RateFigures(tiers, rate, {str(name): _positive(rate) for name, rate in found["decode_bytes_s"].items()})


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{number} is no rate")
    return number
