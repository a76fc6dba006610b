"""The file format: other readers open it, and no damage gets through; files appear whole or not at all."""

import errno
import hashlib
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import DTYPES, make_block, make_key, packed, same, unpacked
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flushes import needs_proc, record_calls
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ragcache import errors
from ragcache.codecs import RawCodec
from ragcache.codecs.block_file import read_block, write_block
from ragcache.codecs.container import DTYPES as CONTAINER_DTYPES
from ragcache.codecs.container import read_container, write_container
from ragcache.files import atomic_write, is_leftover, make_directory, write_all
from ragcache.seal import UNSEALED, Seal

KEY = make_key(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_block(tmp_path / "block.safetensors", KEY, make_block(0), RawCodec())
    return tmp_path / "block.safetensors"


def rewrite(path: Path, **metadata: str) -> None:
    """Change the metadata of a block file and give it the right seal, as another version would have."""
    tensors, old = read_container(path, seal=UNSEALED.of(KEY))
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    write_container(path, copies, {**old, **metadata}, seal=UNSEALED.of(KEY))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_own_reader_sees_the_same_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    block = make_block(3, dtype=dtype)
    write_block(tmp_path / "b.safetensors", KEY, block, RawCodec())
    loaded = load_file(tmp_path / "b.safetensors")
    assert torch.equal(loaded["keys"], block.keys)
    assert torch.equal(loaded["values"], block.values)
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        metadata = file.metadata()
    del metadata["seal"]
    assert metadata == {"key": KEY, "codec": "raw", "codec_version": "1", "format_version": "1", "num_tokens": "5"}


def test_every_dtype_and_shape_comes_back_aligned(tmp_path: Path) -> None:
    tensors = {name: torch.arange(3).to(getattr(torch, dtype)) for name, dtype in CONTAINER_DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "matrix": torch.eye(3)[:, :2]}
    write_container(tmp_path / "c", tensors, {"quote": '"seal":"'})
    read, metadata = read_container(tmp_path / "c")
    assert metadata == {"quote": '"seal":"'}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert read[name].data_ptr() % tensor.element_size() == 0


def test_data_begins_at_a_multiple_of_64(path: Path) -> None:
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % 64 == 0


def mark_of(data: bytes) -> str:
    mark = unpacked(data)[0]["__metadata__"]["seal"]
    assert data.count(mark.encode()) == 1
    return mark


def oracle(secret: bytes, name: str, mark: str) -> tuple[AESGCM, bytes]:
    """The cipher of the file that has this mark, and the tag in it."""
    made = hashlib.blake2b(key=secret, person=b"ragcache id", digest_size=8).hexdigest()
    assert mark[4:20] == made
    salt = bytes.fromhex(mark[20:52])
    key = hashlib.blake2b(name.encode(), key=secret, salt=salt, person=b"ragcache file", digest_size=32).digest()
    return AESGCM(key), bytes.fromhex(mark[52:])


def test_seal_is_the_tag_of_aes_gcm_over_name_and_file(path: Path) -> None:
    data = path.read_bytes()
    mark = mark_of(data)
    cipher, tag = oracle(bytes(32), KEY, mark)
    assert tag == cipher.encrypt(bytes(12), b"", b"mac:" + data.replace(mark.encode(), b"0" * len(mark)))


def test_encrypted_data_is_that_of_aes_gcm(path: Path) -> None:
    secret, plain = b"s" * 32, path.read_bytes()
    write_block(path, KEY, make_block(0), RawCodec(), seal=Seal([secret], encrypts=True))
    data = path.read_bytes()
    mark, (length,) = mark_of(data), struct.unpack("<Q", data[:8])
    cipher, tag = oracle(secret, KEY, mark)
    head = b"gcm:" + data[: 8 + length].replace(mark.encode(), b"0" * len(mark))
    assert cipher.decrypt(bytes(12), data[8 + length :] + tag, head) == plain[8 + length :]
    assert same(read_block(path, KEY, seal=Seal([secret])), make_block(0))


def test_other_secrets_and_names_open_nothing(path: Path) -> None:
    write_block(path, KEY, make_block(0), RawCodec(), seal=Seal([b"s" * 32]))
    for key, seal in ((KEY, UNSEALED), (KEY, Seal([b"t" * 32])), (make_key(1), Seal([b"s" * 32]))):
        with pytest.raises(errors.DamagedBlockError, match="not sealed by this store under this name"):
            read_block(path, key, seal=seal)
    assert same(read_block(path, KEY, seal=Seal([b"t" * 32, b"s" * 32])), make_block(0))


def test_tensors_alias_a_private_map(path: Path) -> None:
    before = path.read_bytes()
    resident = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    block = read_block(path, KEY)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    assert len(mapped) == len(resident) + 1
    start, end = (int(number, 16) for number in mapped[-1].split()[0].split("-"))
    assert all(start <= tensor.data_ptr() < end for tensor in (block.keys, block.values))
    block.keys.zero_()
    assert path.read_bytes() == before
    assert same(read_block(path, KEY), make_block(0))


def test_every_flipped_byte_is_found(path: Path) -> None:
    """Each byte of the file in turn, header, seal and padding included."""
    data = path.read_bytes()
    rng = random.Random(0)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(errors.DamagedBlockError, match="block"):
            read_block(path, KEY)
    path.write_bytes(data)
    assert same(read_block(path, KEY), make_block(0))


def test_every_truncation_is_found_and_every_addition(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(errors.DamagedBlockError, match="block"):
            read_block(path, KEY)
    path.write_bytes(data + b"\0")
    with pytest.raises(errors.DamagedBlockError):
        read_block(path, KEY)


def bare(path: Path) -> None:
    """What safetensors itself writes of the block."""
    block = make_block(0)
    save_file({"keys": block.keys, "values": block.values}, path, {"key": KEY, "codec": "raw"})


CONTENTS = [b"", b"text", b"\xff" * 4096, bytes(4096), b'{"__metadata__":{"seal":"' * 9]
NEWER = [{"format_version": "2"}, {"codec_version": "2"}, {"format_version": "99"}]
WRONG = [{"num_tokens": "6"}, {"format_version": "one"}, {"codec_version": ""}]
OTHER_FILES: list[tuple[Callable[[Path], object], type[Exception], str]] = [
    *((lambda path, content=one: path.write_bytes(content), errors.DamagedBlockError, "block") for one in CONTENTS),
    (bare, errors.DamagedBlockError, "block"),
    *(
        (lambda path, one=one: rewrite(path, **one), errors.SchemaVersionError, "use the version that wrote")
        for one in NEWER
    ),
    (lambda path: rewrite(path, codec="int3"), errors.SchemaVersionError, "'int3' is needed .* install the package"),
    *((lambda path, one=one: rewrite(path, **one), errors.DamagedBlockError, "block") for one in WRONG),
    (lambda path: (path.unlink(), path.mkdir()), errors.DamagedBlockError, "block"),
]


@pytest.mark.parametrize(("change", "error", "said"), OTHER_FILES)
def test_other_files_are_damage_or_of_a_newer_version(
    path: Path, change: Callable[[Path], object], error: type[Exception], said: str
) -> None:
    change(path)
    with pytest.raises(error, match=said):
        read_block(path, KEY)


# The product of a text or a list and a number repeats it.
NO_SHAPES: list[Any] = [["F32", 2**40], [[None], 2**40], [[[]], 2**40], {"": 0}, [True], [1.5], [-1, -1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("keys"),
        lambda header: header["keys"].update(dtype="F99"),
        lambda header: header["keys"].update(shape=[2, 2, 5, 5]),
        lambda header: header["keys"].update(shape="none"),
        lambda header: header["keys"].update(data_offsets=[10**9, 10**9 + 320]),
        lambda header: header["keys"].update(data_offsets=[-320, 0]),
        lambda header: header.update(keys=None),
        *(lambda header, shape=shape: header["keys"].update(shape=shape) for shape in NO_SHAPES),
        lambda header: header["__metadata__"].update(format_version="1" * 5000),
        lambda header: header["__metadata__"].update(codec_version="1" * 5000),
    ],
)
def test_headers_that_were_written_wrong_are_damage(path: Path, change: Any) -> None:
    """Their seal is whole: they stand for a writer with a bug."""
    header, rest = unpacked(path.read_bytes())
    change(header)
    path.write_bytes(packed(header, rest, KEY))
    with pytest.raises(errors.DamagedBlockError):
        read_block(path, KEY)


def test_no_file_is_a_missing_block(tmp_path: Path) -> None:
    with pytest.raises(errors.MissingBlockError):
        read_block(tmp_path / "none", KEY)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.MissingBlockError):
        read_block(tmp_path / "file" / "below", KEY)


def test_a_file_nobody_may_open_is_a_store_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(errors.StoreError, match="Permission denied"):
        read_block(path, KEY)


# Files appear whole or not at all.


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@needs_proc
def test_names_are_flushed_behind_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps a rename, or a new directory, only once the directory that holds the name is flushed."""
    target, calls = tmp_path / "new" / "deep" / "file", record_calls(monkeypatch)
    with atomic_write(target) as file:
        write_all(file, b"content")
        temporary = Path(file.name)
    assert calls == [
        ("flush", tmp_path.parent),  # the name of a directory that was there, once a process
        ("make", tmp_path / "new"),
        ("flush", tmp_path),
        ("make", target.parent),
        ("flush", tmp_path / "new"),
        ("flush", temporary),
        ("rename", target),
        ("flush", target.parent),
    ]
    calls.clear()
    make_directory(target.parent)
    assert calls == []
    make_directory(tmp_path / "other")
    assert calls == [("make", tmp_path / "other"), ("flush", tmp_path)]


def test_a_failed_body_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def fail() -> None:
        with atomic_write(target) as file:
            write_all(file, b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, errors.StoreFullError),
        (errno.EDQUOT, errors.StoreFullError),
        (errno.EROFS, errors.StoreReadOnlyError),
        (errno.EACCES, errors.StoreReadOnlyError),
        (errno.EIO, errors.StoreFailedError),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_errors_are_translated_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception], call: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(expected), atomic_write(tmp_path / "file") as file:
        write_all(file, b"content")
    assert names(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path) -> None:
    class Reluctant:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: memoryview) -> int:
            self.data += bytes(data[:3])
            return min(3, len(data))

    file = Reluctant()
    write_all(file, memoryview(b"0123456789"))  # type: ignore[arg-type]
    assert file.data == b"0123456789"
    write_all(file, memoryview(b""))  # type: ignore[arg-type]
    assert file.data == b"0123456789"


DEAD = 2**22 + 1  # no process has an id that high


@pytest.mark.parametrize(
    ("name", "age_s", "older_than_s", "expected"),
    [
        (".file.OURS-0123abcd.tmp", 7200, 3600, False),
        (".file.1-0123abcd.tmp", 7200, 3600, False),
        (".file.OURS-0123abcd.tmp", 90_000, 3600, True),  # a day is enough
        (f".file.{DEAD}-0123abcd.tmp", 3700, 3600, True),
        (f".file.{DEAD}-0123abcd.tmp", 10, 3600, False),
        (f".file.{DEAD}-0123abcd.tmp", -7200, 0, False),  # a clock that jumped makes no file old
        *((name, 90_000, 0, False) for name in ("file", ".hidden", "file.tmp", ".file.tmp", f".file.{DEAD}-zz.tmp")),
    ],
)
def test_a_leftover_is_the_file_of_a_dead_writer_or_an_old_one(
    tmp_path: Path, name: str, age_s: float, older_than_s: float, expected: bool
) -> None:
    file = tmp_path / name.replace("OURS", str(os.getpid()))
    file.write_bytes(b"")
    os.utime(file, (time.time() - age_s, time.time() - age_s))
    assert is_leftover(file, older_than_s) is expected
    assert not is_leftover(tmp_path / f".gone.{DEAD}-0123abcd.tmp", 0)
