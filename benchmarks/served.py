"""`ragcache serve` in a process of its own, for benchmarks that ask over HTTP."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

from ragcache.errors import ConfigError


class ServedStore:
    """A server over the store in `folder`, which is made unless it is there. It is ready to answer.

    log:   the server's standard error
    url:   its address, on loopback
    model: the name under which requests ask for its model
    """

    def __init__(self, folder: Path, *options: str, key: str = "", **environment: str) -> None:
        """Start the server. key: an API key, if the environment sets some

        Raises ConfigError with the end of the log if the server does not start.
        """
        self.log = folder / "log"
        command = [sys.executable, "-m", "ragcache", "serve", "--store", str(folder / "kb"), "--port", "0", *options]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        said = re.search(r"http://\S+?:\d+", (self.process.stdout or io.BytesIO()).readline().decode())
        if said is None:
            raise ConfigError(f"the server does not start: {self.log.read_text()[-500:]}")
        self.url = said[0]
        self.http = httpx.Client(base_url=self.url, timeout=600, trust_env=False)
        while self.http.get("/readyz").status_code != 200:
            time.sleep(0.1)
        self.model = self.http.get("/v1/models", headers=bearer(key) if key else None).json()["data"][0]["id"]

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.communicate(timeout=60)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
