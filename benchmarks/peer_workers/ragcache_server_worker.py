"""`ragcache serve` as a user runs it, over HTTP. Compared with `ragcache_worker`, it shows the cost of the server.

Every token id becomes a word that the tokenizer reads as this id, so that prompts are as long as those of the other
peers. A request has its passages in the field `documents`, and everything else as the user's message. Seconds count
from the request to the first piece of the answer and to the last, as the client receives them.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ragcache as rc
from benchmarks.peer_workers.channel import Answer, Prompt, Worker, ask_by, serve

MOST_AT_ONCE = 64
MOST_DOCUMENTS = 8
"""Passages in a request that only reads passages: as many as a question has, so that no context is too long."""
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


class RagCacheServerWorker(Worker):
    """A worker whose variants are names of methods."""

    def __init__(self, config: dict[str, Any]) -> None:
        folder = Path(config["directory"])
        model = with_words(Path(config["model"]), folder / "model")
        options = {
            "--model": str(model),
            "--dtype": config["dtype"],
            "--recipe": "isolated",
            "--learn": "off",
            "--memory": str(config["kv_bytes"]),
            "--prefix-memory": str(config["kv_bytes"]),
            "--slots": str(config["askers"]),
            "--queue": str(MOST_AT_ONCE),
            "--system": "",
        }
        self._http = served(folder, [one for pair in options.items() for one in pair])
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]
        self._threads = config["threads"]

    def about(self) -> dict[str, Any]:
        return {"versions": {"ragcache": rc.__version__}, "settings": {"threads": self._threads, "over": "HTTP"}}

    def read(self, passages: Sequence[Sequence[int]]) -> None:
        for start in range(0, len(passages), MOST_DOCUMENTS):
            self._answer("reposition", Prompt(passages[start : start + MOST_DOCUMENTS], [0]), 1, time.perf_counter())

    def ask(self, variant: str, prompts: Sequence[Prompt], tokens: Sequence[int], at: Sequence[float]) -> list[Answer]:
        return ask_by(partial(self._answer, variant), prompts, tokens, at, MOST_AT_ONCE)

    def _answer(self, variant: str, prompt: Prompt, tokens: int, started: float) -> Answer:
        first_s, ids, found = 0.0, list[int](), 0
        for chunk in self._stream(variant, prompt, tokens):
            text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if text and not ids:
                first_s = time.perf_counter() - started
            ids += [int(word[1:]) for word in text.split()]
            found = chunk.get("ragcache", {}).get("avoided_tokens", found)
        return Answer(first_s, time.perf_counter() - started, ids, found)

    def _stream(self, variant: str, prompt: Prompt, tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer. Raises RuntimeError for a refused request, or an error in the stream."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": words(prompt.suffix)}],
            "max_tokens": tokens,
            "stream": True,
            "ragcache": {"method": variant, "documents": [{"text": words(one)} for one in prompt.passages]},
        }
        with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.is_error:
                reply.read()
                raise RuntimeError(f"{reply.status_code}: {reply.text[:300]}")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(str(chunk["error"]))
                    yield chunk


def served(folder: Path, options: Sequence[str]) -> httpx.Client:
    """Start `ragcache serve` over a new store in `folder`, and return a client once it is ready.

    The server ends with this process. Raises RuntimeError with the end of its log if it does not start.
    """
    log = folder / "log"
    command = [sys.executable, "-m", "ragcache", "serve", "--store", str(folder / "kb"), "--port", "0", *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    atexit.register(process.communicate, timeout=60)
    atexit.register(process.terminate)  # is called before `communicate`, which waits for the end
    said = re.search(r"http://\S+?:\d+", process.stdout.readline() if process.stdout else "")
    if said is None:
        raise RuntimeError(f"the server does not start: {log.read_text()[-500:]}")
    http = httpx.Client(base_url=said[0], timeout=600, trust_env=False)
    while http.get("/readyz").status_code != 200:
        time.sleep(0.1)
    return http


def words(ids: Sequence[int]) -> str:
    """Return a text that the tokenizer of `with_words` reads as these ids."""
    return " ".join(f"w{id}" for id in ids)


def with_words(model: Path, directory: Path) -> Path:
    """Return a directory with the model's weights, by links, and a tokenizer with a word for every id."""
    directory.mkdir()
    for file in model.iterdir():
        if not file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            (directory / file.name).symlink_to(file.absolute())
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    backend = Tokenizer(models.WordLevel({f"w{id}": id for id in range(vocab_size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", chat_template=TEMPLATE)
    tokenizer.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    serve(RagCacheServerWorker)
