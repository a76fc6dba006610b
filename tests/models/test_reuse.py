"""The section of config.json that says how a checkpoint was trained for reuse, and what loading makes of it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_model import LINK, save_tiny_llama
from transformers import LlamaConfig

import ragcache as rc
from ragcache.errors import ConfigError, ModelNotFoundError, PromptError
from ragcache.models.generate import decode
from ragcache.models.trained_tokens import TrainedTokens


def test_a_section_survives_a_configuration_on_disk(tmp_path):
    """test_wire.py holds what each section says."""
    spec = replace(LINK, recipe="prefix")
    config = LlamaConfig()
    config.ragcache = spec.section()
    config.save_pretrained(tmp_path)
    assert TrainedTokens.of(LlamaConfig.from_pretrained(tmp_path)) == spec


def test_link_ids_by_slot_and_place():
    assert [LINK.link_ids(slot) for slot in range(3)] == [[258, 259], [260, 261], [262, 263]]
    assert LINK.added_ids == set(range(258, 266))
    with pytest.raises(PromptError, match="3 passages"):
        LINK.link_ids(3)


def test_the_layout_of_the_authors_llama3_checkpoints():
    """128011 + K*n + j, KV-START 128254, KV-END 128255, as the paper's code has it."""
    spec = TrainedTokens.llama3(5)
    assert spec.link_ids(0) == [128011, 128012, 128013, 128014, 128015]
    assert spec.link_ids(7)[2] == 128011 + 5 * 7 + 2
    assert (spec.kv_start_id, spec.kv_end_id) == (128254, 128255)
    assert spec.link_ids(spec.link_slots - 1)[-1] < spec.kv_start_id <= spec.link_ids(spec.link_slots - 1)[-1] + 5


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ([], "no object"),
        ({"version": 1}, "no object with a method"),
        ({"version": 2, "method": "link"}, "newer ragcache"),
        ({"method": "link"}, "version None"),
        ({"version": 1, "method": "telepathy"}, "telepathy"),
        ({"version": 1, "method": "reposition", "recipe": "lonely"}, "lonely"),
        ({"version": 1, "method": "link", "link_tokens": 5}, "first_link_id and link_slots"),
        ({"version": 1, "method": "link", "link_tokens": -1}, "link_tokens is -1"),
        ({"version": 1, "method": "link", "link_tokens": "5"}, "link_tokens is '5'"),
        ({"version": 1, "method": "link", "kv_start_id": 5}, "both or neither"),
        ({**LINK.section(), "kv_end_id": 261}, "overlap"),
        ({"version": 1, "method": "packet"}, "'packet' is unknown; it is one of link, markers, reposition"),
        ({**LINK.section(), "first_packet_id": 107}, "first_packet_id, which this ragcache does not know"),
        ({**LINK.section(), "anchor_tokens": 8}, "anchor_tokens, which this ragcache does not know"),
        ({"version": 1, "method": "link", "first_link_id": 8, "link_slots": 1.5}, "link_slots is 1.5"),
        ({"version": 1, "method": "markers", "doc_start_id": 3, "positions": "reordered"}, "doc_end_id"),
        ({"version": 1, "method": "markers", "doc_start_id": 3, "doc_end_id": 4, "positions": "odd"}, "odd"),
        ({"version": 1, "method": "reposition", "colour": "red"}, "colour"),
    ],
)
def test_a_section_that_cannot_be_read_is_named(section, named):
    config = LlamaConfig()
    config.ragcache = section
    with pytest.raises(ConfigError, match=named):
        TrainedTokens.of(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny checkpoint that holds its added tokens, 258 to 265."""
    return save_tiny_llama(tmp_path_factory.mktemp("linked"), reuse=LINK)


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["ragcache"].update(changes)
    path.write_text(json.dumps(config))


def test_a_model_knows_its_training(saved, tmp_path):
    lm = rc.load_lm(saved)
    assert (lm.reuse, lm.default_method) == (LINK, "link")
    plain = rc.load_lm(save_tiny_llama(tmp_path / "plain"))
    assert (plain.reuse, plain.default_method) == (None, "cacheblend")


def test_the_fingerprint_knows_the_training(saved, tmp_path):
    other = shutil.copytree(saved, tmp_path / "other")
    edit_config(other, link_slots=2)
    assert rc.load_lm(other).fingerprint != rc.load_lm(saved).fingerprint


def test_ids_outside_the_vocabulary_are_named(saved, tmp_path):
    other = shutil.copytree(saved, tmp_path / "other")
    edit_config(other, kv_end_id=266)
    with pytest.raises(ConfigError, match=r"token id 266.*0 to 265"):
        rc.load_lm(other)


def test_another_tokenizer_is_refused(saved, tmp_path):
    other = shutil.copytree(saved, tmp_path / "other")
    plain = save_tiny_llama(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / name, other / name)
    with pytest.raises(ConfigError, match=r"token id 258.*saved with the checkpoint"):
        rc.load_lm(other)


def test_a_bundled_name_without_its_files_says_so(monkeypatch):
    monkeypatch.setattr("ragcache.models.hub.BUNDLED", {"mini": "nowhere"})
    with pytest.raises(ModelNotFoundError, match=r"'mini'.*no directory"):
        rc.load_lm("mini")


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_added_ids_are_never_sampled(saved, temperature):
    """Decoding meets logits in which every added id beats all others."""
    lm = rc.load_lm(saved)
    with torch.no_grad():
        head = lm.model.get_output_embeddings().weight
        lm.model.model.norm.weight.fill_(0.0)
        lm.model.model.norm.weight[0] = 1.0
        head.fill_(0.0)
        head[sorted(LINK.added_ids), 0] = 50.0
        head[sorted(LINK.added_ids)[::2], 0] = -50.0  # whatever the sign of the state, half of them win
    fused = rc.fuse(lm, rc.Prompt([5], [[7, 8]], [9]), method="reposition")
    assert int(fused.next_logits.argmax()) in LINK.added_ids, "the test would not notice"
    sampling = rc.Sampling(max_tokens=20, temperature=temperature, seed=1)
    answer = list(decode(lm, fused.cache, fused.next_logits, fused.prompt.num_tokens, sampling))
    assert len(answer) == 20
    assert not LINK.added_ids & set(answer)


def test_what_a_caller_rules_out_is_never_sampled(saved):
    lm = rc.load_lm(saved)
    fused = rc.fuse(lm, rc.Prompt([5], [[7, 8]], [9]), method="reposition")
    best = int(fused.next_logits.argmax())
    sampling = rc.Sampling(max_tokens=1)
    (token,) = decode(lm, fused.cache, fused.next_logits, fused.prompt.num_tokens, sampling, never=[best])
    second = fused.next_logits.clone()
    second[[best, *lm.reuse.added_ids]] = -torch.inf
    assert token == int(second.argmax())
