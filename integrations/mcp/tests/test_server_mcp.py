"""The tools for MCP clients by the official client: /mcp of the server, and `ragcache mcp` over standard streams."""

import asyncio
import os
import sys

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from serving import wait_for

import ragcache as rc

MODES = ("auto", "legacy")  # today's protocol, and the one with a handshake
BARKS = "Which animals bark at night?"


def said(result) -> str:
    assert result.is_error
    return result.content[0].text


@pytest.mark.parametrize("mode", MODES)
async def test_the_tools_over_http(served, kb, mode):
    async with Client(f"{served.url}/mcp", mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {name: tool.annotations.read_only_hint for name, tool in tools.items()} == {
            "search": True,
            "ask": True,
            "add": False,
            "delete": False,
        }
        assert tools["delete"].annotations.destructive_hint
        assert tools["search"].input_schema["required"] == ["query"]

        found = await client.call_tool("search", {"query": BARKS, "k": 1})
        assert [one["document_id"] for one in found.structured_content["passages"]] == ["dogs"]
        answer = (await client.call_tool("ask", {"question": BARKS, "k": 2, "max_tokens": 4})).structured_content
        right = kb.ask(BARKS, 2, sampling=rc.Sampling(4))
        assert (answer["answer"], answer["is_cut"]) == (right.text, True)
        assert [(one["text"], one["place"]) for one in answer["sources"]] == [
            (hit.chunk.text, hit.chunk.place) for hit in right.hits
        ]

        new = {"id": "hat", "text": "Jonas wears a green hat.", "metadata": {"year": 2024}}
        added = await client.call_tool("add", {"documents": [new, {"id": "blank", "text": " "}]})
        assert added.structured_content["added"] == ["hat"]
        assert "no text" in added.structured_content["failed"][0]["error"]
        newer = {"query": "hat", "filter": {"year": {"$gte": 2020}}}
        found = await client.call_tool("search", newer)
        assert [one["document_id"] for one in found.structured_content["passages"]] == ["hat"]
        deleted = await client.call_tool("delete", {"ids": ["hat", "nothing"]})
        assert deleted.structured_content == {"deleted": ["hat"], "unknown": ["nothing"]}
        assert kb.document("hat") is None


async def test_errors_say_the_way_out(served):
    async with Client(f"{served.url}/mcp") as client:
        assert "ask something" in said(await client.call_tool("ask", {"question": " "}))
        asked = {"query": "x", "filter": {"letters": {"$near": 1}}}
        assert "choose from $eq" in said(await client.call_tool("search", asked))
        assert "greater than or equal to 1" in said(await client.call_tool("search", {"query": "x", "k": 0}))
        assert "at least 1 item" in said(await client.call_tool("delete", {"ids": []}))


async def test_arguments_that_there_are_not_are_refused_by_name(served, kb):
    async with Client(f"{served.url}/mcp") as client:
        for tool in (await client.list_tools()).tools:
            assert tool.input_schema["additionalProperties"] is False
        assert "limit" in said(await client.call_tool("search", {"query": "x", "limit": 1}))
        told = {"documents": [{"id": "hat", "text": "A hat.", "tags": ["green"]}]}
        assert "documents.0.tags" in said(await client.call_tool("add", told))
    assert kb.document("hat") is None


async def test_its_work_is_among_the_servers_figures(served):
    """Documents are counted at once, and answers like those of all routes."""
    figures = lambda: served.http.get("/v1/store").json()["documents"]  # noqa: E731
    before = figures()
    async with Client(f"{served.url}/mcp") as client:
        await client.call_tool("add", {"documents": [{"id": "hat", "text": "Jonas wears a green hat."}]})
        assert figures() == before + 1
        await client.call_tool("delete", {"ids": ["hat"]})
        assert figures() == before
        await client.call_tool("ask", {"question": BARKS, "max_tokens": 4})
    assert 'ragcache_tokens_total{kind="completion"} 4.0' in served.http.get("/metrics").text


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_stops_says_so(served, mode):
    async with Client(f"{served.url}/mcp", mode=mode) as client:
        asking = asyncio.create_task(client.call_tool("ask", {"question": BARKS}))
        await asyncio.to_thread(wait_for, lambda: served.service.slots.in_use == 1)
        served.service.stop()
        assert "shutting down" in said(await client.call_tool("search", {"query": BARKS}))
        served.service.cancel_all()
        assert "shutting down" in said(await asking)


async def test_a_question_is_told_when_its_time_is_up(serve):
    async with Client(f"{serve(timeout_s=0.2).url}/mcp") as client:
        assert "no answer within 0.2 s" in said(await client.call_tool("ask", {"question": BARKS}))


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_hangs_up_ends_its_question(served, kb, monkeypatch, mode):
    ended = []

    async def watched(*args, **options):
        try:
            ended.append(await type(kb).aask(kb, *args, **options))
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def ask():
        async with Client(f"{served.url}/mcp", mode=mode) as client:
            await client.call_tool("ask", {"question": BARKS})

    monkeypatch.setattr(served.service.kb, "aask", watched)
    asking = asyncio.create_task(ask())
    await asyncio.to_thread(wait_for, lambda: served.service.slots.in_use == 1)
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.to_thread(wait_for, lambda: ended)
    assert ended == ["cancelled"]
    assert served.chat("Who?", max_tokens=1).status_code == 200


@pytest.mark.slow
async def test_the_command_over_standard_streams(tmp_path, mini_kb):
    kept = ("PATH", "PYTHONPATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    command = ["-m", "ragcache", "mcp", "--store", str(tmp_path / "kb"), "--k", "1", "--max-tokens", "4"]
    async with Client(stdio_client(StdioServerParameters(command=sys.executable, args=command, env=env))) as client:
        await client.call_tool("add", {"documents": [{"id": "hat", "text": "Jonas Lansen wears a green hat."}]})
        answer = await client.call_tool("ask", {"question": "What does Jonas Lansen wear?"})
        assert [one["document_id"] for one in answer.structured_content["sources"]] == ["hat"]
        assert "ask something" in said(await client.call_tool("ask", {"question": " "}))
