"""Adapters: rows beside a base make a model like any other. Oracles put the rows into plain transformers' inputs.

Their matrices are zero here; `extras/train/tests` has some that are trained.
"""

import json
import shutil

import pytest
import torch
from adapters import save_adapter
from covering import covering
from families import METHOD_FAMILIES, VOCAB, assert_same, figure_2, masks_of, oracle_model, random_prompt, save_tiny
from kit.makers import tiny_directory
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_llama
from transformers import AutoModelForCausalLM

import ragcache as rc
from ragcache.errors import AdapterError
from ragcache.models.adapter import Adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.load import load_card
from ragcache.models.lora import DELTA, LORA_FILE
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_plan.stated import shape_of

MARKERS = TrainedTokens("markers", doc_start_id=VOCAB, doc_end_id=VOCAB + 1, positions="reordered")
LINK = TrainedTokens(
    "link", link_tokens=2, link_slots=4, first_link_id=VOCAB, kv_start_id=VOCAB + 8, kv_end_id=VOCAB + 9
)
FREE = next(id for id in range(3, 190) if not {id, id + 1} & set(random_prompt(3).ids))
RESERVED = TrainedTokens("markers", doc_start_id=FREE, doc_end_id=FREE + 1, positions="reordered")
SPECS = {"markers": MARKERS, "link": LINK, "reserved ids": RESERVED}
# Gemma 4 looks the ids up in a second table; what a new id has there is its family's affair.
FAMILIES = [name for name in METHOD_FAMILIES if name != "gemma4"]


def spelt(spec, prompt):
    """The parts of a prompt with its added ids, as `figure_2` takes them; by hand."""
    is_link = spec.method == "link"
    before, after = ([], []) if is_link else ([spec.doc_start_id], [spec.doc_end_id])
    parts = [("text", [*prompt.prefix_ids, *([VOCAB + 8] if is_link else [])])]
    for rank, chunk in enumerate(prompt.chunk_ids):
        parts.append(("chunk", [*before, *chunk, *after]))
        if is_link:
            parts.append(("text", [VOCAB + 2 * rank, VOCAB + 2 * rank + 1]))
    return [*parts, ("text", [*([VOCAB + 9] if is_link else []), *prompt.suffix_ids])]


def oracle_with_rows(model, parts, rows):
    """Plain transformers over embeddings: the model's own, and the rows, scaled as the model scales its own."""
    ids, allowed = figure_2(parts)
    embed = model.get_input_embeddings()
    with torch.no_grad():
        inputs = embed(torch.tensor([[0 if id in rows else id for id in ids]]))
        scale = (embed(torch.tensor([7])) / embed.weight[7]).mean()
        for place, id in enumerate(ids):
            if id in rows:
                inputs[0, place] = rows[id] * scale
        positions = torch.arange(len(ids))[None]
        mask = masks_of(model, allowed)
        return model(inputs_embeds=inputs, position_ids=positions, attention_mask=mask).logits[0, -1]


@pytest.mark.parametrize(("family", "name"), covering(FAMILIES, SPECS))
def test_methods_read_the_rows_as_plain_transformers_does(family, name, tmp_path):
    spec, base = SPECS[name], tmp_path / "base"
    save_tiny(family, str(base))
    rows = save_adapter(tmp_path / "adapter", base, spec)
    lm = rc.load_lm(tmp_path / "adapter")
    assert (lm.reuse, lm.default_method, lm.name) == (spec, spec.method, str(tmp_path / "adapter"))
    prompt = random_prompt(3)
    fused = rc.fuse(lm, prompt, lm.default_method)
    expected = oracle_with_rows(oracle_model(str(base)), spelt(spec, prompt), rows)
    kept = [id for id in range(VOCAB) if id not in spec.added_ids]
    assert_same(fused.next_logits[kept], expected[kept])


base = tiny_directory()


SMALL = TrainedTokens("markers", doc_start_id=258, doc_end_id=259, positions="reordered")


@pytest.fixture
def adapter(base, tmp_path):
    save_adapter(tmp_path / "adapter", base, SMALL)
    return tmp_path / "adapter"


def test_rows_are_read_as_they_were_written(base, tmp_path):
    rows = save_adapter(tmp_path / "adapter", base, SMALL)
    read = Adapter.find(tmp_path / "adapter").rows()
    assert read.keys() == rows.keys() == {258, 259}
    assert all(torch.equal(read[id], rows[id]) for id in rows)
    weight = rc.load_lm(tmp_path / "adapter").model.get_input_embeddings().weight
    assert all(torch.equal(weight[id], rows[id]) for id in rows)
    halved = rc.load_lm(tmp_path / "adapter", dtype="bfloat16").model.get_input_embeddings().weight
    assert all(torch.equal(halved[id], rows[id].bfloat16()) for id in rows)


