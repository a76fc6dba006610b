"""The devices and the memory of this machine, and the number types that it computes fast."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from ragcache.errors import ConfigError, DeviceError, first_line
from ragcache.lazy_torch import torch

AUTO = "auto"
DEVICES = ("cuda", "xpu", "mps", "cpu")
"""Kinds of devices, in the order in which "auto" takes them."""


def find_device(device: str | torch.device = AUTO) -> torch.device:
    """Return the device of this name; "auto": the first available of DEVICES.

    Raises ConfigError for a device that is unknown or unavailable.
    """
    if device == AUTO:
        return torch.device(next(kind for kind in DEVICES if has_device(kind)))
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown; use one of {AUTO}, {', '.join(DEVICES)}") from error
    if chosen.type in DEVICES and not has_device(chosen.type):
        raise ConfigError(f"device {str(device)!r} was asked for and there is none; use device='{AUTO}'")
    return chosen


def has_device(kind: str) -> bool:
    """Return whether there is a device of this kind, which must be in DEVICES."""
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind == "cpu" or bool(getattr(torch, kind).is_available())


_failures: list[str] = []


def device_failure() -> str | None:
    """Return the message of the failure that ended this process's work on its device; None if there was none."""
    return _failures[0] if _failures else None


@contextmanager
def translate_device_errors() -> Iterator[None]:
    """Raise DeviceError for errors of a GPU's driver; other errors pass through."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the model's device has no memory left ({first_line(error)}); give --answer-memory, --device-memory or "
            "--graph-memory less"
        ) from error
    except RuntimeError as error:  # PyTorch's own, its libraries', Triton's
        if not (isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "[CUDA]" in str(error)):
            raise
        failure = (
            f"the model's device failed ({first_line(error)}), and nothing runs there any more; what is stored is "
            "whole. Start again, with --device cpu if it fails again"
        )
        _failures[:] = _failures or [failure]  # the first is the cause; later ones would only accumulate
        raise DeviceError(failure) from error


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether the processor has instructions for products of this dtype.

    Without them a product in bfloat16 takes 4 times as long as in float32, a product in float16 75 times.
    """
    if dtype == torch.bfloat16 and platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype in (torch.bfloat16, torch.float16):
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        name = "bf16" if dtype == torch.bfloat16 else "fp16"
        supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        return has_onednn and supported is not None and bool(supported())
    return True


def suits(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights of this dtype are at least as fast on the device as float32."""
    return device.type != "cpu" or multiplies(dtype)


def advice_on(dtype: object) -> str | None:
    """Return a warning if this machine is slow in the dtype of a store's KV, such as "bfloat16"; else None."""
    own = getattr(torch, str(dtype), None)
    if own is None or suits(own, find_device()):
        return None
    return (
        f"this processor has no instructions for {dtype}, in which the store's KV is: reading takes several times as "
        "long as in float32; make a new store with --dtype float32, and --codec bfloat16 for KV in 16 bits"
    )


def machine_bytes() -> int:
    """Return the size of the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
