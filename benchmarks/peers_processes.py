"""Processes of peers, each in a separate environment; a peer answers a request at a time (peer_workers/channel.py)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.peer_workers.channel import Answer
from ragcache.errors import RagCacheError

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 900.0  # vLLM compiles at its first start
ASK_TIMEOUT_S = 600.0
LOG_LINES = 40


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings that benchmarks over peers share.

    kv_mib: size of each peer's cache; environments: the directory that scripts/peers-environment made
    """

    kv_mib: int = 2048
    threads: int = 2
    seed: int = 0
    environments: Path = ROOT / ".peers"

    def config(self, model: Path, dtype: str, longest: int, askers: int) -> dict[str, Any]:
        """Return a worker's configuration. longest: tokens of the longest prompt with its answer"""
        return {
            "model": str(model),
            "dtype": dtype,
            "threads": self.threads,
            "kv_bytes": self.kv_mib << 20,
            "max_tokens": -(-longest // 256) * 256,
            "askers": askers,
        }


class PeerError(RagCacheError):
    """A peer did not start, died, or reported an error."""


@dataclass(frozen=True)
class PeerSpec:
    """A peer.

    module:      module in benchmarks.peer_workers
    environment: name of its environment's directory; None: the Python that runs this
    variants:    the variants to run, first the variant that others are compared with
    title:       name in the tables; "": `name`
    slow:        whether it is asked only a few questions, and none at the times of a log
    """

    name: str
    module: str
    environment: str | None
    variants: tuple[str, ...] = ("",)
    title: str = ""
    slow: bool = False

    def labels(self) -> dict[str, str]:
        """Return the names of the rows, by variant."""
        return {variant: f"{self.title or self.name} {variant}".strip() for variant in self.variants}


PEERS = {
    spec.name: spec
    for spec in (
        PeerSpec("ragcache", "ragcache_worker", None, ("reposition", "link", "full")),
        PeerSpec("transformers", "transformers_worker", None, slow=True),
        PeerSpec("vllm", "vllm_worker", "vllm"),
        PeerSpec("ragcache-vllm", "ragcache_vllm_worker", "vllm", ("reposition",), "ragcache in vLLM,"),
        PeerSpec("llamacpp", "llamacpp_worker", "llamacpp", slow=True),
    )
}


def python_of(spec: PeerSpec, environments: Path) -> Path:
    """Return the environment's Python. Raises PeerError if the environment is missing."""
    if spec.environment is None:
        return Path(sys.executable)
    python = environments / spec.environment / "bin" / "python"
    if not (environments / spec.environment / "ready").is_file() or not python.exists():
        raise PeerError(
            f"its environment was not made (scripts/peers-environment makes it; looked for {spec.environment!r} in the "
            "directory of environments)"
        )
    return python


class PeerProcess:
    """A peer's process, which answers requests in turn. Its files, and its stderr as log.txt, go to `directory`.
    Methods raise PeerError if it fails.

    Between requests the peer is stopped (SIGSTOP), with the processes that it started: a peer that waits by spinning
    would take time from the next peer. It has a separate process group in this session, so that the kernel ends it,
    stopped or not, if this process is killed.
    """

    def __init__(self, spec: PeerSpec, environments: Path, config: dict[str, Any], directory: Path) -> None:
        self.spec = spec
        directory.mkdir(exist_ok=True)
        self._log = directory / "log.txt"
        python = python_of(spec, environments)
        command = [str(python), "-m", f"benchmarks.peer_workers.{spec.module}"]
        with self._log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_variables(config["threads"], environments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,
            )
        self._buffer = b""
        self.about = self._request({**config, "directory": str(directory)}, START_TIMEOUT_S)

    def read(self, passages: Sequence[Sequence[int]]) -> float:
        """Return the seconds that the peer took to prepare passages."""
        return float(self._request({"do": "read", "passages": passages}, ASK_TIMEOUT_S)["seconds"])

    def ask(self, variant: str, prompts: Sequence[dict[str, Any]], tokens: int) -> list[Answer]:
        return self.replay(variant, prompts, [tokens] * len(prompts), [0.0] * len(prompts))

    def replay(
        self, variant: str, prompts: Sequence[dict[str, Any]], tokens: Sequence[int], at: Sequence[float]
    ) -> list[Answer]:
        """Send the prompts `at` seconds from now, and return the answers; their seconds count from that time."""
        request = {"do": "ask", "variant": variant, "prompts": prompts, "tokens": tokens, "at": at}
        return [Answer(**answer) for answer in self._request(request, at[-1] + ASK_TIMEOUT_S)["answers"]]

    def peak_bytes(self) -> int:
        """Return the most memory that the process has held so far (Linux)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it never read a request
                self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("it ended") from None
        reply: dict[str, Any] = json.loads(self._line(timeout_s))
        if "error" in reply:
            raise self._failure(str(reply["error"]))
        self._signal(signal.SIGSTOP)
        return reply

    def _signal(self, which: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, which)

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not ready.select(timeout_s):
                    self._signal(signal.SIGKILL)
                    raise self._failure(f"it said nothing for {timeout_s:.0f} s")
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    raise self._failure("it ended")
                self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _failure(self, why: str) -> PeerError:
        """End the process, print its last output to stderr, and return the error to raise."""
        self.close()
        lines = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
        return PeerError(why)


def _variables(threads: int, environments: Path) -> dict[str, str]:
    """Return the environment: threads for each library's own pool, no outside look-ups, vLLM's compiled code kept."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(environments / "vllm-cache"),
        # vLLM's clock goes on while it is stopped, and a slow peer may take this long to answer eight askers.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(8 * int(ASK_TIMEOUT_S)),
    }
