"""An adapter and its base as one checkpoint: what plain transformers loads from it, and what `ragcache vllm` says."""

import json
import shlex
from itertools import pairwise

import pytest
import torch
from adapters import save_adapter
from families import VOCAB, save_tiny, tiny_config
from kit.makers import tiny_directory
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import ragcache as rc
from ragcache.cli.commands import build_app
from ragcache.errors import AdapterError, ModelMismatchError
from ragcache.models.adapter import Adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_vllm.merged_adapter import merge, refuse_other_checkpoint, servable

SPEC = TrainedTokens("link", "isolated", 2, 3, VOCAB, VOCAB + 6, VOCAB + 7)
SMALL = TrainedTokens("markers", doc_start_id=258, doc_end_id=259, positions="reordered")


def save_tied(directory):
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def weights_of(adapter):
    """The loaded model's weights, without the matrices beside them, which act on passages alone."""
    held = rc.load_lm(adapter, dtype="float32").model.state_dict()
    return {name: tensor for name, tensor in held.items() if ".on_passages." not in name}


@pytest.mark.parametrize("family", ["llama", "tied", "gemma3", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_transformers_loads_the_same_model(tmp_path, family, dtype):
    base = tmp_path / "base"
    save_tied(base) if family == "tied" else save_tiny(family, str(base))
    if dtype == "bfloat16":  # saved so: the rows are not rounded with it
        AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(base)
    save_adapter(tmp_path / "adapter", base, SPEC)
    merged = merge(Adapter.find(tmp_path / "adapter"), tmp_path / "models")
    ours = weights_of(tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert rc.load_lm(merged).reuse == SPEC


base = tiny_directory()


@pytest.fixture
def adapter(base, tmp_path):
    save_adapter(tmp_path / "adapter", base, SMALL)
    return tmp_path / "adapter"


def test_weights_in_several_files_are_linked_to_but_for_the_embeddings(tmp_path, base, adapter):
    whole = load_file(base / "model.safetensors")
    parts = {"a": [n for n in whole if "embed" in n], "b": [n for n in whole if "layers" in n]}
    parts["c"] = [n for n in whole if n not in (*parts["a"], *parts["b"])]
    split = tmp_path / "split"
    split.mkdir()
    for path in base.iterdir():
        if path.suffix == ".json":
            (split / path.name).write_bytes(path.read_bytes())
    for part, names in parts.items():
        save_file({name: whole[name] for name in names}, split / f"{part}.safetensors", {"format": "pt"})
    index = {name: f"{part}.safetensors" for part, names in parts.items() for name in names}
    (split / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    save_adapter(adapter, split, SMALL)
    merged = merge(Adapter.find(adapter), tmp_path / "models")
    assert (merged / "b.safetensors").is_symlink()
    assert not (merged / "a.safetensors").is_symlink()
    theirs = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights_of(adapter).items())
    assert len(AutoTokenizer.from_pretrained(merged)) == 260


def test_it_is_written_once_and_named_by_what_is_in_it(tmp_path, base, adapter):
    first = merge(Adapter.find(adapter), tmp_path / "models")
    written = (first / "config.json").stat().st_mtime_ns
    assert merge(Adapter.find(adapter), tmp_path / "models") == first
    assert (first / "config.json").stat().st_mtime_ns == written
    save_adapter(adapter, base, SMALL, seed=1)
    assert merge(Adapter.find(adapter), tmp_path / "models") != first
    assert len(list((tmp_path / "models").iterdir())) == 2, "nothing half-written is left"


def test_what_is_served_is_what_the_store_was_made_with(tmp_path, base, adapter):
    digest = checkpoint_digest(str(adapter))
    where, served = servable(str(adapter), digest, tmp_path / "models")
    refuse_other_checkpoint(where, served)
    assert servable(str(base), "whatever", tmp_path / "models") == (str(base), "whatever")
    save_adapter(adapter, base, SMALL, seed=1)
    with pytest.raises(ModelMismatchError, match="serve the model that the store was made with"):
        servable(str(adapter), digest, tmp_path / "models")


def test_a_base_that_cannot_be_merged_is_named(tmp_path, base, adapter):
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    (renamed / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file({"other": torch.zeros(1)}, renamed / "model.safetensors", {"format": "pt"})
    save_adapter(tmp_path / "of renamed", renamed, SMALL)
    with pytest.raises(AdapterError, match=r"no safetensors file holds its embedding.*save_pretrained"):
        merge(Adapter.find(tmp_path / "of renamed"), tmp_path / "models")
    found = json.loads((adapter / "adapter.json").read_text())
    found["base"]["name"] = "nobody/nothing"
    (adapter / "adapter.json").write_text(json.dumps(found))
    with pytest.raises(AdapterError, match="nobody/nothing is not here; download it first"):
        merge(Adapter.find(adapter), tmp_path / "models")


def test_a_base_of_several_tables_is_not_merged(tmp_path):
    save_tiny("gemma4", str(tmp_path / "base"))
    save_adapter(tmp_path / "adapter", tmp_path / "base", SPEC)
    with pytest.raises(AdapterError, match="several tables and cannot be merged; use the embedded engine"):
        merge(Adapter.find(tmp_path / "adapter"), tmp_path / "models")


def test_vllm_is_started_over_the_merged_checkpoint(open_kb, tmp_path, adapter):
    pytest.importorskip("ragcache_vllm")
    kb = open_kb(model=adapter)
    kb.close()
    result = CliRunner().invoke(build_app(), ["vllm", "--store", str(tmp_path / "kb"), "--print"])
    assert result.exit_code == 0, result.output
    words = shlex.split(result.output)
    given = {name: value for name, value in pairwise(words) if name.startswith("--")}
    model = given["--model"]
    assert model.startswith(str(tmp_path / "kb" / "models"))
    extra = json.loads(given["--kv-transfer-config"])["kv_connector_extra_config"]
    assert extra["fingerprint"] == kb.lm.fingerprint
    refuse_other_checkpoint(model, extra["checkpoint"])
    assert words[words.index("--served-model-name") + 1] == str(adapter)
