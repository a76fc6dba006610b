"""Objects after a fork: the child has copies of its parent's, but neither their threads nor a team of OpenMP.

Locks are as they were at the fork: a child that waits for a thread or a lock of its parent waits for ever.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ragcache.errors import ForkedError

if TYPE_CHECKING:
    import torch as torch


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
