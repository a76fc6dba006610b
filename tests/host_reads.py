"""Reads of a tensor's value by the host, counted on a CPU: on a GPU each waits until all that was launched is done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ragcache.models import attention, language_model

READS = frozenset(
    {"_local_scalar_dense", "_unique", "_unique2", "allclose", "bincount", "equal", "histc", "is_nonzero"}
    | {"masked_select", "nonzero", "unique_consecutive", "unique_dim"}
)
"""Operations whose result, or its shape, is a number on the host: item(), `if tensor`, lengths of masks."""
UPLOADS = frozenset({"lift_fresh"})
"""A tensor made of Python's numbers: its copy from pageable memory waits as well."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu", Tensor.__array__: "numpy"}


class HostReads:
    """Counts reads of this thread within: `calls`, by operation. Several may be entered with the same counter.

    uploads: count tensors made of Python's numbers too
    """

    def __init__(self, calls: Counter[str] | None = None, uploads: bool = False) -> None:
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._names = READS | UPLOADS if uploads else READS
        self._stack = ExitStack()

    def __enter__(self) -> HostReads:
        self._stack.enter_context(_Methods(self.calls))
        self._stack.enter_context(_Operations(self.calls, self._names))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: Counter[str], names: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._names = calls, names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in INDEXING and any(one is not None and one.dtype is torch.bool for one in args[1])
        repeats = name == "repeat_interleave" and func._overloadname != "self_int"
        if name in self._names or masks or repeats:
            self._calls[f"{name} by a mask" if masks else name] += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Methods that read a CPU's tensor without an operation."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (*args[1:], *(kwargs or {}).values())
        to_cpu = func is Tensor.to and any(isinstance(one, str) and one == "cpu" for one in given)
        if func in METHODS or to_cpu:
            self._calls[METHODS.get(func, "cpu")] += 1
        return func(*args, **(kwargs or {}))


def reads_of(run: Callable[[], Any]) -> Counter[str]:
    """Reads of a prompt, by operation, with everything done as on a GPU, where the host looks at nothing that it can do
    without. Warm up first."""
    calls: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            if threading.get_ident() == own:
                return function(*args)
            with HostReads(calls):  # a mode is of one thread, and passes run in another one
                return function(*args)

        return within

    own = threading.get_ident()
    alone = language_model.LanguageModel._run_alone
    with (
        mock.patch.object(attention, "reads_freely", return_value=False),
        mock.patch.object(language_model, "run_pieces", counted(language_model.run_pieces)),
        mock.patch.object(language_model.LanguageModel, "_run_alone", counted(alone)),
        HostReads(calls),
    ):
        run()
    return calls
