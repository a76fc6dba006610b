"""The chat page's place on the server, and the example that talks to it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from serving import Served

from ragcache.errors import ConfigError
from ragcache.server import status as page
from ragcache.server.status import mount_page

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_page_and_all_of_its_files(serve):
    served = serve(web=True)
    found = served.http.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/html")
    links = re.findall(r"""(?:src|href)="([^"#]+)\"""", found.text)
    assert links
    for link in links:
        assert link.removeprefix("/").startswith("static/"), link
        file = served.http.get(f"/{link.removeprefix('/')}")
        assert file.status_code == 200, link
        assert file.headers["content-security-policy"] == "default-src 'self'"
        assert file.headers["x-content-type-options"] == "nosniff"
        assert file.headers["referrer-policy"] == "no-referrer"
    absent = served.http.get("/static/nothing.js")
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")
    assert served.http.get("/static/..%2f__init__.py").status_code == 404
    assert served.http.get("/v1/models").status_code == 200
    assert "/" not in served.http.get("/openapi.json").json()["paths"]


def test_without_the_page_there_is_none(served: Served):
    assert served.http.get("/").status_code == 404


def test_the_page_is_open_and_the_api_is_not(serve):
    served = serve(web=True, api_keys=["key"])
    assert served.http.get("/").status_code == 200
    assert served.http.get("/v1/models").status_code == 401


def test_a_page_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"index\.html"):
        mount_page(FastAPI(), tmp_path)

    def absent(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(page.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="not installed"):
        page.page_directory()


def test_the_example(mini: Served, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_BASE_URL", mini.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    runpy.run_path(str(EXAMPLES / "openai_client.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("Jonas Lansen belongs to the Chess Club Crown.") == 2
    assert "(KV from " in said
    assert "Mira Bruno belongs to the Chess Club Maple." in said
    assert httpx.get(f"{mini.url}/healthz", trust_env=False).status_code == 200
