"""serve: OpenAI's HTTP API over the store; with the chat page on top for `chat --web`."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ragcache.cli.flags import (
    AnswerOptions,
    ModelOptions,
    ReadLimitOptions,
    StoreOptions,
    TurnOptions,
    WhereOptions,
    hide_bars_in_pipes,
    open_with_models,
    option,
    size_option,
)
from ragcache.cli.terminal import command, say, say_error
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache.server.settings import AnswerDefaults, ServerSettings

EXTRA = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MIB = 1 << 20


@dataclass(frozen=True)
class AddressOptions:
    """Address on which the server listens."""

    host: Annotated[str, option("--host", "Address to listen on; others than this machine's own need API keys.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, option("--port", "Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000
    api_keys_file: Annotated[
        Path | None, option("--api-keys-file", "API keys, one a line; RAGCACHE_API_KEYS holds keys themselves.")
    ] = None


@dataclass(frozen=True)
class LimitOptions:
    """Limits of the server: fields of ServerSettings."""

    slots: Annotated[int, option("--slots", "Questions that are answered at the same time.", min=1)] = 8
    max_queue: Annotated[int, option("--queue", "Questions that may wait; more are refused with 503.", min=0)] = 512
    timeout_s: Annotated[float, option("--timeout", "Seconds for one question, waiting included.")] = 600.0
    drain_s: Annotated[float, option("--drain", "Seconds for running answers when told to stop.", min=0)] = 30.0
    max_body_bytes: Annotated[int, size_option("--max-body", "Largest JSON body.", "4MiB")] = 4 * MIB
    max_upload_bytes: Annotated[int, size_option("--max-upload", "Largest upload.", "64MiB")] = 64 * MIB


@dataclass(frozen=True)
class ServeOptions:
    """Things that the server shows."""

    model_name: Annotated[
        str | None, option("--model-name", "What clients call the model; its own name if not given.")
    ] = None
    open_metrics: Annotated[bool, option("--open-metrics", "Let /metrics be read without an API key.")] = False
    web: Annotated[bool, option("--web", "Serve the chat page too.")] = False


@command
def serve(
    store: StoreOptions,
    models: ModelOptions,
    where: WhereOptions,
    answer: AnswerOptions,
    turns: TurnOptions,
    address: AddressOptions,
    limits: LimitOptions,
    reading: ReadLimitOptions,
    serving: ServeOptions,
) -> None:
    """Serve OpenAI's HTTP API over the store: chat completions, embeddings, documents, metrics.

    Answer options are defaults for requests that do not say otherwise. A store that is not there is made. SIGTERM or
    Ctrl-C lets running answers finish and ends the adding of documents; a second one ends all.
    """
    check_installed()
    settings = server_settings(answer, turns, address, limits, serving)
    run_server(store, models, where, address, reading, settings, web=serving.web)


def run_page(
    store: StoreOptions,
    models: ModelOptions,
    where: WhereOptions,
    answer: AnswerOptions,
    turns: TurnOptions,
    address: AddressOptions,
    timeout_s: float | None,
) -> None:
    """The chat page and the API below it, until interrupted."""
    check_installed()
    limits = LimitOptions() if timeout_s is None else LimitOptions(timeout_s=timeout_s)
    settings = server_settings(answer, turns, address, limits, ServeOptions())
    run_server(store, models, where, address, ReadLimitOptions(), settings, web=True)


def run_server(
    store: StoreOptions,
    models: ModelOptions,
    where: WhereOptions,
    address: AddressOptions,
    reading: ReadLimitOptions,
    settings: ServerSettings,
    *,
    web: bool,
) -> None:
    """Raises ConfigError (address taken) before a model is loaded."""
    from ragcache.server.run import limit_arenas, listen, url_of

    limit_arenas()
    if address.host not in LOOPBACK and not settings.api_keys:
        say_error(f"warning: {address.host} is reached from outside, and no API key is set: anyone can read the store")
    log_as_json()
    hide_bars_in_pipes()
    with (
        listen(address.host, address.port) as bound,
        open_with_models(store, models, reading=reading, where=where, create=True) as kb,
    ):
        from ragcache.server.app import create_app
        from ragcache.server.run import Server

        server = Server(create_app(kb, settings, web=web), drain_s=settings.drain_s)
        url = url_of(bound)
        say(f"{url}/ is the chat page" if web else f"{url}/v1 is the base URL for OpenAI clients")
        server.run(sockets=[bound])


def check_installed() -> None:
    """Raises ConfigError when the extra is absent."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f'{missing[0]} is not installed; run: pip install "ragcache-kv[server]"')


def server_settings(
    answer: AnswerOptions, turns: TurnOptions, address: AddressOptions, limits: LimitOptions, serving: ServeOptions
) -> ServerSettings:
    """Raises ConfigError naming the option that is out of range, or the file of keys that cannot be read."""
    from ragcache.server.auth import LOOPBACK_NAMES, read_keys
    from ragcache.server.settings import ServerSettings

    return ServerSettings(
        **vars(limits),
        api_keys=read_keys(address.api_keys_file, os.environ),
        open_metrics=serving.open_metrics,
        # A server for this machine alone answers to its names alone: a web page may rebind another name to it.
        allowed_hosts=LOOPBACK_NAMES if address.host in LOOPBACK else (),
        model_name=serving.model_name,
        answers=answer_defaults(answer, turns),
    )


def answer_defaults(answer: AnswerOptions, turns: TurnOptions) -> AnswerDefaults:
    from ragcache.server.settings import AnswerDefaults

    options = answer.stream_options()
    sampling = asdict(options.pop("sampling"))
    own = {field.name: sampling[field.name] for field in fields(AnswerDefaults) if field.name in sampling}
    return AnswerDefaults(**own, **options, context=turns.context)


def log_as_json() -> None:
    """One JSON object a line on standard error, from the server, the engine and uvicorn alike."""
    from ragcache.server.observe import JsonFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("ragcache.server").setLevel(logging.INFO)
