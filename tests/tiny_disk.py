"""A file system of a few hundred kilobytes, to fill up or to turn read-only, in a child's mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Mounts, runs the script with the mount point as its argument, and leaves the mount to vanish with the namespace.
_MOUNT = 'mount -t tmpfs -o size="$2" tmpfs "$1" && exec "$3" -W error -c "$4" "$1"'


@cache
def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_on_tiny_disk(directory: Path, script: str, size: str = "400k") -> None:
    """Run a Python script whose sys.argv[1] is a fresh file system of the given size. Skips where none can be made."""
    if not can_mount():
        pytest.skip("no mount namespaces here (unshare -rm)")
    command = ["unshare", "-rm", "sh", "-c", _MOUNT, "sh", str(directory), size, sys.executable, script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n"), result.stdout
