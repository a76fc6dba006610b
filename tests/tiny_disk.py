"""A file system of a few hundred kilobytes, to fill up or to turn read-only, in a child's mount namespace."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import forked
import pytest

# What `unshare -rm` does, in a process that has imported the libraries. The mount vanishes with its namespace.
MOUNT = """
import ctypes, os, subprocess, sys
from pathlib import Path
import pytest
from blocks import make_block, make_key, same
numbers = {"uid_map": os.getuid(), "gid_map": os.getgid()}
assert ctypes.CDLL(None).unshare(0x10020000) == 0, "no new user and mount namespaces"
Path("/proc/self/setgroups").write_text("deny")
for name, number in numbers.items():
    Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv.pop()}", "tmpfs", sys.argv[1]], check=True)
disk = Path(sys.argv[1])
def turn_read_only():
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
"""


@cache
def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_on_tiny_disk(directory: Path, script: str, size: str = "400k") -> None:
    """Run a Python script in which `disk` is a fresh file system of the given size. Skips where none can be made."""
    if not can_mount():
        pytest.skip("no mount namespaces here (unshare -rm)")
    result = forked.run(f"{MOUNT}{script}\nprint('done')", directory, size)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n"), result.stdout
