"""Routes that packages add, which need a key wherever they are nested and change no other's, and the chat page."""

import re
import runpy
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import create_model
from serving import Served, serving
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ragcache.errors import ConfigError
from ragcache.plugins import Registry
from ragcache.server import app as server_app
from ragcache.server.settings import ServerSettings


def router_of(prefix: str, model: type, **more) -> APIRouter:
    """POST {prefix}/things/{id}, in a router within a router, GET of the same, and an application of its own below."""
    inner, middle, outer = APIRouter(prefix="/things"), APIRouter(), APIRouter(prefix=prefix)

    @inner.post("/{id}", responses={200: {"model": model}})
    async def post(id: str, thing: model):
        return PlainTextResponse(f"posted {id}")

    @inner.get("/{id}")
    async def get(id: str):
        return PlainTextResponse(f"got {id}")

    mounted = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    mounted.get("/inside")(lambda: "inside")
    middle.include_router(inner)
    middle.mount("/app", mounted)
    outer.include_router(middle)
    outer.routes.append(Route(f"{prefix}-plain", lambda _request: PlainTextResponse("plain")))
    return outer


def named(**fields) -> type:
    return create_model("Thing", **{name: (kind, ...) for name, kind in fields.items()})


@pytest.fixture
def packages(monkeypatch):
    """Registered as they are by packages: after what is there."""

    def register(**routers: APIRouter) -> None:
        own = {name: server_app.ADDED[name] for name in server_app.ADDED}
        monkeypatch.setattr(server_app, "ADDED", Registry("ragcache.no_such_group", own | routers))

    return register


PATHS = ("/acme/things/1", "/acme/app/inside", "/acme-plain")
OPEN = ("/healthz", "/readyz", "/openapi.json")


def test_nested_routers_and_mounted_applications_need_a_key_and_nothing_else_changes(kb, packages):
    packages(acme=router_of("/acme", named(size=int)))
    with serving(kb, ServerSettings(api_keys=("key",), drain_s=5)) as served:
        key = {"Authorization": "Bearer key"}
        for path in PATHS:
            assert served.http.get(path).status_code == 401, path
            assert served.http.get(path, headers=key).status_code == 200, path
        for path in OPEN:
            assert served.http.get(path).status_code == 200, path
        for path in ("/", "/static/page.js", "/acme", "/nothing", "/metrics"):
            assert served.http.get(path).status_code == 401, path
        document = served.http.get("/openapi.json").json()
        assert document["paths"]["/acme/things/{id}"]["get"]["security"]
        assert "security" not in document["paths"]["/healthz"]["get"]


def test_without_keys_and_with_the_page(kb, packages):
    packages(acme=router_of("/acme", named(size=int)))
    with serving(kb, ServerSettings(drain_s=5), web=True) as served:
        assert [served.http.get(path).status_code for path in (*PATHS, "/")] == [200] * 4
        refused = served.http.delete("/acme/things/1")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, POST")
    with serving(kb, ServerSettings(api_keys=("key",), drain_s=5), web=True) as served:
        assert [served.http.get(path).status_code for path in ("/", "/acme-plain")] == [200, 401]


def schemas_of(kb) -> dict:
    document = server_app.create_app(kb).openapi()
    return document["components"]["schemas"], document["paths"]


def name_of(content) -> str:
    return content["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]


def test_two_packages_name_their_bodies_alike(kb, packages):
    before, _ = schemas_of(kb)
    part = create_model("VectorStore", colour=(str, ...))  # as one that is there already
    packages(acme=router_of("/acme", named(size=int)), bolt=router_of("/bolt", named(part=part)))
    schemas, paths = schemas_of(kb)
    for path, fields in (("/acme/things/{id}", {"size"}), ("/bolt/things/{id}", {"part"})):
        post = paths[path]["post"]
        for content in (post["requestBody"], post["responses"]["200"]):
            assert set(schemas[name_of(content)]["properties"]) == fields
    thing = schemas[name_of(paths["/bolt/things/{id}"]["post"]["requestBody"])]
    assert set(schemas[thing["properties"]["part"]["$ref"].rpartition("/")[2]]["properties"]) == {"colour"}
    own = name_of(paths["/v1/vector_stores"]["post"]["responses"]["200"])
    assert schemas[own] == before.pop("VectorStore")
    assert before.items() <= schemas.items()


# The chat page's place on the server, and the example that talks to it.


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
    assert serve().http.get("/").text == "Ollama is running"  # as Ollama's clients ask before all else
    assert serve().http.get("/static/favicon.svg").status_code == 404
    assert served.http.get("/static/..%2f__init__.py").status_code == 404
    assert served.http.get("/v1/models").status_code == 200
    assert "/" not in served.http.get("/openapi.json").json()["paths"]


def test_a_page_that_is_not_installed(kb, monkeypatch):
    monkeypatch.setattr(server_app, "ADDED", Registry("ragcache.no_such_group"))
    with pytest.raises(ConfigError, match="chat page is not installed"):
        server_app.create_app(kb, web=True)


def test_the_example(mini: Served, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_BASE_URL", mini.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    runpy.run_path(str(EXAMPLES / "openai_client.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("Jonas Lansen belongs to the Chess Club Crown.") == 2
    assert "(KV from " in said
    assert "Mira Bruno belongs to the Chess Club Maple." in said
    assert httpx.get(f"{mini.url}/healthz", trust_env=False).status_code == 200
