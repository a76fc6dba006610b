"""Names of models: whether there is anything under one, and what was probably meant by one that names nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from ragcache.errors import ModelNotFoundError

HUB_S = 5.0
CONFIG = "config.json"
ADAPTER = "adapter.json"
GGUF = ".gguf"
BUNDLED = {"mini": "mini", "mini-base": "mini_base", "mini-long": "mini_long", "mini-long-link": "mini_long_link"}
"""Name -> directory inside the package."""


def resolve(name: str | Path) -> str:
    """A bundled name becomes its directory; anything else stays as it is."""
    bundled = BUNDLED.get(str(name))
    if bundled is not None and not Path(name).is_dir():
        return str(Path(__file__).parent.parent / bundled)
    return str(name)


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
        why = _absence(where)
        if why is None:
            return
        reason += f", nor a model of that name in the hub's cache or on the hub ({type(why).__name__})"
    nearest = get_close_matches(name, [*known, *_cached(), *_beside(name)], n=1)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ModelNotFoundError(f"cannot load a model under {name!r}: {reason}{meant}") from why


def _absence(name: str) -> Exception | None:
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


def _cached() -> Iterator[str]:
    """Hub ids whose files are here."""
    from huggingface_hub import constants

    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        yield folder.name.removeprefix("models--").replace("--", "/")


def _beside(name: str) -> Iterator[str]:
    """Model directories where this one was looked for."""
    for config in Path(name).parent.glob(f"*/{CONFIG}"):
        yield str(config.parent)


# How much memory there is.


def machine_bytes() -> int | None:
    """Memory of the machine; None where the system does not say."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
