"""What a process has allocated, which says more of a leak than its size: an allocator keeps what was freed."""

from __future__ import annotations

import ctypes


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h), over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_bytes() -> int | None:
    """Return the bytes that this process has from malloc and has not freed.

    Returns None if the C library does not report them (it is not glibc 2.33 or newer). Python's own small objects are
    in Python's arenas and are not counted.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo2.restype = _MallInfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)
