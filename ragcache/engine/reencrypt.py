"""Rotate the key that seals a store, and switch its encryption on or off."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragcache.engine.options import StoreConfig
from ragcache.engine.store_config import open_store
from ragcache.errors import DamagedIndexError
from ragcache.retrieval.index_file import read_index, write_index
from ragcache.seal import Seal
from ragcache.store.directory import StoreLayout


@dataclass(frozen=True)
class ReencryptReport:
    """Result of `reencrypt`.

    blocks:    how many blocks were written again
    dropped:   blocks that no key of the store opens; they are computed again on first use
    key:       public id of the key that seals now
    encrypted: whether blocks and index are encrypted
    """

    blocks: int
    dropped: int
    key: str
    encrypted: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reencrypt(path: str | Path, config: StoreConfig, *, lost: bool = False, timeout_s: float = 30.0) -> ReencryptReport:
    """Seal everything in the store at `path` with a new key.

    The key file holds the old key beside the new one until all is sealed: after a kill at any instant the store opens,
    and running this again finishes it. Other processes that have the store open read the file again by themselves.

    Args:
        config: how the store is opened; its `encrypt` switches encryption, None leaves encryption as it is
        lost: the old key is lost: everything that it sealed is dropped
        timeout_s: seconds to wait for another writer

    Raises StoreNotFoundError, SealError, StoreBusyError, StoreReadOnlyError, StoreFullError, ConfigError, and
    StoreUnreachableError for a remote that does not answer; then the old key stays valid.
    """
    layout = StoreLayout(path)
    layout.check()
    with layout.writer(timeout_s):
        layout.rotate(config.encrypt, lost=lost)
    with closing(open_store(path, replace(config, read_only=False), create=False)) as store:
        with store.layout.writer(timeout_s):
            blocks, dropped = store.kv.reseal()
            _reseal_index(store.layout.index, store.kv.seal)
            store.layout.forget_old()
        return ReencryptReport(blocks, dropped, store.kv.seal.id, store.kv.seal.encrypts)


def _reseal_index(path: Path, seal: Seal) -> None:
    if not path.exists():
        return
    try:
        write_index(path, *read_index(path, seal), seal)
    except DamagedIndexError:  # it is rebuilt from the documents
        path.unlink()
