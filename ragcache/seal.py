"""The seal of a store's files: a tag over the name and every byte of a file, under a secret of the store.

    mark    "mac:" or "gcm:", then in hex digits the secret's id (8 bytes), a random salt (16) and the tag (16)

The store's secret and the salt give each file a key of its own: keyed BLAKE2b over the file's name. The tag is that of
AES-256-GCM: over header and data ("mac"), or over the header and the data that it encrypts ("gcm"). So a file that was
changed, renamed or sealed by another secret is refused. The data itself is not hashed by BLAKE2b: that reads 0.8 GB/s,
slower than a disk's page cache, on a processor whose AES instructions authenticate 9 GB/s.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ragcache.errors import SealError
from ragcache.files import atomic_write, write_all

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

VARIABLE = "RAGCACHE_STORE_KEY"
"""The environment variable that holds a store's secret, instead of the key file in the store's folder: 64 hex digits.
It may hold several secrets, separated by commas: the first seals new files, and each opens the files that it sealed."""
_MAC, _GCM = b"mac:", b"gcm:"
_ID, _SALT, _TAG = 8, 16, 16  # bytes
MARK_LENGTH = len(_MAC) + 2 * (_ID + _SALT + _TAG)
_PIECE = 1 << 26


class Seal:
    """The secrets of a store, by id: the first seals new files, and each opens the files that it has sealed.

    encrypts: whether the data of new files is encrypted
    file:     the key file; it is read again when another process has rotated the secret. None: the secrets come from
              the environment
    """

    def __init__(self, known: Iterable[bytes], *, encrypts: bool = False, file: Path | None = None) -> None:
        self.encrypts = encrypts
        self.file = file
        self._known = {_id(secret): secret for secret in known}
        self._read = None if file is None else _version(file)

    @property
    def known(self) -> dict[str, bytes]:
        """Return the secrets by id, the sealing secret first."""
        if self.file is not None and (now := _version(self.file)) not in (self._read, None):
            with suppress(SealError):  # this process goes on with the secrets that it has
                self._known, self._read = {_id(secret): secret for secret in read_key(self.file)}, now
        return self._known

    @property
    def id(self) -> str:
        """Return the id of the secret that seals new files. It is public."""
        return next(iter(self.known))

    def of(self, name: str) -> FileSeal:
        return FileSeal(self, name)


class FileSeal(NamedTuple):
    """The seal of the file with this name."""

    seal: Seal
    name: str

    def close(self, head: bytes | bytearray, parts: Iterable[memoryview]) -> tuple[bytes, list[memoryview]]:
        """Return the mark of a file, and its parts as they are to be written: encrypted if the store encrypts.

        head: the beginning of the file, which stays readable, with zeros in place of the mark
        """
        id, secret = next(iter(self.seal.known.items()))
        kind, salt = _GCM if self.seal.encrypts else _MAC, secrets.token_bytes(_SALT)
        cipher = _cipher(secret, salt, self.name).encryptor()
        cipher.authenticate_additional_data(kind + head)
        if kind == _GCM:
            written = [memoryview(cipher.update(piece)) for part in parts for piece in _pieces(part)]
        else:
            written = list(parts)
            _authenticate(cipher, written)
        cipher.finalize()
        return kind + (bytes.fromhex(id) + salt + cipher.tag).hex().encode(), written

    def opens(self, mark: bytes, head: bytes | bytearray, data: memoryview) -> bool:
        """Return whether the store sealed this file under this name.

        mark: the file's mark
        head: the beginning of the file as `close` was given it
        data: the rest of the file, in writable memory: encrypted data is decrypted in place, also if the seal is broken
        """
        from cryptography.exceptions import InvalidTag

        kind, digits = mark[: len(_MAC)], mark[len(_MAC) :]
        try:
            held = bytes.fromhex(digits.decode())
        except ValueError:
            return False
        secret, salt, tag = self.seal.known.get(held[:_ID].hex()), held[_ID:-_TAG], held[-_TAG:]
        if kind not in (_MAC, _GCM) or secret is None or len(salt) != _SALT or held.hex().encode() != digits:
            return False
        cipher = _cipher(secret, salt, self.name, tag).decryptor()
        cipher.authenticate_additional_data(kind + head)
        if kind == _GCM:
            for piece in _pieces(data):
                cipher.update_into(piece, piece)
        else:
            _authenticate(cipher, [data])
        try:
            cipher.finalize()
        except InvalidTag:
            return False
        return True


def open_seal(file: Path, *, encrypts: bool = False) -> Seal:
    """Return the seal whose secret is in the environment, else in this key file. Raises SealError."""
    if VARIABLE in os.environ:
        return Seal(_parsed(os.environ[VARIABLE], VARIABLE), encrypts=encrypts)
    return Seal(read_key(file), encrypts=encrypts, file=file)


def read_key(file: Path) -> list[bytes]:
    """Return the secrets in a key file.

    Raises SealError if the file is missing, malformed or open to other users, or belongs to another user than this
    user, root, or the owner of its folder: anyone who may write into the folder could have replaced it.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as opened:
            status, text = os.fstat(descriptor), opened.read(4096)
            owners = {os.geteuid(), 0, file.parent.stat().st_uid}
    except OSError as error:
        raise SealError(
            f"{file}: the store's key cannot be read ({error.strerror}); restore it from a copy, or set {VARIABLE}. "
            "Where it is lost, `ragcache reencrypt --lost` makes another, and KV is computed again"
        ) from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in owners or not stat.S_ISREG(status.st_mode):
        raise SealError(
            f"{file}: others may read or replace the store's key (mode {stat.S_IMODE(status.st_mode):04o}, user "
            f"{status.st_uid}); chmod 600 it, or keep the key in {VARIABLE}"
        )
    return _parsed(text.decode("latin-1"), str(file))


def write_key(file: Path, known: Iterable[bytes]) -> None:
    """Replace the key file, readable by its owner alone. Raises StoreFullError, StoreReadOnlyError."""
    with atomic_write(file, mode=0o600) as opened:
        write_all(opened, "".join(f"{secret.hex()}\n" for secret in known).encode())


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def _parsed(text: str, where: str) -> list[bytes]:
    words = text.replace(",", " ").split()
    try:
        found = [bytes.fromhex(word) for word in words]
    except ValueError:
        found = []
    if not found or any(len(secret) != 32 for secret in found):
        raise SealError(
            f"{where}: holds no key of a store, which is 64 hex digits, as `openssl rand -hex 32` makes them; restore "
            "it, or run `ragcache reencrypt --lost`, and KV is computed again"
        )
    return found


def _id(secret: bytes) -> str:
    return hashlib.blake2b(key=secret, person=b"ragcache id", digest_size=_ID).hexdigest()


def _cipher(secret: bytes, salt: bytes, name: str, tag: bytes | None = None) -> Cipher[GCM]:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    key = hashlib.blake2b(name.encode(), key=secret, salt=salt, person=b"ragcache file", digest_size=32).digest()
    return Cipher(AES(key), GCM(bytes(12), tag))  # the key is used once, so its nonce may be constant


def _pieces(part: memoryview) -> Iterator[memoryview]:
    view = part.cast("B")
    return (view[start : start + _PIECE] for start in range(0, len(view), _PIECE))


def _authenticate(cipher: AEADEncryptionContext | AEADDecryptionContext, parts: Iterable[memoryview]) -> None:
    for part in parts:
        for piece in _pieces(part):
            cipher.authenticate_additional_data(piece)


def _version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


UNSEALED = Seal([bytes(32)])
"""The seal of files that belong to no store. Its secret is public, so it detects damage but no forgery."""
