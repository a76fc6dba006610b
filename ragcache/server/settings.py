"""Settings of the server, and the defaults of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ragcache.engine.options import AnswerDefaults, Option, Size
from ragcache.errors import ConfigError, check_least

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Limits, keys and names. The option of each field describes it, except for these:

    slots:            fewer than the engine's threads, so that a thread is left for a change of the documents
    write_wait_s:     how long a change of the documents waits for another change before 409
    max_upload_bytes: largest body of POST /v1/documents
    max_upload_files: files in an upload
    receive_s:        seconds for a request's whole header, and for its body, plus a second for each SLOWEST bytes
    max_connections:  connections at once; None: as many as the limit of open files allows, 4096 at most
    max_address_connections: of these, connections of an address; None: half
    figures_s:        how long store figures are cached
    api_keys:         keys that open everything; without any, and without `key_file`, every client that reaches the port
                      has access
    key_file:         see `ragcache.engine.keys`
    allowed_hosts:    names in the Host header; empty: any
    answers:          defaults of chat requests
    record:           file to which hashes and lengths of each chat request are appended; see `RequestLog`

    Raises ConfigError naming the field that is out of range.
    """

    slots: Annotated[int, Option("--slots", "Questions that are answered at the same time.")] = 8
    max_queue: Annotated[int, Option("--queue", "Questions that may wait; more are refused with 503.")] = 512
    timeout_s: Annotated[float, Option("--timeout", "Seconds for one question, waiting included.")] = 600.0
    write_wait_s: float = 10.0
    drain_s: Annotated[float, Option("--drain", "Seconds for running answers when told to stop.")] = 30.0
    max_body_bytes: Annotated[int, Size("--max-body", "Largest JSON body.")] = 4 * MIB
    max_upload_bytes: Annotated[int, Size("--max-upload", "Largest upload.")] = 64 * MIB
    max_upload_files: int = 100
    document_tokens: Annotated[
        int, Option("--max-document-tokens", "Most tokens of an added document, before its KV is computed.")
    ] = 100_000
    upload_tokens: Annotated[
        int, Option("--max-upload-tokens", "Most tokens of an addition whose KV is to be computed.")
    ] = 1_000_000
    upload_kv_bytes: Annotated[int, Size("--max-upload-kv", "Most KV of an addition, as estimated.")] = 16 << 30
    upload_s: Annotated[
        float, Option("--max-upload-time", "Seconds for an addition, as estimated before and as taken.")
    ] = 1800.0
    key_requests: Annotated[
        float | None, Option("--key-requests", "Requests of an API key in a minute; any number if not given.")
    ] = None
    key_tokens: Annotated[
        float | None,
        Option("--key-tokens", "Computed and answered tokens of an API key in a minute; any number if not given."),
    ] = None
    key_upload_tokens: Annotated[
        float | None, Option("--key-upload-tokens", "Added tokens of an API key in an hour; any number if not given.")
    ] = None
    receive_s: float = 10.0
    max_connections: Annotated[
        int | None, Option("--max-connections", "Connections at once; as many as open files allow if not given.")
    ] = None
    max_address_connections: Annotated[
        int | None, Option("--max-address-connections", "Connections of an address at once; half of all if not given.")
    ] = None
    figures_s: float = 5.0
    api_keys: Sequence[str] = ()
    key_file: Path | None = None
    retrieve: Annotated[
        Literal["on", "off"], Option("--retrieve", "off: answer without passages unless a request asks for them.")
    ] = "on"
    keep_responses: Annotated[
        int, Option("--keep-responses", "Answers of /v1/responses that are kept for each API key, the newest; 0: none.")
    ] = 1000
    strict: Annotated[bool, Option("--strict", "Refuse unknown fields of requests, instead of ignoring them.")] = False
    open_metrics: Annotated[bool, Option("--open-metrics", "Let /metrics be read without an API key.")] = False
    allowed_hosts: Annotated[
        Sequence[str], Option("--allowed-host", "A name of this server in the Host header; may be repeated.")
    ] = ()
    model_name: Annotated[
        str | None, Option("--model-name", "What clients call the model; its own name if not given.")
    ] = None
    record: Path | None = None
    answers: AnswerDefaults = field(default_factory=AnswerDefaults)

    def __post_init__(self) -> None:
        least: dict[str, float] = {"slots": 1, "max_queue": 0, "write_wait_s": 0, "drain_s": 0, "figures_s": 0}
        least |= {"max_body_bytes": 1024, "max_upload_bytes": 1024, "max_upload_files": 1, "keep_responses": 0}
        least |= {"document_tokens": 1, "upload_tokens": 1, "upload_kv_bytes": 1}
        least |= {"max_connections": 1, "max_address_connections": 1}
        least |= {"key_requests": 1, "key_tokens": 1, "key_upload_tokens": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None:
                check_least(name, value, bound)
        from ragcache.engine.aio import THREADS

        if self.slots >= THREADS:
            raise ConfigError(f"slots is {self.slots}; the engine has threads for {THREADS - 1}")
        for name in ("timeout_s", "receive_s", "upload_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; leave it out or write one")
