"""The digest of a checkpoint's files, which needs no model."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from ragcache.errors import ModelMismatchError
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache_vllm.merged_adapter import refuse_other_checkpoint


@pytest.fixture
def copied(model_directory, tmp_path):
    return shutil.copytree(model_directory, tmp_path / "copy")


def test_a_copy_has_the_same_digest(model_directory, copied):
    refuse_other_checkpoint(str(copied), checkpoint_digest(str(model_directory)))


def test_one_changed_weight_is_another_checkpoint(model_directory, copied):
    (file,) = copied.glob("*.safetensors")
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelMismatchError, match="not those that the store's blocks were computed with"):
        refuse_other_checkpoint(str(copied), checkpoint_digest(str(model_directory)))


def test_another_configuration_is_another_checkpoint(model_directory, copied):
    config = copied / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": ', '"rope_theta": 1'))
    with pytest.raises(ModelMismatchError):
        refuse_other_checkpoint(str(copied), checkpoint_digest(str(model_directory)))


def test_a_model_that_is_not_here_has_none():
    assert checkpoint_digest("nobody/nothing") is None


def test_a_store_is_bound_to_the_files_of_its_model(open_kb, model_directory):
    assert open_kb().store.documents.properties()["checkpoint"] == checkpoint_digest(str(model_directory))
