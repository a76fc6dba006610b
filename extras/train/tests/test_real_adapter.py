"""Link tokens and LoRA of a real model, in an adapter with peft's tensor names, against plain peft."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, AutoTokenizer

import ragcache as rc
from ragcache.ingest.document import headed
from ragcache.models.adapter import Base, write_adapter
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.lora import LORA_FILE
from ragcache.models.named import cached
from ragcache.prompt import encode_text, prompt_format
from ragcache_train.row_encoder import passage_text
from ragcache_train.special_tokens import choose_spec

SHARED = Path(__file__).parents[4] / "shared"
TENSORS = SHARED / "models" / "smollm2-k5.safetensors"
BASE = "RAGCACHE_TEST_SMOLLM2"
QUESTIONS, PASSAGES, ANSWER_TOKENS = 8, 6, 12


def adapter_of(tensors: Path, base: Path, out: Path) -> Path:
    """Return a directory around tensors with peft's names, without copying them: K = 5, rank 16, alpha 32."""
    tokenizer, config = AutoTokenizer.from_pretrained(base), json.loads((base / "config.json").read_text())
    spec = choose_spec(tokenizer, "link", 5, 16, "reordered")
    assert spec is not None
    assert sorted(spec.added_ids) == list(range(49152, 49234))
    tokenizer.save_pretrained(out)
    (out / LORA_FILE).symlink_to(tensors)
    rows = {"model.embed_tokens": sorted(spec.added_ids)}
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, trainable_token_indices=rows, inference_mode=True)
    lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora.base_model_name_or_path = str(base)
    lora.save_pretrained(out)
    sizes = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    write_adapter(out, Base(str(base), str(checkpoint_digest(str(base))), *sizes, len(tokenizer)), spec, tokenizer)
    return out


@pytest.fixture(scope="module")
def base():
    where = os.environ.get(BASE) or cached("smollm2")
    if where is None or not Path(where).is_dir() or not TENSORS.is_file():
        pytest.skip(f"SmolLM2 ({BASE} names its directory) or ../shared/models/{TENSORS.name} is not here")
    return Path(where)


def lines(path):
    if not path.is_file():
        pytest.skip(f"{path.name} is not here (../shared/data)")
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.mark.slow
def test_a_real_adapter_is_served_as_peft_reads_it_and_link_stays_near_full_prefill(base, tmp_path):
    adapter = adapter_of(TENSORS, base, tmp_path / "adapter")
    lm = rc.load_lm(adapter, dtype="float32", packed=False)
    assert lm.reuse is not None
    assert lm.reuse.link_tokens == 5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(len(lm.tokenizer), mean_resizing=False)
    plain = PeftModel.from_pretrained(plain, adapter).eval()
    corpus = {row["id"]: row for row in lines(SHARED / "data" / "corpus" / "xquad_en.jsonl.gz")}
    far = []
    for number, row in enumerate(lines(SHARED / "data" / "dev" / "xquad_en.questions.jsonl.gz")[:QUESTIONS]):
        gold = row["meta"]["gold_ids"][0]
        others = [id for id in sorted(corpus) if id != gold]
        ids = [others[(97 * number + 31 * place) % len(others)] for place in range(PASSAGES - 1)]
        ids.insert(number % PASSAGES, gold)
        texts = [passage_text(headed(corpus[id]["title"], corpus[id]["text"])) for id in ids]
        form = prompt_format(lm.tokenizer)
        chunks = [encode_text(lm.tokenizer, text) for text in texts]
        prompt = rc.Prompt(form.prefix_ids, chunks, form.suffix_ids(lm.tokenizer, row["question"]))
        whole = torch.tensor([prompt.ids])
        with torch.no_grad():
            said = plain.generate(input_ids=whole, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0, whole.shape[1] :]
            right = plain(torch.cat([whole, said[None]], 1)).logits[0, whole.shape[1] - 1 : -1]
        if number == 0:
            ours = rc.fuse(lm, prompt, "full").next_logits
            torch.testing.assert_close(ours[:49152], right[0, :49152], atol=2e-3, rtol=1e-3)
        blocks = rc.encode(lm, prompt, recipe=lm.reuse.recipe)
        for place in range(len(said)):
            suffix = [*prompt.suffix_ids, *said[:place].tolist()]
            linked = rc.fuse(lm, rc.Prompt(prompt.prefix_ids, chunks, suffix), "link", blocks=blocks).next_logits
            one, other = (logits[:49152].double().log_softmax(-1) for logits in (right[place], linked))
            far.append((number, float(F.kl_div(other, one, log_target=True, reduction="sum"))))
    by_question = [
        sum(kl for n, kl in far if n == number) / sum(n == number for n, _ in far) for number in range(QUESTIONS)
    ]
    mean = sum(by_question) / QUESTIONS
    print(f"KL by question {[round(kl, 3) for kl in by_question]}, mean {mean:.3f}")
    assert 0.02 < mean < 0.4  # 0.18 over 20 questions; the untrained model has 0.8, exact reading 0
