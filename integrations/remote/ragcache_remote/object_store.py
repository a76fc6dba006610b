"""Object stores as remotes: S3, Google Cloud Storage, Azure, and folders, by the package obstore."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ragcache import errors
from ragcache.files import make_directory
from ragcache.store.remote import CONNECT_S, READ_S, RETRIES, WRITE_S, Blob, Blobs

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

LOOKERS = 16  # threads that ask for sizes and ages of several objects at once
_STAGED = re.compile(r".+#\d+")  # obstore's name of a file that is being written


def open_objects(url: str) -> ObjectBlobs:
    """Return the object store at a URL. Credentials, region and endpoint come from the environment, by the variables of
    the cloud's own tools.

    Raises ConfigError for an invalid URL or without obstore.
    """
    try:
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise errors.ConfigError("this remote needs obstore: pip install 'ragcache-kv[remote]'") from error
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise errors.ConfigError(
            f"{parts.scheme}://{parts.hostname or ''}...: a URL with credentials or options; keep them in the "
            "environment, as AWS_ACCESS_KEY_ID, and write scheme://bucket/prefix"
        )
    if parts.scheme == "file":
        return _open_folder(url, Path(url2pathname(parts.path)))
    if not parts.netloc:
        raise errors.ConfigError(f"{url}: names no bucket; write it like {parts.scheme}://bucket/prefix")

    def connect(timeout_s: float) -> ObjectStore:
        with _translated(url, errors.StoreError, errors.ConfigError):
            return from_url(url, client_options=_client_options(timeout_s), retry_config=_retry_config(timeout_s))

    return ObjectBlobs(url, connect(READ_S), connect(WRITE_S))


def _client_options(timeout_s: float) -> ClientConfig:
    # With options given, obstore reads none from the environment; private services need this option.
    names = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
    allow_http = any(os.environ.get(name, "").lower() in ("1", "true") for name in names)
    return {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=timeout_s),
        "allow_http": allow_http,
    }


def _retry_config(timeout_s: float) -> RetryConfig:
    return {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    }


def _open_folder(url: str, folder: Path) -> ObjectBlobs:
    from obstore.store import LocalStore

    with errors.translate_os_errors(folder):
        make_directory(folder.absolute())
    store = LocalStore(folder)
    return ObjectBlobs(url, store, store, folder)


class ObjectBlobs(Blobs):
    """Blobs as objects. Each blob is written by a single request: a kill could leave an upload in parts incomplete.

    reader, writer: the same store, with the time-outs for reading and writing
    folder:         the directory if the objects are files, else None
    """

    def __init__(self, url: str, reader: ObjectStore, writer: ObjectStore, folder: Path | None = None) -> None:
        self.where = url
        self._reader = reader
        self._writer = writer
        self._folder = folder
        self._lookers = ThreadPoolExecutor(LOOKERS, thread_name_prefix="ragcache-look")

    @property
    def gives_up(self) -> bool:
        return False

    def put(self, name: str, data: bytes) -> None:
        with self._writing():
            self._writer.put(name, data, use_multipart=False)

    def create(self, name: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        with self._writing():
            try:
                self._writer.put(name, data, use_multipart=False, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def get(self, name: str) -> bytearray | None:
        with self._reading():
            try:
                return bytearray(self._reader.get(name).bytes())
            except FileNotFoundError:
                return None

    def look(self, names: Iterable[str]) -> dict[str, Blob]:
        wanted = list(names)
        found = map(self._look, wanted) if len(wanted) == 1 else self._lookers.map(self._look, wanted)
        return {blob.name: blob for blob in found if blob is not None}

    def delete(self, names: Iterable[str]) -> None:
        with self._writing():
            for name in names:
                try:
                    self._writer.delete(name)
                except FileNotFoundError:
                    continue

    def walk(self, folder: str) -> Iterator[Blob]:
        with self._reading():
            for batch in self._reader.list(folder, chunk_size=1000):
                for entry in batch:
                    yield Blob(entry["path"], entry["size"], entry["last_modified"].timestamp())

    def sweep(self, older_than_s: float) -> int:
        """Delete incomplete files older than this and return their number. Only a folder can hold such files."""
        if self._folder is None:
            return 0
        before = time.time() - older_than_s
        swept = 0
        with errors.translate_os_errors(self._folder):
            for path in self._folder.rglob("*#*"):
                if _STAGED.fullmatch(path.name) and path.stat().st_mtime <= before:
                    path.unlink(missing_ok=True)
                    swept += 1
        return swept

    def close(self) -> None:
        self._lookers.shutdown()

    def _look(self, name: str) -> Blob | None:
        with self._reading():
            try:
                entry = self._reader.head(name)
            except FileNotFoundError:
                return None
        return Blob(name, entry["size"], entry["last_modified"].timestamp())

    def _reading(self) -> Any:
        return _translated(self.where, errors.StoreError)

    def _writing(self) -> Any:
        return _translated(self.where, errors.StoreReadOnlyError)


@contextmanager
def _translated(
    where: str, refused: type[errors.StoreError], other: type[Exception] = errors.StoreError
) -> Iterator[None]:
    """Translate obstore's errors into store errors that name `where`.

    The texts of obstore's errors are not repeated, and the errors are not kept as causes: they hold addresses and
    answers of the service, which may reveal a secret.

    refused: class of the error to raise if the service denies access
    other:   class of the error to raise for an unknown error
    """
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError:
        raise errors.StoreNotFoundError(f"{where}: no such bucket or folder; make it, or name another one") from None
    except (PermissionDeniedError, UnauthenticatedError):
        raise refused(
            f"{where}: access is denied; check the credentials in the environment, and what they allow"
        ) from None
    except (BaseError, OSError) as error:
        raise _translation(where, str(error), refused, other) from None


def _translation(where: str, text: str, refused: type[errors.StoreError], other: type[Exception]) -> Exception:
    if re.search(r"os error (28|122)\b|status code: 507\b|QuotaExceeded|StorageFull", text):
        return errors.StoreFullError(f"{where}: no space left; free some, or raise the quota")
    if re.search(r"os error (1|13|30)\b", text):
        return refused(f"{where}: access is denied; check the permissions")
    if "NoSuchBucket" in text:
        return errors.StoreNotFoundError(f"{where}: no such bucket; make it, or name another one")
    if code := re.search(r"status code: (4\d\d [A-Za-z ]+)", text):
        return refused(
            f"{where}: the service refuses ({code[1].strip()}); check the URL, the region and the credentials"
        )
    if code := re.search(r"status code: (5\d\d [A-Za-z ]+)", text):
        return errors.StoreUnreachableError(f"{where}: the service fails ({code[1].strip()}); try again later")
    if "timed out" in text or "kind: Timeout" in text:
        return errors.StoreUnreachableError(f"{where}: no answer in time; check the network")
    if "HTTP error" in text:
        return errors.StoreUnreachableError(f"{where}: cannot be reached; check the network and the endpoint")
    if "must be specified" in text or "Missing" in text:
        return other(f"{where}: the environment says too little; set the account, and the credentials")
    return other(f"{where}: cannot be used; check the URL and the environment")
