"""vLLM's server over a store, as `ragcache vllm` starts it. Needs an environment with vLLM and ragcache."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
from vllm_world import QUIET

import ragcache as rc
from integrations.remote.tests.remotes import free_port
from ragcache.cli.flags import StoreOptions
from ragcache_demo.demo_command import load_questions
from ragcache_vllm.merged_adapter import servable
from ragcache_vllm.vllm_command import EngineOptions, server_command

EXAMPLES = Path(__file__).parents[3] / "examples"
QUESTIONS = [entry.text for entry in load_questions(EXAMPLES / "corpus_questions.jsonl")]
START_S = 900.0
# Two processors are enough for nobody: vLLM's threads are not bound to any.
SMALL = ("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "4096")


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving(store: Path, log: Path, more: Sequence[str] = SMALL, **environment: str) -> Iterator[str]:
    """Start vLLM over the store and yield its address once it answers."""
    with started(store, log, more, **environment) as server:
        wait_until_up(server, log)
        yield server.url


@contextmanager
def started(
    store: Path, log: Path, more: Sequence[str] = SMALL, database: str | None = None, **environment: str
) -> Iterator[Server]:
    """Start vLLM over the store."""
    with rc.Store.open(store, store=rc.StoreConfig(database=database)) as library:
        bound = library.store.documents.properties()
        models = library.store.layout.models
    model, checkpoint = servable(str(bound["model_name"]), str(bound["checkpoint"]), models)
    engine = EngineOptions(port=free_port())
    command = server_command(StoreOptions(store=store), engine, {**bound, "checkpoint": checkpoint}, model, more)
    own = {**os.environ, **QUIET, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=own, start_new_session=True) as server,
    ):
        try:
            yield Server(f"vllm://127.0.0.1:{engine.port}", server)
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # the engine's process, too


def wait_until_up(server: Server, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url.replace('vllm', 'http')}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not come up:\n{log.read_text(errors='replace')[-20000:]}")
