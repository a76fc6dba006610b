"""Functions in C++, compiled on the machine that runs them when they are first used, and kept.

    $XDG_CACHE_HOME/ragcache/native/attention-1f2e3d4c5b6a7988.so

The file's name holds a digest of the source, of PyTorch's version and of the compiler's command. If a source cannot be
compiled (no compiler, no directory to write to), callers compute the same by PyTorch's operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ragcache.files import atomic_write, cache_home
from ragcache.lazy_torch import torch

COMPILE_S = 120  # a compiler that takes longer is ended; a few seconds are usual
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_logger = logging.getLogger(__name__)


@cache
def load(name: str, *flags: str) -> ctypes.CDLL | None:
    """Return the library of the source `name`.cpp, compiled if no earlier process has compiled it.

    The result is kept: later calls with the same arguments return it at once, also after a failure.

    flags: further flags for the compiler, which is $CXX or else c++; they name the processor's instructions that the
           source needs

    Returns None, and logs the reason at level INFO, if the source cannot be compiled or the library cannot be loaded.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    torch_root = Path(torch.__file__).parent
    libraries = torch_root / "lib"
    command = [os.environ.get("CXX") or "c++", *_FLAGS, *flags, str(source), f"-I{torch_root / 'include'}"]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    about = " ".join([torch.__version__, *command]).encode()
    try:
        digest = hashlib.sha256(source.read_bytes() + about).hexdigest()[:16]
        library = cache_home() / "native" / f"{name}-{digest}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as folder, atomic_write(library) as file:
                made = Path(folder) / library.name
                subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, timeout=COMPILE_S)
                file.write(made.read_bytes())
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        _logger.info("%s is computed by PyTorch: %s", name, said.decode(errors="replace").strip()[:500])
        return None
