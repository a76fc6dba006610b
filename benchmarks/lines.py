"""A journal of figures: each is on disk before the next is measured, so that a run that was killed goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigError, translate_os_errors


class Lines:
    """Figures by key, one JSON line each; the first line holds the settings that all of them depend on.

    A line that a kill cut short is measured again. Raises ConfigError for a journal of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[str, Any] = {}
        stated = json.loads(json.dumps(settings))
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if whole and whole[0] != stated:
            raise ConfigError(
                f"{path} holds figures of other settings ({whole[0]}); name another --journal, or delete it"
            )
        self.done = {one["key"]: one["value"] for one in whole[1:]}
        path.parent.mkdir(parents=True, exist_ok=True)
        with translate_os_errors(path), path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in [stated, *whole[1:]])

    def add(self, key: str, value: Any) -> None:
        with translate_os_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "value": value}) + "\n")
        self.done[key] = value
