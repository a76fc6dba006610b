"""Threads of the operating system, counted in a process that may use four: Python starts some, OpenMP the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HEAD = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
torch.set_num_threads(4)
from ragcache import runtime

def large():
    torch.zeros(1 << 20).add_(1)

def teams():
    "The fewest threads besides Python's for a moment: one that has ended is listed until the system has cleaned up."
    found = []
    for _ in range(40):
        found.append(len(os.listdir("/proc/self/task")) - threading.active_count() - more)
        if found[-1] <= 0:
            break  # there are no fewer
        time.sleep(0.005)
    return min(found)

more = 0
large()
runtime.end_team()
more = teams()  # of other libraries

def in_thread(*steps):
    "What `teams` is while a thread that has done these things lives."
    with ThreadPoolExecutor(1) as pool:
        for step in steps:
            pool.submit(step).result()
        return teams()
"""


def run(script: str, *arguments: str) -> list[int]:
    """The numbers that a script prints."""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("threads are counted in /proc, which Linux has")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-W", "error", "-c", HEAD + script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


def test_a_thread_has_a_team_until_it_ends_it_or_none_and_the_number_of_threads_is_what_it_was() -> None:
    script = """
print(in_thread(large), in_thread(large, runtime.end_team), in_thread(runtime.work_alone, large), teams())
def within():
    with runtime.working_alone():
        large()
print(in_thread(within), in_thread(within, large))

def within():
    with runtime.working_alone():
        print(torch.get_num_threads())
    print(torch.get_num_threads())
in_thread(within, runtime.end_team, within)
torch.set_num_threads(3)
in_thread(within)
"""
    found = run(script)
    assert found[:6] == [3, 0, 0, 0, 0, 3]
    assert found[6:] == [1, 4, 1, 4, 1, 3]


ASKING = """
import tempfile
from pathlib import Path
import ragcache as rc
from ragcache.engine.options import StoreConfig
from ragcache_demo.bag_of_words import BagOfWords
from transformers import GenerationMixin  # what it imports starts threads of its own
more += teams()

if sys.argv[1] == "off":
    runtime._library = lambda: None
texts = {str(n): f"Town {n} has a river. " + "The club meets in the old mill by the bridge. " * 20 for n in range(4)}
config = StoreConfig(codec="int8", memory_bytes=1 << 26, load="always")
with tempfile.TemporaryDirectory() as root:
    def ingest():
        with rc.RagCache.open(root, model="mini", embedder=BagOfWords(), store=config) as kb:
            kb.ingest(rc.Document(id, text) for id, text in texts.items())
    print(in_thread(ingest))
    kb = rc.RagCache.open(root, model="mini", embedder=BagOfWords(), store=config)
    print(teams())
    with ThreadPoolExecutor(3) as askers:
        ask = lambda n: kb.ask(f"What does town {n} have?", k=3, sampling=rc.Sampling(max_tokens=4)).usage.cached_tokens
        cached = list(askers.map(ask, range(6)))
        print(teams())
    print(int(min(cached) > 300))
    kb.close()
"""


@pytest.mark.slow
def test_no_team_outlives_an_answer_an_ingestion_or_loading() -> None:
    """Readers and askers live on. Without `openmp`, each of them keeps three threads."""
    assert run(ASKING, "on") == [0, 0, 0, 1]
    ingested, opened, asked, cached = run(ASKING, "off")
    assert min(ingested, opened, asked) >= 3
    assert cached == 1


WAITING = """
import ragcache as rc
from ragcache.models.attention import observing
from transformers import GenerationMixin
more += teams()
lm = rc.load_lm("mini")
seen = []
runtime._library.cache_clear() if sys.argv[1] == "on" else setattr(runtime, "_library", lambda: None)
large()
with observing(lambda attended: seen.append(teams())):
    lm.run(list(range(10, 40)), 0, lm.new_cache(40))
print(max(seen))
"""


@pytest.mark.slow
def test_a_caller_that_has_computed_has_no_team_while_it_waits_for_the_model() -> None:
    """An embedding model of the application's own would leave it such a team. The model's thread may have one."""
    assert run(WAITING, "on") == [3]
    assert run(WAITING, "off") == [6]
