"""Ingestion on a Ray cluster: actors read, cut, embed and encode; the process that ingests commits, in order.

    sources -> batches of files -> actors: read, cut                -> here: which documents are new
                                -> actors: embed, encode -> KV tier -> here: text, vectors, keys -> one SQL transaction

It uses plain actors, not Ray Data: between reading and computing this process compares every document with the store,
and most of a repeated ingestion ends there. The actors write blocks to the store's KV themselves, and nothing else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Self

from ragcache.errors import ClusterError, ConfigError, IngestError, RagCacheError, check_least
from ragcache.ingest.document import Document
from ragcache.ingest.report import IngestReport
from ragcache.ingest.worker import EncodeJob, Record, Say, Source, T, Vectors, Work, Worker
from ragcache.models.deadline import LIMIT, POLL_S
from ragcache.models.language_model import LanguageModel
from ragcache.store.kv_store import KVStore
from ragcache_ray.actor import Actor, Computed, Item, ReadRecords, Setup

# Seconds within which a cluster has to answer, and for which an actor may wait for a node with room.
ANSWER_S = 60.0
START_S = 300.0
# Files in a batch, which a single actor reads, and windows of documents that an actor has: one at work, one waiting.
BATCH_FILES = 16
WINDOWS = 2
# Number of times that a dead actor is restarted and repeats its work.
RETRIES = 3
# Object store of a local Ray: text and vectors pass through it.
OBJECT_BYTES = 512 << 20
_PROBE = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False); ray.shutdown()"


@dataclass(frozen=True)
class RayConfig:
    """Configuration of Ray.

    address: of a running cluster's head, HOST:PORT; "auto": the cluster that this machine is part of; None: a local
             Ray, which is started for the ingestion. A program that is already connected to Ray uses that connection
    actors:  number of actors, each of which loads the model and the embedder; None: as many as there are free CPUs, or
             GPUs if the model runs on GPUs
    """

    address: str | None = None
    actors: int | None = None

    def __post_init__(self) -> None:
        host, _, port = (self.address or "").rpartition(":")
        if self.address not in (None, "auto") and not (host and "/" not in host and port.isdigit()):
            raise ConfigError(
                f"ray address {self.address!r} is not HOST:PORT; give the address of the cluster's head (a machine of "
                'the cluster runs the ingestion, no ray:// client), "auto", or none for a local Ray'
            )
        if self.actors is not None:
            check_least("actors", self.actors, 1)

    @classmethod
    def of(cls, given: Self | str | bool | None) -> Self | None:
        """Return the configuration that an option states: a local Ray for True, an address for a text, else None."""
        if isinstance(given, cls | None):
            return given
        return cls(given) if isinstance(given, str) else cls() if given else None

    def workers(self, open_kv: Callable[[], KVStore]) -> Cluster:
        """Return the cluster's actors. open_kv: opens the store's KV in an actor; it is pickled"""
        return Cluster(self, open_kv)


class Cluster:
    """A Ray cluster for ingestions. Each ingestion connects to it and disconnects at its end."""

    def __init__(self, config: RayConfig, open_kv: Callable[[], KVStore]) -> None:
        """Make a cluster, without connecting to it. open_kv: opens the store's KV in an actor; it is pickled"""
        self.config = config
        self._open_kv = open_kv

    @contextmanager
    def work(self, worker: Worker) -> Iterator[Callable[[IngestReport, Say], Work]]:
        """Yield a function that starts work on actors which have loaded the worker's parts. Raises ClusterError,
        ConfigError, and the errors of loading.
        """
        lm = worker.block_keys.encoder.lm
        if not isinstance(lm, LanguageModel):
            raise ConfigError(f"{lm.name} runs inside another engine, which no cluster has; leave ray out")
        ray = _import_ray()
        setup = _pickled(ray, self._setup(worker, lm))
        with _connected(ray, self.config.address):
            actors: list[Any] = []
            try:
                self._start(ray, setup, lm.device.type != "cpu", actors)
                yield partial(_WorkThere, ray, actors, worker)
            finally:
                for actor in actors:
                    ray.kill(actor)

    def _setup(self, worker: Worker, lm: LanguageModel) -> Setup:
        encoder = worker.block_keys.encoder
        return Setup(
            folder=str(Path.cwd()),
            model=lm.name,
            dtype=str(lm.dtype).removeprefix("torch."),
            device=str(lm.device),
            fingerprint=lm.fingerprint,
            recipe=encoder.recipe,
            prefix_ids=encoder.prefix_ids,
            salt=encoder.salt,
            embedder=worker.embedder,
            chunker=worker.chunker,
            open_kv=self._open_kv,
            limits=worker.reader.limits,
            batch_tokens=worker.batch_tokens,
        )

    def _start(self, ray: ModuleType, setup: bytes, on_gpu: bool, actors: list[Any]) -> None:
        import ragcache

        free = ray.available_resources() or ray.cluster_resources()
        count = self.config.actors or max(1, int(free.get("GPU" if on_gpu else "CPU", 0)))
        remote = ray.remote(
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
            concurrency_groups={"read": 1, "compute": 1},
        )(Actor)
        actors += [remote.remote(setup) for _ in range(count)]
        until = time.monotonic() + START_S
        for version in [_get(ray, reference, until) for reference in [actor.version.remote() for actor in actors]]:
            if version != ragcache.__version__:
                raise ClusterError(
                    f"the cluster has ragcache {version}, and this is {ragcache.__version__}; install the same version "
                    "on every node"
                )
        for loaded in [actor.load.remote() for actor in actors]:
            _get(ray, loaded)


