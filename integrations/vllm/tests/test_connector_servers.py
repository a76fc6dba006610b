"""Two vLLM servers, each on a machine with a store of its own, over a shared database and a shared remote (Redis)."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import ragcache as rc
from ragcache.seal import VARIABLE
from ragcache_demo.bag_of_words import BagOfWords

pytest.importorskip("vllm", reason="runs in vLLM's own environment")

from served import EXAMPLES, QUESTIONS, Server, started, wait_until_up

from integrations.remote.tests.remotes import redis_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
EMBEDDER = BagOfWords()


class Fleet(NamedTuple):
    """machines: the store of each; expected: by question, the embedded engine's answer"""

    machines: list[Path]
    servers: list[Server]
    database: str
    expected: dict[str, str]

    def front(self, machine: int) -> rc.RagCache:
        url, config = self.servers[machine].url, rc.StoreConfig(database=self.database)
        return rc.RagCache.open(
            self.machines[machine], engine=url, method="reposition", embedder=EMBEDDER, store=config
        )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    database, machines = f"sqlite:///{root / 'shared.sqlite3'}", [root / "a", root / "b"]
    config = rc.StoreConfig(database=database, remote=f"{redis_server()}/0/fleet")
    files = sorted((EXAMPLES / "corpus").iterdir())
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(VARIABLE, "5e" * 32)  # machines that share a remote share the key
        for number, machine in enumerate(machines):  # each computes every other document
            with rc.RagCache.open(machine, model="mini", embedder=EMBEDDER, store=config) as kb:
                assert not kb.ingest(files[number::2]).failed
        with rc.RagCache.open(machines[0], method="reposition", embedder=EMBEDDER, store=config) as kb:
            expected = {question: kb.ask(question, k=4).text for question in QUESTIONS[::4]}
        logs = [root / f"{number}.txt" for number in range(2)]
        servers = [
            stack.enter_context(started(machine, log, database=database))
            for machine, log in zip(machines, logs, strict=True)
        ]
        for server, log in zip(servers, logs, strict=True):
            wait_until_up(server, log)
        yield Fleet(machines, servers, database, expected)


@pytest.mark.parametrize("number", [0, 1])
def test_what_either_machine_has_computed_is_found_by_both(fleet, number):
    with fleet.front(number) as front:
        for question in list(fleet.expected)[::2]:
            answer = front.ask(question, k=4)
            assert answer.text == fleet.expected[question], question
            assert answer.usage.cached_tokens > answer.usage.prompt_tokens / 2
            assert "computed" not in {hit.kv for hit in answer.hits}