def test_new_rows_of_a_head_of_its_own_are_zero_and_nothing_is_left_to_chance(adapter):
    torch.rand(1)
    first, second = (rc.load_lm(adapter) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert not first.model.get_output_embeddings().weight[258:].any()


def test_a_card_knows_what_the_model_knows(adapter):
    lm = rc.load_lm(adapter)
    card = load_card(adapter, lm.fingerprint)
    assert (card.vocab_size, card.reuse, card.max_positions) == (lm.vocab_size, lm.reuse, lm.max_positions)
    assert len(card.tokenizer) == len(lm.tokenizer) == 260
    assert shape_of(adapter) == shape_of(Adapter.find(adapter).base.name)


def test_digest_and_fingerprint_cover_base_and_rows_and_not_where_the_base_is(base, adapter, tmp_path):
    save_adapter(tmp_path / "other rows", base, SMALL, seed=1)
    other = save_tiny_llama(tmp_path / "other base", seed=1)
    save_adapter(tmp_path / "of other base", other, SMALL)
    unlike = (base, adapter, tmp_path / "other rows", tmp_path / "of other base")
    assert len({checkpoint_digest(str(one)) for one in unlike}) == 4
    assert len({rc.load_lm(one).fingerprint for one in unlike}) == 4
    moved = shutil.copytree(base, tmp_path / "moved")
    save_adapter(tmp_path / "of moved", moved, SMALL)
    assert checkpoint_digest(str(tmp_path / "of moved")) == checkpoint_digest(str(adapter))
    assert rc.load_lm(tmp_path / "of moved").fingerprint == rc.load_lm(adapter).fingerprint


def edit(adapter, **changes):
    path = adapter / "adapter.json"
    found = json.loads(path.read_text())
    found["base"].update(changes.pop("base", {}))
    path.write_text(json.dumps({**found, **changes}))


def refused(adapter, match):
    with pytest.raises(AdapterError, match=match):
        rc.load_lm(adapter)


def test_other_weights_are_refused(base, adapter, tmp_path):
    changed = shutil.copytree(base, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    edit(adapter, base={"name": str(changed)})
    refused(adapter, "other weights than those of .*changed; put the base back as it was, or train an adapter")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_layers": 3}, "a model with 3 layers and .* has 2; name its own base in adapter.json"),
        ({"hidden_size": 48}, "48 numbers in an embedding row"),
        ({"vocab_size": 300}, "300 ids and .* has 258"),
        ({"num_tokens": 5}, "its tokenizer has 260 tokens and the adapter was trained with 5"),
        ({"name": "/nowhere"}, r"no directory /nowhere; put the base model there.*adapter.json"),
        ({"num_layers": "two"}, "damaged .its num_layers is 'two'.; get the adapter again"),
        ({"colour": "red"}, "damaged.*colour"),
    ],
)
def test_another_model_is_refused_by_what_differs(adapter, changes, reason):
    edit(adapter, base=changes)
    refused(adapter, reason)
    with pytest.raises(AdapterError, match=reason):
        load_card(adapter, "")


@pytest.mark.parametrize("version", [1, 4])
def test_another_version_is_refused(adapter, version):
    """The first version held rows alone."""
    edit(adapter, version=version)
    refused(adapter, f"version {version}, this ragcache reads 2, 3; use the ragcache that wrote it, or train it again")


def test_a_tokenizer_that_is_gone_is_named(adapter):
    for path in adapter.glob("*token*"):
        path.unlink()
    refused(adapter, "its tokenizer has no tokens")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 3}', '{"version": 3, "base": {}, "ragcache": {}}'])
def test_a_damaged_description_is_named(adapter, content):
    (adapter / "adapter.json").write_text(content)
    refused(adapter, "adapter.json is missing or damaged.*get the adapter again")


def test_rows_that_are_missing_or_damaged_are_named(adapter):
    path = adapter / LORA_FILE
    whole = load_file(path)
    name = next(name for name in whole if name.endswith(DELTA))
    for broken in (
        {other: tensor for other, tensor in whole.items() if other != name},
        {**whole, name: whole[name][:1]},
        {**whole, name: whole[name][:, :30]},
        {**whole, name: whole[name] * torch.inf},
    ):
        save_file({name: tensor.contiguous() for name, tensor in broken.items()}, path)
        refused(adapter, "adapter_model.safetensors is missing or damaged")
    path.write_bytes(b"nothing")
    refused(adapter, "adapter_model.safetensors is missing or damaged")
    path.unlink()
    refused(adapter, "adapter_model.safetensors is missing or damaged")


def test_another_id_than_those_stated_is_named(adapter):
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace("259", "9"))
    refused(adapter, "does not hold one row for each of 2 ids")


def test_saved_as_a_whole_it_is_an_ordinary_checkpoint(adapter, tmp_path):
    lm = rc.load_lm(adapter)
    lm.model.set_attn_implementation("eager")
    lm.model.save_pretrained(tmp_path / "whole")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert TrainedTokens.of(plain.config) == SMALL
    assert torch.equal(plain.get_input_embeddings().weight, lm.model.get_input_embeddings().weight)