class _Begun(NamedTuple):
    """A job that was given to an actor."""

    what: Any
    job: EncodeJob
    computed: Any


class _WorkThere:
    """The work of an ingestion on actors. A block that is being computed for an earlier window is not computed again:
    it is stored before the later window is committed.
    """

    def __init__(self, ray: ModuleType, actors: Sequence[Any], worker: Worker, report: IngestReport, say: Say) -> None:
        self._ray, self._actors, self._worker, self._report, self._say = ray, actors, worker, report, say
        self._begun: deque[_Begun] = deque()

    @property
    def is_ahead(self) -> bool:
        return bool(self._begun)

    # Reading

    def read(self, sources: Sequence[Source], known: Callable[[Source], frozenset[str]]) -> Iterator[Iterator[Record]]:
        items = (self._item(source, known(source)) for source in sources)
        records = self._in_order(iter(lambda: list(islice(items, BATCH_FILES)), []))
        ahead = next(records, None)

        def of_source(rank: int, source: Source) -> Iterator[Record]:
            nonlocal ahead
            if isinstance(source, Document):
                yield Record(source, ahead[1].cut if ahead and ahead[0] == rank else None)
            while ahead is not None and ahead[0] == rank:
                if not isinstance(source, Document):
                    yield ahead[1]
                ahead = next(records, None)

        for rank, source in enumerate(sources):
            yield of_source(rank, source)

    def _item(self, source: Source, known: frozenset[str]) -> Item:
        """Return the item for a source. A document that was given is sent without its metadata: this process keeps
        them, and they need not be JSON.
        """
        if not isinstance(source, Document):
            return Item(source, known)
        try:
            self._worker.check(source)
        except IngestError:  # the run reports it
            return Item(None, known)
        if source.content_hash(self._worker.chunker.settings) in known:
            return Item(None, known)
        return Item(Document(source.id, source.text, source=source.source, places=source.places), frozenset())

    def _in_order(self, batches: Iterator[list[Item]]) -> Iterator[tuple[int, Record]]:
        """Yield the records of all batches with the indices of their items. Every actor reads ahead in one batch."""
        numbered = enumerate(batches)
        reading = deque(map(partial(self._begin, numbered), self._actors))
        while (batch := reading.popleft()) is not None:
            yield from batch.records()
            reading.append(self._begin(numbered, batch.actor))

    def _begin(self, numbered: Iterator[tuple[int, list[Item]]], actor: Any) -> _Batch | None:
        number, items = next(numbered, (0, None))
        return None if items is None else _Batch(self._ray, actor, number, items, self._report)

    # Computing

    def compute(self, jobs: Iterable[tuple[T, EncodeJob]]) -> Iterator[tuple[T, list[Vectors]]]:
        for number, (what, job) in enumerate(jobs):
            while self._is_full() or self._has_computed():
                yield self._finish()
            compute = self._actors[number % len(self._actors)].compute.options(concurrency_group="compute")
            self._begun.append(_Begun(what, job, compute.remote(self._left_over(job))))
        while self._begun:
            yield self._finish()

    def _is_full(self) -> bool:
        return len(self._begun) >= WINDOWS * len(self._actors)

    def _has_computed(self) -> bool:
        return bool(self._begun) and bool(self._ray.wait([self._begun[0].computed], timeout=0)[0])

    def _left_over(self, job: EncodeJob) -> EncodeJob:
        """Return the job without the blocks that earlier jobs compute, which are reported as reused."""
        begun = {key for one in self._begun for key in one.job.wanted}
        left = {key: ids for key, ids in job.wanted.items() if key not in begun}
        self._report.reused_blocks += len(job.wanted) - len(left)
        self._say("skip", sum(map(len, job.wanted.values())) - sum(map(len, left.values())))
        return EncodeJob(job.texts, left)

    def _finish(self) -> tuple[Any, list[Vectors]]:
        computed: Computed = _get(self._ray, self._begun[0].computed)
        what, job, _ = self._begun.popleft()
        kv = self._worker.kv
        absent = next((key for key in islice(job.wanted, 1) if not kv.lookup([key], "durable")), None)
        if absent is not None and not kv.gives_up:
            raise ClusterError(
                f"block {absent}, which an actor stored, is not in the store that this machine sees; the actors must "
                "reach the same store: put it on a file system that all nodes share"
            )
        own, other = self._report, computed.report
        own.computed_tokens += other.computed_tokens
        own.reused_blocks += other.reused_blocks
        own.kv_bytes += other.kv_bytes
        own.seconds.add(other.seconds)
        for stage, step in computed.said:
            self._say(stage, step)
        return what, computed.vectors


