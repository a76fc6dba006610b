"""Lets vLLM run its V2 model runner without a GPU: its Triton kernels in Triton's interpreter (TRITON_INTERPRET=1).

vLLM takes Triton for absent on a CPU unless it has a backend of that name; interpreted kernels need none.
"""

from types import SimpleNamespace

try:
    from triton.backends import backends
except ImportError:
    pass
else:
    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))
