"""Models that `ollama pull` has fetched, by name: their GGUF files are read where Ollama keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from ragcache.errors import ModelNotFoundError

PREFIX = "ollama:"
MODEL_LAYER = "application/vnd.ollama.image.model"
SYSTEM = Path("/usr/share/ollama/.ollama/models")  # where Ollama's service keeps its models on Linux


def blob(name: str) -> Path:
    """Return the file of a model's weights, for a name such as "qwen3:0.6b" or "hf.co/org/model:tag".

    Raises ModelNotFoundError that lists the models that are here.
    """
    model, _, tag = name.partition(":")
    parts = [part for part in model.split("/") if part not in ("", ".", "..")]
    place = Path(*["registry.ollama.ai", "library"][: max(0, 3 - len(parts))], *parts, tag or "latest")
    for root in _roots():
        manifest = root / "manifests" / place
        if "/" in tag or not manifest.is_file():
            continue
        try:
            layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
            digest = next(str(one["digest"]) for one in layers if one["mediaType"] == MODEL_LAYER)
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise ModelNotFoundError(f"{manifest} names no weights; run `ollama pull {name}` again") from error
        file = root / "blobs" / Path(digest.replace(":", "-")).name
        if not file.is_file():
            raise ModelNotFoundError(f"{manifest} names {file}, which is not there; run `ollama pull {name}` again")
        return file
    here = ", ".join(sorted(_names())) or "none"
    raise ModelNotFoundError(f"Ollama has no model {name!r} here (it has: {here}); run `ollama pull {name}`")


def _roots() -> list[Path]:
    """Return the directories of Ollama's models: the configured directory, else the user's and the service's."""
    own = os.environ.get("OLLAMA_MODELS")
    return [Path(own)] if own else [Path.home() / ".ollama" / "models", SYSTEM]


def _names() -> Iterator[str]:
    for root in _roots():
        library = root / "manifests" / "registry.ollama.ai" / "library"
        yield from (f"{file.parent.name}:{file.name}" for file in library.glob("*/*"))
