"""Blocks that the first version of each codec wrote are read to the same bits, in every process.

`PYTHONPATH=tests python tests/codecs/test_frozen.py` writes the files of codecs that have none yet; what is there stays
as it is, but for `written.json`, the hashes of the bytes that this version writes.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from blocks import DTYPES, make_key, same
from torch import Tensor

from ragcache.codecs import CODECS, Bases, Codec, get_codec
from ragcache.codecs.block_file import read_block, write_block
from ragcache.codecs.container import read_container, write_container
from ragcache.kv.block import KVBlock
from ragcache.seal import MARK_LENGTH, UNSEALED
from ragcache_papers.kvtc import KvtcCodec
from ragcache_papers.kvtc_fit import stand_in

FROZEN = Path(__file__).parent / "frozen"
BASIS = FROZEN / "basis-v1.safetensors"
DIGESTS = FROZEN / "written.json"
KEY = make_key(1)
SEAL = UNSEALED.of(KEY)
COMPRESSED = ("kvtc",)  # another version of zstandard may compress the same codes differently

EXACT_TOKENS = 4  # first ones, that kvtc kept exact when its files were written


def plain_block(dtype: torch.dtype, num_tokens: int = 13, dim: int = 6) -> KVBlock:
    """The same numbers on every machine: fractions of whole numbers, no random generator."""

    def numbers(factor: int) -> Tensor:
        counted = torch.arange(4 * 2 * num_tokens * dim, dtype=torch.float64).view(4, 2, num_tokens, dim)
        return ((counted * factor % 1009) / 128 - 3.5).to(dtype)

    return KVBlock(numbers(377), numbers(211))


def name_of(codec: str, dtype: torch.dtype) -> str:
    return f"{codec}-v{CODECS[codec].version}-{str(dtype).removeprefix('torch.')}"


def frozen_codec(name: str) -> Codec:
    """The codec, with the frozen basis and as many exact tokens as the frozen files."""
    bases, tensors = Bases(), read_container(BASIS).tensors
    bases.add(KVBlock(tensors["keys"], tensors["values"]))
    codec = get_codec(name, bases)
    if isinstance(codec, KvtcCodec):
        codec.first_tokens = EXACT_TOKENS
    return codec


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def file_digest(path: Path) -> str:
    """The file's, but for the mark of its seal, which holds a random salt."""
    data = path.read_bytes()
    start = data.index(b'"seal":"') + 8
    return hashlib.sha256(data[:start] + data[start + MARK_LENGTH :]).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_frozen_block_is_read_to_the_same_bits(codec: str, dtype: torch.dtype) -> None:
    name = name_of(codec, dtype)
    block = read_block(FROZEN / f"{name}.safetensors", KEY, frozen_codec(codec).bases)
    expected = read_container(FROZEN / f"{name}.decoded").tensors
    assert (block.dtype, block.keys.dtype) == (dtype, dtype)
    assert torch.equal(block.keys, expected["keys"])
    assert torch.equal(block.values, expected["values"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", sorted(set(CODECS) - set(COMPRESSED)))
def test_the_same_block_is_written_to_the_same_bytes(codec: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """But for those that zstandard compresses. The tensors are those of the first files, in another order."""
    path, name = tmp_path / "block", name_of(codec, dtype)
    write_block(path, KEY, plain_block(dtype), get_codec(codec))
    written, frozen = (read_container(one, seal=SEAL) for one in (path, FROZEN / f"{name}.safetensors"))
    assert written.metadata == frozen.metadata
    assert {one: digest(tensor) for one, tensor in written.tensors.items()} == {
        one: digest(tensor) for one, tensor in frozen.tensors.items()
    }
    assert file_digest(path) == json.loads(DIGESTS.read_text())[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", COMPRESSED)
def test_codes_are_the_same_whatever_compresses_them(codec: str, dtype: torch.dtype) -> None:
    coder, path = frozen_codec(codec), FROZEN / f"{name_of(codec, dtype)}.safetensors"
    frozen = read_container(path, seal=SEAL).tensors
    written = coder.encode(plain_block(dtype))
    for name in frozen.keys() - {"keys.stream", "values.stream", "keys.ends", "values.ends"}:
        assert torch.equal(frozen[name], written[name])
    assert same(coder.decode(written), coder.decode(frozen))


PROCESS = """
import sys
from pathlib import Path
import torch
from ragcache.codecs import CODECS, get_codec
from ragcache.codecs.block_file import write_block
from test_frozen import KEY, digest, file_digest, plain_block
torch.set_num_threads(int(sys.argv[2]))
for name in sorted(CODECS):
    path = Path(sys.argv[1]) / name
    block = plain_block(torch.bfloat16, 200, 64)
    block = write_block(path, KEY, block, get_codec(name).for_trial(block))
    print(name, digest(block.keys), digest(block.values), file_digest(path))
"""


@pytest.mark.slow
def test_processes_and_numbers_of_threads_agree_on_every_bit(tmp_path: Path) -> None:
    """Bytes written and numbers read, by hash."""
    said = []
    for threads in ("1", "2"):
        directory = tmp_path / threads
        directory.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(directory), threads],
            env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said.append(done.stdout)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == len(CODECS)


def freeze() -> None:
    if not BASIS.exists():
        basis = stand_in(plain_block(torch.float32))
        write_container(BASIS, {"keys": basis.keys, "values": basis.values}, {})
    for codec in CODECS:
        for dtype in DTYPES:
            path = FROZEN / f"{name_of(codec, dtype)}.safetensors"
            if not path.exists():
                block = write_block(path, KEY, plain_block(dtype), frozen_codec(codec))
                write_container(path.with_suffix(".decoded"), {"keys": block.keys, "values": block.values}, {})
    with TemporaryDirectory() as directory:
        hashes = {}
        for codec in sorted(set(CODECS) - set(COMPRESSED)):
            for dtype in DTYPES:
                write_block(Path(directory) / "block", KEY, plain_block(dtype), get_codec(codec))
                hashes[name_of(codec, dtype)] = file_digest(Path(directory) / "block")
    DIGESTS.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    freeze()
