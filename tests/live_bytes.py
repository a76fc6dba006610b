"""Bytes that exist, counted by nobody who is asked to keep within a budget."""

import threading
import weakref

import numpy as np
import torch
from torch import Tensor


class LiveBytes:
    """Counts the bytes of the tensors that exist, by their buffers' finalizers: it asks the tier nothing."""

    def __init__(self) -> None:
        self.now = 0
        self.highest = 0
        self._lock = threading.Lock()

    def copy(self, tensor: Tensor, *_where: object, **_options: object) -> Tensor:
        """A copy that is counted until its storage is gone, whichever tensors it had."""
        if not tensor.numel():
            return tensor.clone()
        return self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def empty(self, num_bytes: int) -> Tensor:
        """Bytes that are counted as long as there are tensors of them."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        buffer = np.empty(num_bytes, np.uint8)
        self._add(num_bytes)
        weakref.finalize(buffer, self._add, -num_bytes)
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.now += num_bytes
            self.highest = max(self.highest, self.now)
