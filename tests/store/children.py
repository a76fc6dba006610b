"""What the children of the kill tests do until they are killed.

`main` is their parent: it forks a child for each line on its standard input (JOB ARGUMENT...), says "pid N", and when
the child has ended "exit STATUS".
"""

import itertools
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
from blocks import make_block, make_key

from ragcache.store.documents import DocumentStore
from ragcache.store.kv_store import KVStore
from ragcache.store.records import NewChunk, NewDocument
from ragcache.store.remote import open_blobs
from ragcache.store.remote.connection import Connection

NUM_KEYS = 40
NUM_DOCUMENTS = 7


def say(line: object) -> None:
    """One line on standard output, at once and in one piece: what was committed."""
    os.write(1, f"{line}\n".encode())


def put_blocks(root: str, start: str) -> None:
    """Put (and sometimes delete) blocks round and round; say each one's number once `put` has returned."""
    with KVStore(Path(root), memory_bytes=0) as store:
        put_round_and_round(store, int(start))


def put_round_and_round(store: KVStore, start: int) -> None:
    say("ready")
    for step in itertools.count(start):
        number = step % NUM_KEYS
        if step % 5 == 4:
            store.delete(make_key(number))
            say(-number - 1)
        else:
            store.put(make_key(number), make_block(number, num_tokens=64))
            say(number)


def put_blocks_remotely(root: str, url: str, start: str) -> None:
    """`put_blocks` of a machine whose blocks are in a remote."""
    with KVStore(Path(root), memory_bytes=0, remote=Connection(open_blobs(url), "tests")) as store:
        put_round_and_round(store, int(start))


def version_of(number: int, version: int) -> tuple[NewDocument, list[NewChunk]]:
    """A document whose text, handles and number of chunks follow from its number and version."""
    document = NewDocument(f"d{number}", content_hash=str(version), metadata={"version": version})
    chunks = [
        NewChunk(
            id=f"d{number}/{version}/{ordinal}",
            text=f"version {version} of document {number}, chunk {ordinal}",
            token_ids=[number, version, ordinal],
            embedding=np.full(8, version, np.float32),
            handle=make_key(number * 100 + (version + ordinal) % 5),
        )
        for ordinal in range(1 + version % 4)
    ]
    return document, chunks


def replace_documents(url: str, start: str) -> None:
    """Replace documents by their next version, round and round; say number, version and vector ids once committed."""
    with DocumentStore.open(url) as store:
        say("ready")
        for version in itertools.count(int(start)):
            for number in range(NUM_DOCUMENTS):
                ids = store.replace_document(*version_of(number, version))
                say(f"{number} {version} {','.join(map(str, ids))}")
            if version % 3 == 2:
                store.delete_documents([f"d{version % NUM_DOCUMENTS}"])
                say(f"{version % NUM_DOCUMENTS} -1 ")


# The clients of remotes, which a job would import anew in each child.
for package in ("obstore.store", "redis"):
    with suppress(ImportError):
        import_module(package)

JOBS = {"put_blocks": put_blocks, "put_blocks_remotely": put_blocks_remotely, "replace_documents": replace_documents}


def fork(job: str, *arguments: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            JOBS[job](*arguments)
        finally:
            os._exit(1)  # jobs do not end
    return pid


def main() -> None:
    for line in sys.stdin:
        pid = fork(*line.split())
        say(f"pid {pid}")
        _, status = os.waitpid(pid, 0)
        say(f"exit {os.waitstatus_to_exitcode(status)}")
