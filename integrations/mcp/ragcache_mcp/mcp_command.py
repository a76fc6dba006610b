"""`ragcache mcp`: the store's tools for an MCP client that starts the command."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import redirect_stdout
from typing import Annotated

from ragcache.cli.flags import EngineOptions, ReadLimitOptions, StoreOptions, open_with_models, option
from ragcache.cli.terminal import command
from ragcache.engine.options import AnswerOptions
from ragcache.errors import ConfigError

TIMEOUT_S = 600.0


@command
def mcp(
    store: StoreOptions,
    models: EngineOptions,
    answer: AnswerOptions,
    reading: ReadLimitOptions,
    timeout_s: Annotated[float, option("--timeout", "Seconds for one question, waiting included.")] = TIMEOUT_S,
    read_only: Annotated[bool, option("--read-only", "Offer no tools that change the documents.")] = False,
) -> None:
    """Serve the store's tools to an MCP client over standard input and output: search, ask, add, delete.

    The client starts this command itself and ends it by closing its input. Answer options are defaults, which a call
    may override. A store that does not exist is made. `ragcache serve` has the same tools at /mcp.
    """
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError('mcp is not installed; run: pip install "ragcache-kv[mcp]"')
    if not timeout_s > 0:
        raise ConfigError(f"--timeout is {timeout_s}; it must be above 0")
    options = answer.call_options()
    from ragcache_mcp.tools import Tools, build

    with redirect_stdout(sys.stderr):  # standard output is for the protocol only
        kb = open_with_models(store, models, reading=reading, create=True)
    with kb:
        build(Tools(kb, options, timeout_s), writes=not read_only).run("stdio")
