"""The command serve: OpenAI's HTTP API over the store, with the chat page for `chat --web`."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ragcache.cli import flags
from ragcache.cli.client import Address, announced
from ragcache.cli.terminal import command, say
from ragcache.engine.keys import read_key_file
from ragcache.engine.options import AnswerDefaults
from ragcache.errors import ConfigError
from ragcache.server.settings import ServerSettings

log = logging.getLogger(__name__)
EXTRA = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


@dataclass(frozen=True)
class AddressOptions:
    """The address on which the server listens, and its API keys."""

    host: Annotated[
        str, flags.option("--host", "Address to listen on; others than this machine's own need API keys.")
    ] = "127.0.0.1"
    port: Annotated[int, flags.option("--port", "Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000
    api_keys_file: Annotated[
        Path | None, flags.option("--api-keys-file", "API keys, one a line; RAGCACHE_API_KEYS holds keys themselves.")
    ] = None
    key_file: Annotated[
        Path | None, flags.option("--keys", "Key file of `ragcache keys`: who may ask and write, in which collections.")
    ] = None


@command
def serve(
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    answer: AnswerDefaults,
    address: AddressOptions,
    settings: ServerSettings,
    reading: flags.ReadLimitOptions,
    web: Annotated[bool, flags.option("--web", "Serve the chat page too.")] = False,
) -> None:
    """Serve OpenAI's HTTP API over the store: chat completions, embeddings, documents, metrics.

    Answer options are defaults for requests that do not say otherwise. A store that does not exist is made. SIGTERM or
    Ctrl-C lets running answers finish and cancels additions of documents; a second signal ends the server at once.
    """
    run_server(store, models, address, reading, replace(settings, answers=answer), web=web)


def run_server(
    store: flags.StoreOptions,
    models: flags.EngineOptions,
    address: AddressOptions,
    reading: flags.ReadLimitOptions,
    settings: ServerSettings,
    *,
    web: bool,
) -> None:
    """Run the server until it is stopped.

    Raises ConfigError, before a model is loaded, if the extra `server` is not installed, an option is out of range, a
    file of keys cannot be read, the address is in use, or the server would be reached from outside without any key.
    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f'{missing[0]} is not installed; run: pip install "ragcache-kv[server]"')
    from ragcache.server.auth import LOOPBACK, VARIABLE, is_loopback, read_keys
    from ragcache.server.connection import raise_file_limit
    from ragcache.server.run import limit_arenas, listen, url_of

    settings.answers.call_options()  # refuses options that no question could be answered with
    # A server on a loopback address accepts only loopback names as Host: a web page may rebind its own name to it.
    local = is_loopback(address.host)
    hosts = (*settings.allowed_hosts, *((LOOPBACK,) if local else ()))
    settings = replace(settings, api_keys=read_keys(address.api_keys_file, os.environ), allowed_hosts=hosts)
    settings = replace(settings, key_file=address.key_file)
    if address.key_file is not None:
        read_key_file(address.key_file)  # refused before a model is loaded
    if not local and not settings.api_keys and settings.key_file is None:
        raise ConfigError(
            f"{address.host} is reached from outside, so API keys are needed: give --keys, --api-keys-file or "
            f"{VARIABLE}, or listen on 127.0.0.1"
        )
    limit_arenas()
    raise_file_limit()
    log_as_json()
    flags.hide_bars_in_pipes()
    is_shared = len(settings.api_keys) > 1 or settings.key_file is not None
    store = replace(store, is_shared=is_shared)
    with (
        listen(address.host, address.port) as bound,
        flags.open_with_models(store, models, reading=reading, create=True) as kb,
    ):
        from ragcache.server.app import create_app
        from ragcache.server.run import Server

        if is_shared and (found := kb.info()).neighbours and found.neighbours_from == "similarity":
            log.warning(
                "%s: passages are encoded behind similar ones of any document, so that one key's documents can change "
                "the answers to another key's questions; make the store with --neighbours-from document",
                store.store,
            )
        app, url = create_app(kb, settings, web=web), url_of(bound)
        server = Server(app, drain_s=settings.drain_s)
        with announced(store.store, Address(url, app.state.service.chat_model, kb.lm.name)):
            say(f"{url}/ is the chat page" if web else f"{url}/v1 is the base URL for OpenAI clients")
            server.run(sockets=[bound])


def log_as_json() -> None:
    """Log JSON lines on standard error, from the server, the engine and uvicorn alike."""
    from ragcache.server.observe import JsonFormatter, Throttle

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(Throttle())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("ragcache.server").setLevel(logging.INFO)
