"""The chat page, where one is served: a folder with index.html."""

from __future__ import annotations

import importlib
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from ragcache.errors import ConfigError


def page_directory() -> Path:
    """Raises ConfigError where the page is not installed."""
    try:
        return Path(importlib.import_module("ragcache_chatbot").PAGE_DIRECTORY)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the chat page is not installed ({error}); install ragcache with its apps") from error


def mount_page(app: FastAPI, directory: Path) -> None:
    """The page at "/", its files under "/static/"."""
    index = directory / "index.html"
    if not index.is_file():
        raise ConfigError(f"{index}: there is no chat page here")

    async def page() -> Response:
        return FileResponse(index, headers={"Cache-Control": "no-cache"})

    app.add_api_route("/", page, include_in_schema=False, response_model=None)
    app.mount("/static", StaticFiles(directory=directory), name="static")
