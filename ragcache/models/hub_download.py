"""Download of a model's files from the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ragcache.errors import ModelNotFoundError, first_line
from ragcache.models.hub import BUNDLED, refuse_absent, split_file
from ragcache.models.named import snapshot

# The files of a repository that a model needs; its folders hold other formats.
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.safetensors")


def pull_hub(name: str, where: str, say: Callable[[str], None]) -> Path:
    """Fetch a model from the hub, and return its directory or GGUF file on this machine.

    name: the name that the caller gave, for errors
    where: hub id, or `hub id/file.gguf`
    say:  called with a progress message

    Raises ModelNotFoundError.
    """
    place, file = split_file(where)
    refuse_absent(place, name, BUNDLED)
    say(f"Fetching {where} from the hub ...")
    try:
        return download(place, file.get("gguf_file"))
    except Exception as error:  # the hub's client raises its own errors, httpx's and the system's
        raise ModelNotFoundError(f"cannot fetch {name!r} from the hub: {first_line(error)}; try again") from error


def download(hub: str, file: str | None = None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if file is not None:
        return Path(hf_hub_download(hub, file))
    patterns = list(HUB_FILES)
    if snapshot(hub) is None and not any(name.endswith(".safetensors") for name in HfApi().list_repo_files(hub)):
        patterns.append("*.bin")
    return Path(snapshot_download(hub, allow_patterns=patterns, ignore_patterns=["*/*"]))
