"""The size of the machine's memory."""

from __future__ import annotations

import os


def machine_bytes() -> int | None:
    """Return the size of the machine's memory in bytes; None if the system does not report it."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
