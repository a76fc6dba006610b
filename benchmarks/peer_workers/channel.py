"""Protocol of every peer: a JSON object per line, requests over stdin, replies over stdout. Standard library only.

The first line is the configuration; the worker replies with its versions and settings when it is ready. Times are taken
in the worker's process, from the prompt's token ids to the answer's token id on the host.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids: passages in order, then everything after them."""

    passages: Sequence[Sequence[int]]
    suffix: Sequence[int]

    @property
    def ids(self) -> list[int]:
        return [*(id for passage in self.passages for id in passage), *self.suffix]


@dataclass(frozen=True)
class Answer:
    """An answer of a worker.

    first_s, total_s: seconds from the request to the first token and to the end, which includes keeping the KV
    ids:    the answer's tokens, greedily chosen
    reused: tokens of the prompt whose KV already existed
    """

    first_s: float
    total_s: float
    ids: list[int]
    reused: int


class Worker(Protocol):
    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return the versions and settings of the running peer."""

    def read(self, passages: Sequence[Sequence[int]]) -> None:
        """Read each passage alone, ahead of all questions; a peer that cannot do so does nothing."""

    @abstractmethod
    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        """Answer prompts that arrive `at` seconds from now, by `tokens` tokens. Seconds count from their arrival.

        Slow peers (`PeerSpec.slow`) get prompts that all arrive now and want the same number of tokens.
        """


def ask_by(
    answer: Callable[[Prompt, int, float], Answer],
    prompts: Sequence[Prompt],
    tokens: Sequence[int],
    at: Sequence[float],
    threads: int,
) -> list[Answer]:
    """Call `answer` on prompt, tokens and time of arrival when each prompt arrives, with at most this many threads."""
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as askers:
        answers = []
        for prompt, count, due in zip(prompts, tokens, at, strict=True):
            time.sleep(max(0.0, began + due - time.perf_counter()))
            answers.append(askers.submit(answer, prompt, count, began + due))
        return [answer.result() for answer in answers]


def serve(make: Callable[[dict[str, Any]], Worker]) -> None:
    """Answer requests until stdin ends, and exit with status 1 after an error. Output of libraries goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        try:
            worker = make(json.loads(sys.stdin.readline()))
            _send(replies, worker.about())
            for line in sys.stdin:
                _send(replies, _handle(worker, json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            _send(replies, {"error": f"{type(error).__name__}: {error}"[:500]})
            raise SystemExit(1) from error


def _handle(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    gc.collect()  # before the time is taken
    if request["do"] == "read":
        started = time.perf_counter()
        worker.read(request["passages"])
        return {"seconds": time.perf_counter() - started}
    prompts = [Prompt(one["passages"], one["suffix"]) for one in request["prompts"]]
    answers = worker.ask(request["variant"], prompts, request["tokens"], request["at"])
    return {"answers": [vars(answer) for answer in answers]}


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
