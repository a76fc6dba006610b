"""Detection of forks. A child process has copies of its parent's objects, but neither their threads nor an OpenMP team.

Locks stay as they were at the fork: a child that waits for a thread or a lock of its parent waits forever.
"""

from __future__ import annotations

import os

from ragcache.errors import ForkedError


class Home:
    """The process in which an object was created.

    event, again: texts for the error, such as "this store was opened" and "open it"
    """

    def __init__(self, event: str, again: str) -> None:
        self._event = event
        self._again = again
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise ForkedError in any other process."""
        if not self.is_here:
            raise ForkedError(
                f"{self._event} in process {self._process} and is used in its fork {os.getpid()}, where the threads "
                f"that work for it do not exist; {self._again} in each worker, after the fork, or start workers by "
                'multiprocessing.get_context("spawn")'
            )
