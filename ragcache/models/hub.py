"""Names of models: whether a name refers to a model, and the nearest known name if it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from ragcache.errors import ModelNotFoundError
from ragcache.models.named import CONFIG, NAMED, cached
from ragcache.models.ollama import PREFIX, blob

HUB_S = 5.0
ADAPTER = "adapter.json"
GGUF = ".gguf"
BLOB = "sha256-"  # begins the name of each file that Ollama keeps
BUNDLED = {"mini": "mini", "mini-base": "mini_base"}
"""Name of a bundled model -> directory inside the package."""
ADAPTERS = {"smollm2-reuse": "smollm2_reuse"}
"""Name of a bundled adapter, whose base is fetched -> directory inside the package."""


def resolve(name: str | Path) -> str:
    """Return the directory, hub id or GGUF file that a model's name refers to.

    A bundled name becomes its directory; a name in NAMED the directory of its weights, or else its hub id; a directory
    that holds a single GGUF file and no other model becomes that file; "ollama:NAME" the file that Ollama has of it.
    Any other name is returned unchanged. Raises ModelNotFoundError for a name that Ollama does not have.
    """
    if str(name).startswith(PREFIX):
        return str(blob(str(name).removeprefix(PREFIX)))
    path = Path(name)
    if path.is_dir():
        files = list(path.glob(f"*{GGUF}"))
        others = any((path / other).is_file() for other in (CONFIG, ADAPTER, "adapter_config.json"))
        return str(files[0] if len(files) == 1 and not others else name)
    if (bundled := (BUNDLED | ADAPTERS).get(str(name))) is not None:
        return str(Path(__file__).parent.parent / bundled)
    if (source := NAMED.get(str(name))) is not None:
        return str(cached(str(name)) or source.hub)
    return str(name)


def split_file(where: str) -> tuple[str, dict[str, str]]:
    """Split a name into a model's directory or hub id and transformers' option for a GGUF file there.

    "org/name/model-Q4_K_M.gguf" becomes ("org/name", {"gguf_file": "model-Q4_K_M.gguf"}). A blob of Ollama's is such a
    file too.
    """
    if not (where.endswith(GGUF) or Path(where).name.startswith(BLOB)) or Path(where).is_dir():
        return where, {}
    path = Path(where)
    return str(path.parent), {"gguf_file": path.name}


def refuse_absent(where: str, name: str, known: Iterable[str] = ()) -> None:
    """Raise ModelNotFoundError at once if `where` is no directory, and no model in the hub's cache or on the hub.

    transformers would query the hub repeatedly for half a minute.

    name: the name that `where` was found from; known: further names, to suggest the nearest name in the message
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
    nearest = get_close_matches(name, [*known, *NAMED, *ADAPTERS, *_on_disk(), *beside], n=1)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ModelNotFoundError(f"cannot load a model under {name!r}: {reason}{meant}") from why


def absence(name: str) -> Exception | None:
    """Return the error that shows that the hub lacks the model or cannot be reached.

    Returns None if the hub has the model, or may have it.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, CONFIG), str):
            return None
        HfApi().model_info(name, timeout=HUB_S)
    except HfHubHTTPError as error:  # transformers handles gated models and the errors of mirrors
        return error if type(error) is RepositoryNotFoundError else None
    except Exception as error:  # an invalid name, or the transport's own errors: no answer
        return error
    return None


def _on_disk() -> Iterator[str]:
    """Yield the hub ids whose files are in the hub's cache."""
    from huggingface_hub import constants

    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        yield folder.name.removeprefix("models--").replace("--", "/")