class _Batch:
    """Files that an actor reads, in parts: the next part is being read while the current part is used."""

    def __init__(self, ray: ModuleType, actor: Any, number: int, items: list[Item], report: IngestReport) -> None:
        self.actor = actor
        self._ray, self._number, self._report = ray, number, report
        self._items = ray.put(items)
        self._part = self._ask(0)

    def records(self) -> Iterator[tuple[int, Record]]:
        sent, is_last = 0, False
        while not is_last:
            part: ReadRecords = _get(self._ray, self._part)
            self._report.seconds.add(part.seconds)
            sent, is_last = sent + len(part.records), part.is_last
            if not is_last:
                self._part = self._ask(sent)
            for rank, record in part.records:
                yield self._number * BATCH_FILES + rank, record

    def _ask(self, start: int) -> Any:
        return self.actor.read.options(concurrency_group="read").remote(self._number, self._items, start)


def _get(ray: ModuleType, reference: Any, until: float | None = None) -> Any:
    """Return an actor's result. Raises the actor's own error, ClusterError if the actor is lost or there is no result
    at the time `until`, and CancelledError and TimedOutError by LIMIT.
    """
    while not ray.wait([reference], timeout=POLL_S)[0]:
        LIMIT.get().check()
        if until is not None and time.monotonic() > until:
            raise ClusterError(
                f"no node had room for an actor within {START_S:g} s; ask for fewer (--ray-actors, RayConfig.actors), "
                "or wait until the cluster has a free CPU (or GPU) for each"
            )
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ClusterError(_lost(str(error))) from error


def _lost(text: str) -> str:
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if "No module named" in text or "failed to import" in text:
        import ragcache

        return (
            f"the cluster's nodes cannot import what an actor needs ({last}); install ragcache-kv "
            f"{ragcache.__version__} and the models' packages on every node"
        )
    return (
        f"an actor died {RETRIES + 1} times over the same work ({last}); see Ray's logs, give it more memory or fewer "
        "actors a node (--ray-actors), and run again: it goes on from what is stored"
    )


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f'ingestion on a cluster needs Ray ({error}); run: pip install "ragcache-kv[ray]"') from error
    return ray  # type: ignore[no-any-return]


def _pickled(ray: ModuleType, setup: Setup) -> bytes:
    try:
        return bytes(ray.cloudpickle.dumps(setup))
    except RagCacheError:
        raise
    except Exception as error:  # pickle raises errors of any kind
        raise ConfigError(
            f"the embedder or the chunker cannot be sent to Ray's actors ({error}); give an embedder by its name, or "
            "one that can be pickled"
        ) from error


@contextmanager
def _connected(ray: ModuleType, address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_BYTES, **quiet)
        else:
            _probe(address)
            ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterError(f"{address or 'a local Ray'} cannot be used: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Raise ClusterError if no Ray answers. Another process tries to connect, because Ray itself waits without end
    and cannot be interrupted.
    """
    hint = "start one there (`ray start --head`), run this on one of its machines, or give no address for a local Ray"
    host, _, port = address.rpartition(":")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S / 6).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"{address}: no Ray cluster answers ({error}); {hint}") from error
    asking = subprocess.Popen([sys.executable, "-c", _PROBE, address], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + ANSWER_S
    try:
        while True:
            try:
                said, _ = asking.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                LIMIT.get().check()
                if time.monotonic() > until:
                    raise ClusterError(f"{address}: no Ray cluster answers within {ANSWER_S:g} s; {hint}") from None
    finally:
        asking.kill()
        asking.communicate()
    if asking.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise ClusterError(f"{address}: no Ray cluster to work on ({''.join(lines[-1:])}); {hint}")
