"""Log a repeated problem once, not for every block."""

from __future__ import annotations

import logging


class WarnOnce:
    """A logger that logs the first error of each type as a warning, and its repetitions at level DEBUG.

    After `worked`, the next error of a type is the first again.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: set[type[BaseException]] = set()

    def failed(self, name: str, error: BaseException) -> None:
        level = logging.DEBUG if type(error) in self._known else logging.WARNING
        self._known.add(type(error))
        self._log.log(level, "%s: %s: %s", name, type(error).__name__, error)

    def worked(self) -> None:
        self._known.clear()
