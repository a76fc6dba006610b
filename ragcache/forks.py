"""What a fork leaves behind: the child has copies of its parent's objects, but none of the threads that work for them,
locks as they stood, and no team of OpenMP. Whatever waits for one of these there waits for ever."""

from __future__ import annotations

import os

from ragcache.errors import ForkedError


class Home:
    """The process that an object was made in.

    what, again: "this store was opened" and "open it"
    """

    def __init__(self, what: str, again: str) -> None:
        self._what = what
        self._again = again
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        """Raises ForkedError in another process."""
        if not self.is_here:
            raise ForkedError(
                f"{self._what} in process {self._process} and is used in its fork {os.getpid()}, where the threads "
                f"that work for it do not exist; {self._again} in each worker, after the fork, or start workers by "
                'multiprocessing.get_context("spawn")'
            )
