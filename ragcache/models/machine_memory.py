"""How much memory there is."""

from __future__ import annotations

import os


def machine_bytes() -> int | None:
    """Memory of the machine; None where the system does not say."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
