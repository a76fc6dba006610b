"""LoRA that acts on passages alone: blocks equal peft's, and everything else equals the base model's."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from run_options import QA_LINES, engine_prompt, log_of, run_options, training_row
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ragcache as rc
from ragcache.errors import AdapterError, ConfigError
from ragcache.kv.block_key import Recipe
from ragcache.models.lora import LORA_FILE
from ragcache_train.lora import add_lora
from ragcache_train.masked_pass import NAME, answer_logits, register
from ragcache_train.train_batches import collate, lay_out
from ragcache_train.trainer import train
from ragcache_vllm.merged_adapter import servable
from tools.shrink_adapter import shrink


@pytest.fixture(scope="module")
def options(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    distil = {"objective": "distill", "recipe": "prefix", "lora_rank": 3, "learning_rate": 3e-2, "steps": 3}
    return run_options(base, folder, QA_LINES, **distil, evaluate=folder / "rows.jsonl", evaluate_every=3)


@pytest.fixture(scope="module", params=[0, 2], ids=["no links", "links"])
def trained(options, request):
    out = options.out.with_name(f"links {request.param}")
    return train(replace(options, link_tokens=request.param, out=out)).out


def test_training_moves_passages_and_leaves_the_single_text_alone(trained):
    first, last = (log_of(trained, "evaluation.jsonl")[at] for at in (0, -1))
    assert first["kl_together"] == last["kl_together"] == 0
    assert last["kl"] != first["kl"]
    assert json.loads((trained / "adapter.json").read_text())["version"] == 3


def test_blocks_are_those_of_peft_after_a_beginning_read_by_the_base(base, trained):
    lm = rc.load_lm(trained)
    prompt, recipe = engine_prompt(lm.tokenizer), Recipe("primer", primer=(130, 131, 132))
    head = [*prompt.prefix_ids, *recipe.primer]
    blocks = lm.encode(prompt.chunk_ids, recipe, prompt.prefix_ids)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(lm.vocab_size, mean_resizing=False)
    with torch.no_grad():
        held = plain(input_ids=torch.tensor([head]), use_cache=True).past_key_values
        pairs = [(layer.keys.clone(), layer.values.clone()) for layer in held.layers]
        adapted = PeftModel.from_pretrained(plain, trained).eval()
        found = {}
        for name, module in adapted.named_modules():
            if name.endswith(("k_proj", "v_proj")):
                module.register_forward_hook(lambda layer, args, out, name=name: found.update({name: out[0]}))
        for chunk, block in zip(prompt.chunk_ids, blocks, strict=True):
            before = type(held)()
            for at, pair in enumerate(pairs):
                before.update(*pair, at)
            adapted(input_ids=torch.tensor([chunk]), past_key_values=before)
            for layer in range(len(pairs)):
                for side, ours in (("k", block.layer_keys(layer)), ("v", block.layer_values(layer))):
                    (theirs,) = (out for name, out in found.items() if f"layers.{layer}.self_attn.{side}_proj" in name)
                    theirs = theirs.unflatten(-1, (ours.shape[0], -1)).transpose(0, 1)
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_read_as_a_single_text_it_is_the_base(base, trained):
    lm, plain = rc.load_lm(trained, packed=False), rc.load_lm(base, packed=False)
    prompt = engine_prompt(lm.tokenizer)
    ours, theirs = (rc.fuse(one, prompt, "full").next_logits[:258] for one in (lm, plain))
    torch.testing.assert_close(ours, theirs, atol=0 if lm.vocab_size == plain.vocab_size else 1e-5, rtol=0)
    assert lm.fingerprint != plain.fingerprint
    read = [one.encode([prompt.chunk_ids[0]])[0].layer_values(0) for one in (lm, plain)]
    assert not torch.allclose(*read)


def test_the_engine_reads_a_prompt_as_training_does(base, trained):
    lm = rc.load_lm(trained)
    method = "link" if lm.reuse.link_tokens else "reposition"
    prompt = engine_prompt(lm.tokenizer)
    register()
    student = rc.load_lm(base, packed=False)
    student.model.set_attn_implementation(NAME)
    student.model.resize_token_embeddings(lm.vocab_size, mean_resizing=False)
    rows = load_file(trained / "adapter_model.safetensors")
    model = add_lora(student.model, lm.reuse, 3, None, on_passages=True)
    named = {name.replace(".weight", ".default.weight"): one for name, one in rows.items() if ".lora_" in name}
    model.load_state_dict(named, strict=False)
    if lm.reuse.link_tokens:
        (delta,) = (one for name, one in rows.items() if name.endswith("tokens_delta"))
        (kept,) = (one for name, one in model.named_parameters() if "trainable_tokens_delta" in name)
        kept.data.copy_(delta)
    with torch.no_grad():
        batch = collate([lay_out(training_row(lm.tokenizer), lm.reuse, True)])
        theirs = answer_logits(model, model, batch, student.rope)[0, :258]
    ours = rc.fuse(lm, prompt, method, recipe="prefix").next_logits[:258]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_an_engine_without_adapters_gets_the_base_and_the_rows(base, trained, tmp_path):
    directory, digest = servable(str(trained), "", tmp_path)
    assert digest
    served, lm = rc.load_lm(directory, packed=False), rc.load_lm(trained, packed=False)
    for name, weight in served.model.state_dict().items():
        assert torch.equal(weight, lm.model.state_dict()[name])
    assert served.reuse == lm.reuse


def test_it_goes_on_from_its_own_kind_alone(options, trained):
    links = json.loads((trained / "adapter.json").read_text())["ragcache"].get("link_tokens", 0)
    again = replace(options, model=trained, link_tokens=links, steps=1, learning_rate=1e-12, out=options.out / "again")
    held = [load_file(out / "adapter_model.safetensors") for out in (trained, train(again).out)]
    for name, tensor in held[0].items():
        torch.testing.assert_close(held[1][name], tensor, atol=1e-9, rtol=0)
    with pytest.raises(ConfigError, match=r"lora_on is 'all' and the matrices of .* were trained with 'passages'"):
        train(replace(again, lora_on="all", out=options.out / "other"))
    shutil.rmtree(options.out)


def test_what_it_cannot_go_with_is_refused_by_name(options):
    for changes, match in (
        ({"lora_on": "passages", "objective": "labels", "recipe": "isolated", "evaluate": None}, "objective='distill'"),
        ({"lora_on": "passages", "merge": True}, "cannot be merged"),
        ({"lora_on": "all", "lora_rank": 0}, "add lora_rank"),
        ({"lora_on": "questions"}, "lora_on"),
    ):
        with pytest.raises(ConfigError, match=match):
            replace(options, **changes)


def test_damaged_matrices_are_named(trained, tmp_path):
    path = shutil.copytree(trained, tmp_path / "adapter") / "adapter_model.safetensors"
    held = load_file(path)
    name = next(name for name in held if name.endswith("q_proj.lora_A.weight"))
    for change, match in (
        ({name: held[name][:, :5].contiguous()}, "a layer has"),
        ({name.replace("q_proj", "z_proj"): held[name].clone()}, "z_proj"),
    ):
        save_file({**held, **change}, path)
        with pytest.raises(AdapterError, match=match):
            rc.load_lm(path.parent)
    path.write_bytes(b"half")
    with pytest.raises(AdapterError, match="damaged"):
        rc.load_lm(path.parent)


def test_a_smaller_adapter_reads_nearly_as_the_whole_one(trained, tmp_path):
    """All three ranks are kept, so the only loss is that of rounding to float8, whose fraction has 3 bits."""
    assert shrink(trained, tmp_path / "small", 3) == pytest.approx(1)
    whole, small = rc.load_lm(trained), rc.load_lm(tmp_path / "small")
    chunk = engine_prompt(whole.tokenizer).chunk_ids[0]
    theirs, ours = (lm.encode([chunk])[0].layer_values(1) for lm in (whole, small))
    base = rc.load_lm(json.loads((trained / "adapter.json").read_text())["base"]["name"])
    moved = (theirs - base.encode([chunk])[0].layer_values(1)).norm()
    assert 0 < (ours - theirs).norm() < 0.1 * moved
    files = [path.stat().st_size for path in (trained / LORA_FILE, tmp_path / "small" / LORA_FILE)]
    assert files[1] < 0.7 * files[0]


def products_of(adapter):
    """Return what the matrices add to each layer's weight, float64 [out_features, in_features], by peft's formula."""
    stated = json.loads((adapter / "adapter_config.json").read_text())
    held = {name: tensor.double() for name, tensor in load_file(adapter / LORA_FILE).items()}
    return {
        name: stated["lora_alpha"] / stated["r"] * held[name.replace("lora_A", "lora_B")] @ down
        for name, down in held.items()
        if "lora_A" in name
    }


def test_training_goes_on_from_a_smaller_adapter(options, trained, tmp_path):
    """Its alpha is another, and what follows the last layer's values is not in its file and starts anew."""
    shrink(trained, tmp_path / "small", 3)
    links = json.loads((trained / "adapter.json").read_text())["ragcache"].get("link_tokens", 0)
    again = replace(options, model=tmp_path / "small", link_tokens=links, steps=1, out=tmp_path / "again")
    small, same = products_of(tmp_path / "small"), products_of(train(replace(again, learning_rate=1e-12)).out)
    assert 0 < len(small) < len(same)
    for name, product in same.items():
        wanted = small[name] if name in small else torch.zeros_like(product)
        torch.testing.assert_close(product, wanted, atol=1e-7, rtol=1e-5)
    moved = products_of(train(replace(again, out=tmp_path / "on")).out)
    assert all((moved[name] - product).norm() > 0.01 * product.norm() for name, product in small.items())


def test_half_a_product_is_damage_to_training_too(options, trained, tmp_path):
    path = shutil.copytree(trained, tmp_path / "adapter") / LORA_FILE
    held = load_file(path)
    for end in ("q_proj.lora_A.weight", "q_proj.lora_B.weight"):
        save_file({name: tensor for name, tensor in held.items() if not name.endswith(end)}, path)
        with pytest.raises(AdapterError, match=r"q_proj.*get it again"):
            train(replace(options, model=path.parent, out=tmp_path / "again"))
