"""Models in few bits: a GGUF file, which is dequantised as it is loaded, and weights that stay quantised."""

import shutil

import numpy as np
import pytest
import torch
from fake_index import save_tiny_gguf
from tiny_model import IDS, PROMPT, last_logits
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import ragcache as rc
from ragcache.errors import AdapterError, ModelMismatchError, ModelNotFoundError, UnsupportedModelError
from ragcache.models.load import checkpoint_digest
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_plan.shape import shape_of
from ragcache_vllm.merged_adapter import servable


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def base(gguf_file):
    return gguf_file.parent / "base"


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


def test_a_gguf_file_that_is_none_is_refused_by_name(gguf_file, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"other\.gguf"):
        rc.load_lm(gguf_file.parent / "other.gguf")
    whole = gguf_file.read_bytes()
    broken = tmp_path / "broken.gguf"
    for end in (0, 2000, len(whole) - 1000):
        broken.write_bytes(whole[:end])
        with pytest.raises(ModelNotFoundError, match=r"broken\.gguf"):
            rc.load_lm(broken)
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
    ],
    ids=["magic", "version", "counts", "text"],
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
    assert (last_logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)) - right).abs().max() > 1e-4
    assert lm.fingerprint != rc.load_lm(base).fingerprint
    assert lm.fingerprint == rc.load_lm(quantised(base, kind)).fingerprint
    with torch.no_grad():
        other = quantised(base, kind)
        other.model.layers[0].mlp.up_proj.weight.qdata[0, 0] += 1
    assert lm.fingerprint != rc.load_lm(other).fingerprint


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_law_1_over_quantised_weights(base, kind):
    """One passage behind the prefix: within 1e-4 of plain transformers over the same weights."""
    model = quantised(base, kind)
    right = last_logits(model)
    lm = rc.load_lm(model)
    prompt = rc.Prompt(IDS[:2], [IDS[2:9]], IDS[9:])
    for method in ("reposition", "epic", "cacheblend"):
        done = rc.fuse(lm, prompt, method=method, recipe="prefix")
        torch.testing.assert_close(done.next_logits, right, atol=1e-4, rtol=1e-4)


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
