"""The worked examples of CONTRIBUTING.md do what the page says: each is put where it says, and used."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from blocks import DTYPES, make_block, make_key, make_mixed_block
from families import assert_same, load_tiny, oracle_logits, random_prompt

import ragcache as rc
from ragcache import codecs, fusion, plugins
from ragcache.codecs.block_file import read_block, write_block
from ragcache.errors import ConfigError, DamagedBlockError, ReaderError
from ragcache.ingest import readers
from ragcache.kv.cache_shape import LayerShape
from ragcache.plugins import Registry

TEXT = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(title: str, language: str = "python") -> str:
    """The section's code, which has fewer than 60 lines."""
    (code,) = re.findall(
        rf"^```{language}\n(.*?)^```$", TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0], re.M | re.S
    )
    assert code.count("\n") < 60
    return code


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Methods with an installed distribution that is made of the page's two pieces."""
    (group, entries), *others = tomllib.loads(example("Add a fusion method", "toml"))["project"]["entry-points"].items()
    assert (group, others) == (plugins.METHODS, [])
    info = tmp_path / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: my-methods\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}", encoding="utf-8")
    (tmp_path / "my_methods.py").write_text(example("Add a fusion method"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fusion, "METHODS", Registry(plugins.METHODS))
    yield
    sys.modules.pop("my_methods", None)


@pytest.mark.usefixtures("plug_in")
def test_the_method_is_found_by_its_entry_point_and_keeps_its_limits(tmp_path):
    lm, oracle = load_tiny("llama", tmp_path)
    prompt = random_prompt(3)
    n = len(prompt.ids)
    full = rc.fuse(lm, prompt, method="stride", every=1)
    assert_same(full.next_logits, oracle_logits(oracle, prompt, torch.ones(n, n, dtype=torch.bool).tril()))
    none = rc.fuse(lm, prompt, method="stride", every=0)
    torch.testing.assert_close(none.next_logits, rc.fuse(lm, prompt, fusion.Reposition()).next_logits)
    third = rc.fuse(lm, prompt, method="stride", every=3)
    context = sum(map(len, prompt.chunk_ids))
    assert set(third.computed_tokens) == {len(prompt.suffix_ids) + -(-context // 3)}
    assert "stride" in [row.name for row in rc.methods()]
    with pytest.raises(ConfigError, match="every is -1"):
        rc.fuse(lm, prompt, method="stride", every=-1)


def placed(name: str, code: str, package, folder: Path, monkeypatch):
    """The code as a module of the package, as if its file were there."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    module = importlib.import_module(f"{package.__name__}.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # goes with the test
    return module


@pytest.fixture
def codec(tmp_path, monkeypatch):
    module = placed("int16", example("Add a codec"), codecs, tmp_path, monkeypatch)
    monkeypatch.setitem(codecs.CODECS, "int16", module.Int16Codec)
    return codecs.get_codec("int16")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_a_file_of_the_codec_holds_what_numpy_makes_of_it_within_the_bound(codec, dtype, num_tokens, tmp_path):
    block = make_block(num_tokens, num_tokens=num_tokens, dtype=dtype)
    write_block(tmp_path / "block", make_key(1), block, codec)
    found = read_block(tmp_path / "block", make_key(1))
    bound = codec.error_bound(block)
    for numbers, decoded in ((block.keys, found.keys), (block.values, found.values)):
        assert (decoded.dtype, decoded.shape) == (dtype, numbers.shape)
        exact, stored = numbers.float().numpy(), decoded.float().numpy()
        steps = np.abs(exact).max(axis=(1, 2, 3), initial=0.0, keepdims=True) / np.float32(32767)
        wanted = np.rint(np.divide(exact, steps, out=np.zeros_like(exact), where=steps > 0)) * steps
        rounding = torch.finfo(dtype).eps * np.abs(exact).max(initial=0.0)
        assert np.abs(stored - wanted).max(initial=0.0) <= rounding
        assert np.abs(stored - exact).max(initial=0.0) <= bound
    if dtype == torch.float32 and num_tokens:
        largest = max(float(block.keys.abs().max()), float(block.values.abs().max()))
        assert bound <= largest * 2**-15  # half a step is 2^-16 of the largest number
    shape = LayerShape(*block.key_shape[1:2], block.key_shape[3], block.value_shape[3])
    expected = codec.expected_bytes([shape] * block.num_layers, num_tokens, block.keys.itemsize)
    assert expected == sum(tensor.nbytes for tensor in codec.encode(block).values())


def test_the_codec_keeps_extremes_and_layers_that_differ(codec):
    zero = make_block(1).map(torch.zeros_like)
    assert codec.decode(codec.encode(zero)).equal(zero)
    tiny, large = (make_block(2).map(lambda held, by=factor: held * by) for factor in (1e-42, 1e37))
    for block in (tiny, large, make_mixed_block(3)):
        decoded = codec.decode(codec.encode(block))
        for layer in range(block.num_layers):
            difference = (block.layer_keys(layer).double() - decoded.layer_keys(layer).double()).abs().max()
            assert float(difference) <= codec.error_bound(block)


def test_tensors_of_another_codec_are_damage(codec):
    tensors = codec.encode(make_block(1))
    for name in ("keys.codes", "values.scales"):
        with pytest.raises(DamagedBlockError):
            codec.decode({**tensors, name: tensors[name].double()})


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The documents of a file with this content, by its ending."""
    placed("srt", example("Add a reader"), readers, tmp_path, monkeypatch)
    monkeypatch.setitem(readers.readers(), ".srt", "ragcache.ingest.readers.srt:read_srt")

    def read(content: str) -> list[rc.Document | ReaderError]:
        folder = tmp_path / "films"
        folder.mkdir(exist_ok=True)
        (folder / "Ula.SRT").write_text(content, encoding="utf-8")
        (file,) = readers.find_files([folder]).files
        return list(readers.read_file(file))

    return read


def test_the_reader_gives_what_is_said(read, tmp_path):
    cues = "1\n00:00:01,000 --> 00:00:02,500\nThe river Ula\nis long.\n\n\n2\n00:00:03,000 --> 00:00:04,000\nIs it?\n"
    (document,) = read(f"\ufeff{cues}".replace("\n", "\r\n"))
    assert (document.text, document.title) == ("The river Ula\nis long.\nIs it?", "Ula")
    assert document.id == document.source == readers.file_id(tmp_path / "films" / "Ula.SRT")


@pytest.mark.parametrize("content", ["The river Ula is long.", "1\nThe river Ula is long.\n"])
def test_a_file_of_another_kind_is_named(read, content):
    (error,) = read(content)
    assert isinstance(error, ReaderError)
    assert "has no line of times; save it as SubRip" in str(error)
