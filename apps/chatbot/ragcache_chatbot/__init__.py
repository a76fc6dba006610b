"""A chat page over the ragcache server: static files at "/" and "/static/", registered as routes."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

_PAGE = Path(__file__).resolve().parent / "page"
router = APIRouter()
router.mount("/static", StaticFiles(directory=_PAGE), name="static")


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
async def page() -> Response:
    """Return the page, which browsers check for a newer version each time."""
    return FileResponse(_PAGE / "index.html", headers={"Cache-Control": "no-cache"})
